"""The parts and their order as users of verl's fully_async_policy know them (docs/architecture.md, "The two ways").

Everything is built on recording fakes exactly as the reference builds it, and names, arguments and order are compared.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence

import pytest

from paceline.core.commands import SyncReport
from paceline.core.config import build_config
from paceline.core.errors import Superseded, SyncError
from paceline.core.events import SyncAborted, SyncCompleted
from paceline.message_queue import MessageQueue
from paceline.rollout.rollouter import FullyAsyncRollouter
from paceline.runtime.system import SystemClock
from paceline.runtime.task_runner import FullyAsyncTaskRunner
from paceline.sync.checkpoint_engine_manager import CheckpointEngineManager
from paceline.sync.parameter_synchronizer import ParameterSynchronizer
from paceline.testing.recording import (
    CallLog,
    RecordingEvents,
    RecordingQueue,
    RecordingReplica,
    RecordingRollouter,
    RecordingTrainer,
)
from paceline.train.trainer import FullyAsyncTrainer


def build(
    log: CallLog, events: RecordingEvents, replicas: Sequence[RecordingReplica] | None = None
) -> ParameterSynchronizer:
    fleet = replicas or [RecordingReplica(log, "replica-0"), RecordingReplica(log, "replica-1")]
    return ParameterSynchronizer(
        build_config({}),
        RecordingTrainer(log),
        RecordingRollouter(log, fleet),
        RecordingQueue(log),
        clock=SystemClock(),
        events=events,
    )


def sync(synchronizer: ParameterSynchronizer, *arguments: object, **keywords: object) -> SyncReport:
    return asyncio.run(synchronizer.sync_weights(*arguments, **keywords))  # type: ignore[arg-type]


def test_a_sync_calls_the_parts_in_this_order() -> None:
    log, events = CallLog(), RecordingEvents()
    report = sync(build(log, events), 3, validate=True, global_steps=12, use_trainer_do_validate=False)
    names = log.names()
    assert names[:2] == ["trainer.capture_weights", "trainer.publish_weights"]
    assert set(names[2:4]) == {"replica-0.stage", "replica-1.stage"}
    for replica in ("replica-0", "replica-1"):
        mine = [name for name in names if name.startswith(replica)]
        assert mine == [f"{replica}.{step}" for step in ("stage", "pause", "swap", "resume")]
    assert names.index("replica-0.swap") > names.index("replica-1.stage")
    assert names[-3:] == [
        "rollouter.confirm_replicas",
        "queue.update_param_version",
        "rollouter.update_param_version",
    ]
    assert log.calls[-3][2] == {"confirmed": {"replica-0": 3, "replica-1": 3}, "fenced": {}}
    assert log.calls[-1][2] == {
        "version": 3,
        "validate": True,
        "global_steps": 12,
        "use_trainer_do_validate": False,
    }
    assert (report.version, report.published, report.verified) == (3, 3, True)
    assert report.confirmed == {"replica-0": 3, "replica-1": 3}
    assert len(events.of(SyncCompleted)) == 1


def test_versions_only_rise() -> None:
    log, events = CallLog(), RecordingEvents()
    synchronizer = build(log, events)

    async def main() -> None:
        assert synchronizer.get_current_param_version() == -1
        await synchronizer.sync_weights(1)
        with pytest.raises(Superseded, match="not newer"):
            await synchronizer.sync_weights(1)
        assert synchronizer.get_current_param_version() == 1

    asyncio.run(main())
    assert log.names().count("trainer.capture_weights") == 1


def test_concurrent_syncs_are_serialised_or_superseded() -> None:
    log, events = CallLog(), RecordingEvents()
    synchronizer = build(log, events)

    async def main() -> list[SyncReport | BaseException]:
        calls = [synchronizer.sync_weights(version) for version in (6, 8, 7)]
        return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(main())
    assert [isinstance(result, SyncReport) for result in results] == [True, True, False]
    assert isinstance(results[2], Superseded)
    published = [call[2]["version"] for call in log.calls if call[:2] == ("queue", "update_param_version")]
    assert published == [6, 8]


class LyingReplica(RecordingReplica):
    """Says that it staged something else."""

    async def stage(self, command):  # type: ignore[no-untyped-def]
        report = await super().stage(command)
        return type(report)(replica=report.replica, version=report.version, digest="other", seconds=0.0)


def test_a_failed_replica_is_fenced_by_name_and_the_others_go_on() -> None:
    log, events = CallLog(), RecordingEvents()
    fleet = [RecordingReplica(log, "replica-0"), LyingReplica(log, "replica-1")]
    report = sync(build(log, events, fleet), 1)
    assert report.confirmed == {"replica-0": 1}
    assert list(report.fenced) == ["replica-1"]
    assert "staged other" in report.fenced["replica-1"]
    assert "replica-1.swap" not in log.names()
    assert "replica-1.discard_staged" in log.names()
    (told,) = [call[2] for call in log.calls if call[1] == "confirm_replicas"]
    assert told["confirmed"] == {"replica-0": 1}
    assert list(told["fenced"]) == ["replica-1"]


def test_when_no_replica_confirms_nothing_is_published_and_all_are_named() -> None:
    log, events = CallLog(), RecordingEvents()
    fleet = [LyingReplica(log, "replica-0"), LyingReplica(log, "replica-1")]
    synchronizer = build(log, events, fleet)
    with pytest.raises(SyncError, match=r"reached no replica: replica-. staged other"):
        sync(synchronizer, 1)
    assert "queue.update_param_version" not in log.names()
    assert "rollouter.confirm_replicas" not in log.names()
    assert [event.phase for event in events.of(SyncAborted)] == ["update_weights"]
    assert synchronizer.get_current_param_version() == -1


def test_the_manager_stands_alone() -> None:
    log = CallLog()
    replicas = [RecordingReplica(log, "replica-0")]
    manager = CheckpointEngineManager(
        build_config({}), RecordingTrainer(log), replicas, clock=SystemClock(), events=RecordingEvents()
    )
    update = asyncio.run(manager.update_weights(5))
    assert update.version == 5
    published = ["trainer.capture_weights", "trainer.publish_weights"]
    assert log.names() == [*published, *(f"replica-0.{m}" for m in ("stage", "pause", "swap", "resume"))]


def test_wait_last_valid_and_save_go_to_the_rollouter() -> None:
    log = CallLog()
    synchronizer = build(log, RecordingEvents())

    async def main() -> None:
        await synchronizer.wait_last_valid()
        await synchronizer.rollouter_save_checkpoint("global_step_4")

    asyncio.run(main())
    assert log.calls == [
        ("rollouter", "wait_validations", {}),
        ("rollouter", "save_checkpoint", {"local_global_step_folder": "global_step_4"}),
    ]


@pytest.mark.parametrize(
    ("part", "methods"),
    [
        (ParameterSynchronizer, ["sync_weights", "wait_last_valid", "get_current_param_version"]),
        (ParameterSynchronizer, ["rollouter_save_checkpoint"]),
        (CheckpointEngineManager, ["update_weights"]),
        (FullyAsyncTrainer, ["get_actor_wg", "fit"]),
        (FullyAsyncRollouter, ["get_rollout_wg", "pause", "resume", "update_param_version", "save_checkpoint", "fit"]),
        (MessageQueue, ["put_sample", "get_sample", "put_validate", "get_validate", "update_param_version"]),
        (MessageQueue, ["get_queue_size", "clear_queue", "get_statistics", "shutdown"]),
        (FullyAsyncTaskRunner, ["run"]),
    ],
)
def test_the_known_names_are_there(part: type, methods: list[str]) -> None:
    assert [name for name in methods if not callable(getattr(part, name, None))] == []


def test_sync_weights_has_the_known_signature() -> None:
    parameters = inspect.signature(ParameterSynchronizer.sync_weights).parameters
    assert {name: p.default for name, p in parameters.items() if name not in ("self", "version")} == {
        "validate": False,
        "global_steps": 0,
        "use_trainer_do_validate": False,
    }
    assert list(inspect.signature(ParameterSynchronizer.__init__).parameters)[1:5] == [
        "config",
        "trainer",
        "rollouter",
        "mq",
    ]
    assert list(inspect.signature(CheckpointEngineManager.__init__).parameters)[1:4] == [
        "config",
        "trainer",
        "replicas",
    ]
