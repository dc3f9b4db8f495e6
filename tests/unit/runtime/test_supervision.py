"""Starting, watching and stopping the parts of a run, with fake parts, on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from paceline.core.errors import DeadlineExceeded, PacelineError, SyncError, WorkerDied
from paceline.core.waits import Waits
from paceline.runtime.supervision import START_SECONDS, Supervisor
from paceline.testing.recording import RecordingEvents
from paceline.testing.virtual_clock import VirtualClock, run_virtual


async def for_ever() -> None:
    await asyncio.Event().wait()


async def at_once() -> None:
    return


def failing(error: BaseException, after: float = 0.0) -> Callable[[], Coroutine[Any, Any, None]]:
    async def fail() -> None:
        await asyncio.sleep(after)
        raise error

    return fail


class FakePart:
    def __init__(self, run: Callable[[], Any] = for_ever, start: Callable[[], Any] = at_once) -> None:
        self._run = run
        self._start = start
        self.stopped = False
        self.calls: list[tuple[str, Any]] = []
        self.losses: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def start(self) -> None:
        await self._start()

    async def run(self) -> None:
        await self._run()

    async def stop(self) -> None:
        self.stopped = True

    async def lose_replica(self, role: str, reason: str) -> None:
        self.calls.append(("lose_replica", role))

    async def next_loss(self, wait_seconds: float) -> tuple[str, str] | None:
        return await self.losses.get()

    async def add_replicas(self, parts: list[FakePart]) -> None:
        self.calls.append(("add_replicas", parts))

    async def remove_replicas(self, roles: list[str]) -> None:
        self.calls.append(("remove_replicas", roles))


class FakeRuntime:
    """Launches the parts that are listed for a role, one after another."""

    def __init__(self, parts: dict[str, list[FakePart]]) -> None:
        self.parts = parts
        self.killed: list[str] = []

    async def start(self) -> None:
        return

    def launch(self, role: str) -> FakePart:
        return self.parts[role].pop(0)

    async def connect(self) -> None:
        return

    def kill(self, role: str) -> None:
        self.killed.append(role)

    def stop(self, deadline_seconds: float) -> None:
        return


class Run:
    """A supervised run over fake parts."""

    def __init__(
        self, *replicas: FakePart, trainer: FakePart, rollouter: FakePart | None = None, max_restarts: int = 0
    ) -> None:
        self.trainer = trainer
        self.rollouter = rollouter or FakePart()
        self.synchronizer = FakePart()
        first, *later = replicas or (FakePart(),)
        self.all = [trainer, self.rollouter, self.synchronizer, first]
        self.runtime = FakeRuntime(
            {
                "trainer": [trainer],
                "rollouter": [self.rollouter],
                "synchronizer": [self.synchronizer],
                "replica-0": [first, *later],
            }
        )
        self._max_restarts = max_restarts
        self.spare_roles: list[str] = []
        self.supervisor: Supervisor | None = None

    def supervise(self) -> None:
        async def main(clock: VirtualClock) -> None:
            supervisor = self.supervisor = Supervisor(
                runtime=self.runtime,
                replica_roles=["replica-0"],
                other_roles=["trainer", "rollouter", "synchronizer"],
                max_restarts=self._max_restarts,
                waits=Waits(who="driver", clock=clock, events=RecordingEvents()),
                on_started=lambda: None,
                spare_roles=self.spare_roles,
            )
            try:
                async with asyncio.timeout(2 * START_SECONDS):
                    await supervisor.run()
            finally:
                await supervisor.stop()

        run_virtual(main)


def dying(role: str, after: float = 0.0) -> FakePart:
    return FakePart(failing(WorkerDied(f"{role} died", role), after))


async def a_moment() -> None:
    """Ends when nothing else can be done."""
    await asyncio.sleep(0.2)


def test_the_end_of_the_trainer_is_the_end_of_the_run() -> None:
    run = Run(trainer=FakePart(at_once))
    run.supervise()
    assert all(part.stopped for part in run.all)


@pytest.mark.parametrize("error", [SyncError("boom"), WorkerDied("the queue died", "message_queue")])
def test_the_first_error_of_any_part_is_raised_as_itself(error: PacelineError) -> None:
    with pytest.raises(type(error), match=error.message):
        Run(trainer=FakePart(), rollouter=FakePart(failing(error))).supervise()


def test_a_death_is_named_before_the_errors_that_follow_from_it() -> None:
    run = Run(trainer=FakePart(failing(SyncError("a sync failed"))), rollouter=dying("rollouter"))
    with pytest.raises(WorkerDied, match="rollouter died"):
        run.supervise()


def test_a_part_that_ends_too_early_is_named() -> None:
    with pytest.raises(WorkerDied, match="rollouter ended before the run was done"):
        Run(trainer=FakePart(), rollouter=FakePart(at_once)).supervise()


def test_a_part_that_does_not_start_is_named() -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        Run(FakePart(start=for_ever), trainer=FakePart()).supervise()
    assert caught.value.culprit == "replica-0"


def test_a_dead_replica_is_started_again_and_joins() -> None:
    second = FakePart()
    run = Run(dying("replica-0"), second, trainer=FakePart(a_moment), max_restarts=1)
    run.supervise()
    assert run.rollouter.calls == [("lose_replica", "replica-0")]
    assert run.synchronizer.calls == [("add_replicas", [second])]
    assert second.stopped


def test_a_replica_that_dies_too_often_ends_the_run_when_it_was_the_last() -> None:
    run = Run(dying("replica-0"), dying("replica-0"), trainer=FakePart(), max_restarts=1)
    with pytest.raises(WorkerDied, match="no replica is left and none may be started again: replica-0 died"):
        run.supervise()
    assert run.synchronizer.calls[-1] == ("remove_replicas", ["replica-0"])


def test_a_replica_that_does_not_answer_is_ended() -> None:
    rollouter = FakePart()
    run = Run(trainer=FakePart(a_moment), rollouter=rollouter)
    rollouter.losses = asyncio.Queue()
    rollouter.losses.put_nowait(("replica-0", "no answer"))
    run.supervise()
    assert run.runtime.killed == ["replica-0"]


def test_news_of_the_process_before_do_not_end_the_one_that_returns() -> None:
    rollouter = FakePart()

    async def start_slowly() -> None:
        rollouter.losses.put_nowait(("replica-0", "died"))
        await a_moment()

    second = FakePart(start=start_slowly)
    run = Run(
        dying("replica-0"), second, trainer=FakePart(lambda: asyncio.sleep(0.5)), rollouter=rollouter, max_restarts=1
    )
    rollouter.losses = asyncio.Queue()
    run.supervise()
    assert run.runtime.killed == ["replica-0"]  # the dead one alone
    assert run.synchronizer.calls == [("add_replicas", [second])]


def test_a_replica_that_cannot_join_is_started_once_more() -> None:
    class RefusesFirst(FakePart):
        async def add_replicas(self, parts: list[FakePart]) -> None:
            await super().add_replicas(parts)
            if len(self.calls) == 1:
                raise DeadlineExceeded("the rollouter did not answer", "rollouter", 2.0)

    second, third = FakePart(), FakePart()
    run = Run(dying("replica-0"), second, third, trainer=FakePart(a_moment), max_restarts=2)
    run.synchronizer = RefusesFirst()
    run.runtime.parts["synchronizer"] = [run.synchronizer]
    run.supervise()
    assert run.synchronizer.calls == [("add_replicas", [second]), ("add_replicas", [third])]


def test_the_run_goes_on_without_a_spare_part_that_died() -> None:
    run = Run(trainer=FakePart(a_moment), max_restarts=5)
    spare = dying("validator")
    run.runtime.parts["validator"] = [spare]
    run.spare_roles = ["validator"]
    run.supervise()
    assert spare.stopped
    assert run.runtime.killed == []
    assert run.rollouter.calls == []


def test_a_spare_part_with_a_fault_of_ours_ends_the_run() -> None:
    run = Run(trainer=FakePart())
    run.runtime.parts["validator"] = [FakePart(failing(SyncError("a fault")))]
    run.spare_roles = ["validator"]
    with pytest.raises(SyncError, match="a fault"):
        run.supervise()


def test_a_replica_that_is_added_joins_and_is_started_again_like_all() -> None:
    added: list[str] = []

    async def add_in_between() -> None:
        await a_moment()
        assert run.supervisor is not None
        added.append(run.supervisor.add_replica())
        await a_moment()

    run = Run(trainer=FakePart(add_in_between), max_restarts=1)
    first, second = dying("replica-1"), FakePart()
    run.runtime.parts["replica-1"] = [first, second]
    run.supervise()
    assert added == ["replica-1"]
    assert [call for call in run.synchronizer.calls if call[0] == "add_replicas"][-1] == ("add_replicas", [second])
    assert run.rollouter.calls == [("lose_replica", "replica-1")]
    assert second.stopped
