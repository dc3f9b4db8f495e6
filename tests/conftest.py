"""Settings for every test: one thread for each numeric library, no look-ups on a hub, no telemetry.

They are environment variables, set before any test imports a library that reads them, so that child processes of a
test get them too. A value that the caller has set stays.
"""

from __future__ import annotations

import os

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)
