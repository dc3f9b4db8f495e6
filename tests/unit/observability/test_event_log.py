"""The event log: the shape of a line, several writers, what cannot be written, torn lines."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from paceline.core.events import QueueLevel, SampleAdmitted, SampleTrained, TrainStep
from paceline.observability.append_file import AppendFile
from paceline.observability.event_log import EventLog
from paceline.observability.reader import EventLogError, EventTail, read_events

WRITERS = 2
EVENTS = 2000


def log_at(path: Path, proc: str = "trainer", t: float = 12.5) -> EventLog:
    return EventLog(path, proc, lambda: t)


def train_step(metrics: dict[str, float]) -> TrainStep:
    return TrainStep(
        step=1,
        version=1 << 40,
        seconds=0.5,
        wait_seconds=0.25,
        reward_mean=0.5,
        response_length_mean=4.0,
        sequences=8,
        tokens=32,
        metrics=metrics,
    )


def test_a_line_has_time_process_and_sequence_first(tmp_path: Path) -> None:
    log = log_at(tmp_path / "events.jsonl", proc="replica-0")
    log.emit(QueueLevel(size=3, capacity=8))
    log.emit(QueueLevel(size=4, capacity=8))
    lines = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    first = json.loads(lines[0])
    assert list(first)[:4] == ["t", "proc", "seq", "kind"]
    assert first == {"t": 12.5, "proc": "replica-0", "seq": 0, "kind": "queue.level", "size": 3, "capacity": 8}
    assert json.loads(lines[1])["seq"] == 1


def test_what_was_emitted_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = [
        SampleTrained(ids=["a", "ä\n"], step=1, version=1 << 40, lags={0: 5, 3: 1}),
        train_step({"actor/loss": 1.5}),
    ]
    log = log_at(path)
    for event in events:
        log.emit(event)
    records = read_events(path)
    assert [record.event for record in records] == events
    assert [(record.t, record.proc, record.seq) for record in records] == [(12.5, "trainer", 0), (12.5, "trainer", 1)]


def test_a_number_that_is_not_finite_comes_back_as_nan(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log_at(path).emit(train_step({"actor/loss": float("nan"), "actor/grad_norm": 2.0}))
    event = read_events(path)[0].event
    assert isinstance(event, TrainStep)
    assert event.metrics["actor/loss"] != event.metrics["actor/loss"]
    assert event.metrics["actor/grad_norm"] == 2.0


WRITE_MANY = """
import sys
from pathlib import Path
from paceline.core.events import SampleAdmitted
from paceline.observability.event_log import EventLog
path, proc, count = sys.argv[1:]
log = EventLog(Path(path), proc, lambda: 1.0)
for index in range(int(count)):
    log.emit(SampleAdmitted(ids=[f"{proc}-{index}"] * (1 + index % 40)))
"""


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    names = [f"writer-{index}" for index in range(WRITERS)]
    writers = [subprocess.Popen([sys.executable, "-c", WRITE_MANY, path, name, str(EVENTS)]) for name in names]
    assert [writer.wait(60) for writer in writers] == [0] * WRITERS
    tail = EventTail(path)
    sequences: defaultdict[str, list[int]] = defaultdict(list)
    for record in tail.read():
        assert isinstance(record.event, SampleAdmitted)
        assert record.event.ids[0] == f"{record.proc}-{record.seq}"
        sequences[record.proc].append(record.seq)
    assert tail.damaged == []
    assert dict(sequences) == {name: list(range(EVENTS)) for name in names}


def test_what_was_emitted_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from paceline.core.events import QueueLevel\n"
        "from paceline.observability.event_log import EventLog\n"
        "log = EventLog(Path(sys.argv[1]), 'queue', lambda: 1.0)\n"
        "[log.emit(QueueLevel(size=n, capacity=9)) for n in range(3)]\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60, check=False)
    assert done.returncode == -9
    assert [record.seq for record in read_events(path)] == [0, 1, 2]


def test_an_event_that_cannot_be_written_is_counted_and_leaves_a_gap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    log = log_at(path)
    for value in (1.0, object(), object(), 2.0):
        log.emit(train_step({"actor/loss": value}))  # type: ignore[dict-item]
    assert log.lost == 2
    assert [record.seq for record in read_events(path)] == [0, 3]
    assert len(caplog.records) == 1
    assert "TrainStep" in caplog.text


def test_a_full_disk_raises_nothing_and_the_next_line_stands_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    file = AppendFile(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        # The limit stands for a full disk: the first write is cut after 10 bytes, the next ones fail.
        assert not file.append(b'{"t":1.0,"cut":1}\n')
        assert not file.append(b'{"t":1.0,"lost":1}\n')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.append(b'{"t":2.0}\n')
    assert path.read_bytes() == b'{"t":1.0,"\n{"t":2.0}\n'
    assert file.errors == 2
    assert len(caplog.records) == 1


def test_a_closed_log_records_nothing(tmp_path: Path) -> None:
    log = log_at(tmp_path / "events.jsonl")
    log.close()
    log.close()
    log.emit(QueueLevel(size=1, capacity=2))
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def test_a_tail_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    whole = b'{"t":1.0,"proc":"q","seq":0,"kind":"queue.level","size":1,"capacity":2}\n'
    path.write_bytes(whole + whole[:20])
    assert [record.event for record in tail.read()] == [QueueLevel(size=1, capacity=2)]
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(whole[20:])
    assert [record.event for record in tail.read()] == [QueueLevel(size=1, capacity=2)]
    assert os.path.getsize(path) == 2 * len(whole)  # noqa: PTH202


def test_a_damaged_line_is_skipped_and_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = b'{"t":1.0,"proc":"q","seq":0,"kind":"queue.level","size":1,"capacity":2}\n'
    path.write_bytes(whole + b'{"t":1.0,"pr\n' + whole)
    tail = EventTail(path)
    assert len(tail.read()) == 2
    assert len(tail.damaged) == 1
    assert tail.damaged[0].startswith("line 2: ")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"t":1.0,"proc":"q","seq":0,"kind":"queue.levels","size":1}\n', "queue.levels"),
        (b'{"t":1.0,"proc":"q","seq":0,"kind":"queue.level","size":"x","capacity":2}\n', "size"),
        (b'{"t":1.0,"seq":0,"kind":"queue.level","size":1,"capacity":2}\n', "proc"),
    ],
)
def test_a_line_that_is_no_event_is_an_error_that_names_it(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "events.jsonl"
    whole = b'{"t":1.0,"proc":"q","seq":0,"kind":"queue.level","size":1,"capacity":2}\n'
    path.write_bytes(whole + line)
    with pytest.raises(EventLogError, match=r"events\.jsonl line 2: ") as caught:
        EventTail(path).read()
    assert reason in caught.value.message
