"""The garbage collector of a process whose event loop must not stand still.

What start-up has made (modules, classes, tables: hundreds of thousands of objects) is never garbage, and a full
collection that scans it holds up the loop for 0.2 s and more, in the middle of a run.
"""

from __future__ import annotations

import gc

# Young collections every so many new objects, older ones every so many younger: a loop that holds 100,000 objects of
# samples in flight, none of them in cycles, would otherwise scan them all many times a second.
THRESHOLDS = (20_000, 20, 50)


def settle_collector() -> None:
    """Collect once, and take everything that is there out of later collections. Call it when start-up is over."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
