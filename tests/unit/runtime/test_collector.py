"""Start-up is taken out of later collections."""

from __future__ import annotations

import gc

from paceline.runtime.collector import THRESHOLDS, settle_collector


def test_what_is_there_is_not_scanned_again() -> None:
    kept = [[number] for number in range(1000)]
    before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    try:
        settle_collector()
        assert gc.get_freeze_count() >= before + len(kept)
        assert gc.get_threshold() == THRESHOLDS
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
