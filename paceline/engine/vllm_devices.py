"""Which GPUs of a machine each of its vLLM engines takes. Law: two engines share one only where there are too few."""

from __future__ import annotations

from collections.abc import Sequence


def devices_of(place: int, workers: int, visible: Sequence[str]) -> list[str]:
    """The GPUs of the engine number `place` (from 0) of this machine, which has a worker on each of `workers`.

    `visible` are the names of all that may be used. With fewer than one engine needs, all: vLLM says what is wrong.
    Beyond the last whole set the engines begin at the first one again.

    Example: `devices_of(1, 2, ["0", "1", "2", "3"])` is `["2", "3"]`.
    """
    sets = len(visible) // workers
    if sets == 0:
        return list(visible)
    first = place % sets * workers
    return list(visible[first : first + workers])
