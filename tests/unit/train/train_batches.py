"""One group of responses with given lengths and rewards, and the batch that is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.sample import Prompt, Response, Sample, TrainBatch
from paceline.core.version import Lineage, Version
from paceline.train.lag_gate import LagGate
from paceline.train.train_batch import make_train_batch
from tests.unit.config_keys.keys import config_with


class NoSource:
    """Nothing is on its way."""

    async def outstanding_before(self, version: int, consumed: Sequence[str]) -> list[str]:
        return []

    async def version_captured(self, version: int, trained: int) -> None:
        return

    async def samples_dropped(self, sample_ids: Sequence[str]) -> None:
        return

    async def snapshot(self) -> bytes:
        return b""


def response(length: int, reward: float, versions: Sequence[int] | None = None) -> Response:
    """`versions` are n of life 1."""
    packed = [Version(1, n).packed for n in versions or [3] * length]
    return Response(list(range(length)), [-1.0] * length, packed, "stop", "", reward)


def batch_of(responses: Sequence[Response], settings: Mapping[str, object], captured: int = 3) -> TrainBatch:
    """The batch of one sample, consumed under version 1.`captured`."""
    config = config_with(settings)
    lineage = Lineage(1)
    sample = Sample("1-0", 1, Prompt("p", "?", (1, 2), "", "made"), list(responses))
    gate = LagGate(config.async_training, NoSource(), lineage)
    return make_train_batch([sample], Version(1, captured), config=config, lineage=lineage, gate=gate)
