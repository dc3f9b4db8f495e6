"""The public suite of `paceline.testing.checkpoint_engine_contract` on every checkpoint engine, and on a broken one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from paceline.core.manifest import WeightManifest
from paceline.core.weight_ports import StagedWeights, WeightReceiver
from paceline.testing.checkpoint_engine_contract import CHECKPOINT_ENGINE_CONTRACT, BothEnds
from tests.contract.checkpoint_engine_links import LINKS, Link

Promise = Callable[[BothEnds], None]


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    made = LINKS[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize("promise", CHECKPOINT_ENGINE_CONTRACT, ids=lambda promise: str(promise.__name__))
def test_it_keeps(link: Link, promise: Promise) -> None:
    promise(BothEnds(link.sender(), link.receiver))


class StagesTheFirstForEver:
    """A receiver that gives everybody the version that it has staged first."""

    def __init__(self, receiver: WeightReceiver, kept: list[StagedWeights]) -> None:
        self._receiver = receiver
        self._kept = kept
        self.close = receiver.close

    def stage(self, manifest: WeightManifest, *arguments: object, **keywords: object) -> StagedWeights:
        if not self._kept:
            self._kept.append(self._receiver.stage(manifest))
        return self._kept[0]


def broken_ends(link: Link) -> BothEnds:
    kept: list[StagedWeights] = []
    return BothEnds(link.sender(), lambda name: StagesTheFirstForEver(link.receiver(name), kept))


def test_a_broken_engine_is_found() -> None:
    found: list[str] = []
    for promise in CHECKPOINT_ENGINE_CONTRACT:
        link = LINKS["in_process"]()
        try:
            promise(broken_ends(link))
        except AssertionError:
            found.append(promise.__name__)
        finally:
            link.close()
    assert "nothing_is_held_after_a_receiver_was_closed" in found
