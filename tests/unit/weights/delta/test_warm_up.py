"""The warm-up runs every kernel for the element types that runs serve."""

from __future__ import annotations

import pytest
import torch

from paceline.weights.delta import scan, warm_up
from paceline.weights.delta.planes import Level
from tests.unit.weights.delta.cases import LEVELS

KERNELS = ("find_changes", "count_changes", "shift", "patterns_of", "flip_at")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_is_left_to_compile_for_the_type(dtype: torch.dtype, level: Level) -> None:
    warm_up(dtype, level)
    width = f"uint{8 * dtype.itemsize}"
    for name in KERNELS:
        compiled = str(getattr(scan, name).signatures)
        assert width in compiled, f"{name} is not compiled for {width}"
