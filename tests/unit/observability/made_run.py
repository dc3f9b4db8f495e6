"""A hand-made run in the event log's own terms: the same for folds, displays and plots."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.events import (
    AdmissionLevel,
    AnyEvent,
    GenerationWindow,
    ProcessStarted,
    QueueLevel,
    RunFinished,
    RunStarted,
    SampleAdmitted,
    SampleDropped,
    SampleShown,
    SampleTrained,
    SyncCaptured,
    SyncCompleted,
    SyncConfirmed,
    SyncStaged,
    TrainStep,
    ValidationFinished,
    ValidationStarted,
)
from paceline.core.version import Version
from paceline.observability.reader import Record

T0 = 1_700_000_000.0
COMPUTING = ("trainer", "replica-0", "replica-1")
LIGHT = ("rollouter", "message_queue", "synchronizer", "driver")
THREADS = dict.fromkeys(COMPUTING, 1) | dict.fromkeys(LIGHT, 0)
REPLICAS = ("replica-0", "replica-1")


def version(n: int) -> int:
    return Version(1, n).packed


def records(*timed: tuple[float, str, AnyEvent]) -> list[Record]:
    """Records of (seconds after T0, process, event) in the order of time; `seq` counts per process."""
    counts: dict[str, int] = {}
    made: list[Record] = []
    for t, proc, event in sorted(timed, key=lambda entry: entry[0]):
        seq = counts.get(proc, 0)
        counts[proc] = seq + 1
        made.append(Record(T0 + t, proc, seq, event))
    return made


def startup() -> Iterator[tuple[float, str, AnyEvent]]:
    """The command began at 0 s, the processes are ready at 9 s."""
    yield (
        1.0,
        "driver",
        RunStarted(run_id="arithmetic-001", life=1, seed=0, cores=2, threads=THREADS, command_wall=T0, total_steps=8),
    )
    for index, role in enumerate(role for role in THREADS if role != "driver"):
        ready = 4.0 + index
        yield ready, role, ProcessStarted(role=role, pid=100 + index, threads=THREADS[role], seconds=ready - 1.0)


def sync(t: float, n: int) -> Iterator[tuple[float, str, AnyEvent]]:
    """A sync of 0.2 s that ends at `t`: pauses of 1 ms and 3 ms."""
    yield (
        t - 0.1,
        "trainer",
        SyncCaptured(version=version(n), bytes=3_900_000, digest="d", seconds=0.05, wait_seconds=0),
    )
    pauses = dict(zip(REPLICAS, (0.001, 0.003), strict=True))
    for replica, pause in pauses.items():
        yield t - 0.05, replica, SyncStaged(replica=replica, version=version(n), seconds=0.02, verified=True)
        yield t - 0.02, replica, SyncConfirmed(replica=replica, version=version(n), pause_seconds=pause, digest="d")
    phases = {"capture": 0.05, "stage": 0.1, "swap": 0.05}
    done = SyncCompleted(
        version=version(n),
        mode="full",
        bytes=3_900_000,
        seconds=0.2,
        phases=phases,
        pauses=pauses,
        fenced=[],
        verified=True,
    )
    yield t, "synchronizer", done


def validation(t: float, n: int, step: int, accuracy: float) -> Iterator[tuple[float, str, AnyEvent]]:
    yield t - 1.0, "rollouter", ValidationStarted(version=version(n), problems=2000)
    result = ValidationFinished(
        version=version(n), step=step, accuracy=accuracy, problems=2000, seconds=1.0, response_length_mean=3.5
    )
    yield t, "rollouter", result


def window(t: float, replica: str, n: int, busy: float) -> tuple[float, str, AnyEvent]:
    event = GenerationWindow(
        replica=replica,
        version=version(n),
        seconds=1.0,
        busy_seconds=busy,
        steps=100,
        tokens=4000,
        validation_tokens=500,
        running=64,
        waiting=12,
    )
    return t, replica, event


def step(t: float, number: int, n: int) -> Iterator[tuple[float, str, AnyEvent]]:
    """Update `number` at `t`: 1.5 s of work after 0.5 s of waiting, on two samples with 4 tokens each."""
    ids = [f"s{number}a", f"s{number}b"]
    yield t - 1.9, "rollouter", SampleAdmitted(ids=ids)
    yield t - 1.8, "rollouter", AdmissionLevel(used=3, allowed=6, in_flight=2)
    yield t - 1.7, "message_queue", QueueLevel(size=2, capacity=8)
    yield t - 0.1, "trainer", SampleTrained(ids=ids, step=number, version=version(n), lags={0: 6, 1: 2})
    event = TrainStep(
        step=number,
        version=version(n),
        seconds=1.5,
        wait_seconds=0.5,
        reward_mean=0.1 * number,
        response_length_mean=4.0,
        sequences=16,
        tokens=64,
        metrics={"actor/pg_loss": 0.25, "actor/grad_norm": 0.5},
    )
    yield t, "trainer", event


def training(steps: int = 8) -> Iterator[tuple[float, str, AnyEvent]]:
    """Updates end at 12, 14, ... s; a sync after every second one, a validation of every second version."""
    yield from sync(9.5, 0)
    yield from validation(10.4, 0, 0, 0.41)
    for number in range(1, steps + 1):
        n = (number - 1) // 2
        end = 10.0 + 2 * number
        yield from step(end, number, n)
        for replica in REPLICAS:
            yield window(end - 1.0, replica, n, 0.9)
            yield window(end, replica, n, 0.7)
        if number % 2 == 0:
            yield from sync(end + 0.3, n + 1)
        if number % 4 == 0:
            yield from validation(end + 1.4, n + 1, number, 0.41 + 0.05 * number)
    shown = SampleShown(prompt="47+85=", response="132", reward=1.0, version=version(2))
    yield 9.0 + 2 * steps, "rollouter", shown


def finish(t: float) -> Iterator[tuple[float, str, AnyEvent]]:
    yield t - 0.5, "rollouter", SampleAdmitted(ids=["late"])
    yield t - 0.2, "rollouter", SampleDropped(ids=["late"], reason="shutdown")
    yield t, "driver", RunFinished(outcome="completed", error="", exit_code=0)


def whole_run() -> list[Record]:
    """Start, 8 updates, 5 syncs, 3 validations, end."""
    return records(*startup(), *training(), *finish(29.0))
