"""Both halves of a sender in one call, for tests and examples in which nothing happens between them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.core.manifest import WeightManifest
from paceline.core.weight_ports import WeightSender


def publish(
    sender: WeightSender,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    version: int,
    base_version: int | None = None,
) -> WeightManifest:
    """Capture and publish; raises what either raises."""
    sender.capture(named_tensors, version, base_version)
    return sender.publish().manifest
