"""The token journal: what was appended is read again, whatever was torn off, over segments and lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.checkpoint import JournalledSequence, prompt_checksum
from paceline.core.sample import GenerationRequest, SamplingParams, StepTokens
from paceline.store.token_journal import FileJournal, read_journal, segments, superseded

PARAMS = SamplingParams(1.0, 1.0, -1, 100, ())


def request(name: str, *carried: int) -> GenerationRequest:
    return GenerationRequest(name, [7, 8], PARAMS, [*carried], [-0.5] * len(carried), [3] * len(carried))


def read(directory: Path, *lives: int) -> dict[str, JournalledSequence]:
    return {sequence.request_id: sequence for sequence in read_journal(directory, lives or (1,))}


def test_every_token_comes_back_with_its_logprob_and_version(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path, "replica-0", 1)
    journal.begin([request("a"), request("b", 1, 2)])
    journal.append(StepTokens(["a", "b"], [10, 20], [-0.1, -0.2], 4))
    journal.begin([request("c")])
    journal.append(StepTokens(["b", "c"], [21, 30], [-0.25, -1e-9], (1 << 40) + 5))
    found = read(tmp_path)
    assert found["a"].tokens.token_ids == [10]
    assert found["b"].tokens.token_ids == [1, 2, 20, 21]
    assert found["b"].tokens.logprobs == [-0.5, -0.5, -0.2, -0.25]
    assert found["b"].tokens.versions == [3, 3, 4, (1 << 40) + 5]
    assert found["c"].tokens.logprobs == [-1e-9]
    assert {one.prompt_check for one in found.values()} == {prompt_checksum([7, 8])}


def test_a_torn_tail_is_left_out_at_every_byte(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path, "replica-0", 1)
    journal.begin([request("a")])
    for token in range(3):
        journal.append(StepTokens(["a"], [token], [-1.0], 1))
    path = segments(tmp_path)[0].path
    whole = path.read_bytes()
    lengths = set()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        lengths.add(sum(len(one.tokens) for one in read(tmp_path).values()))
    assert lengths == {0, 1, 2}
    path.write_bytes(whole + bytes(64))  # a block that the file system had not filled
    assert read(tmp_path)["a"].tokens.token_ids == [0, 1, 2]


@pytest.mark.parametrize("keeps", ["all", "open"])
def test_a_full_segment_is_followed_by_one_that_has_all_that_is_open(tmp_path: Path, keeps: str) -> None:
    journal = FileJournal(tmp_path, "replica-0", 1, keeps=keeps, segment_bytes=900)  # type: ignore[arg-type]
    journal.begin([request("done"), request("a", 1)])
    journal.append(StepTokens(["done", "a"], [5, 2], [-1.0, -1.0], 1))
    journal.forget(["done"])
    for token in range(3, 60):
        journal.append(StepTokens(["a"], [token], [-1.0], 1))
    assert read(tmp_path)["a"].tokens.token_ids == list(range(1, 60))
    kept = segments(tmp_path)
    assert kept[-1].number > 2
    assert ("done" in read(tmp_path)) == (keeps == "all")
    assert (len(kept) == 1) == (keeps == "open")
    for path in superseded(tmp_path, 1):
        path.unlink()
    assert read(tmp_path)["a"].tokens.token_ids == list(range(1, 60))


def test_a_replica_that_is_started_again_begins_a_file_of_its_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        journal = FileJournal(tmp_path, "replica-0", 1)
        journal.begin([request(name)])
        journal.append(StepTokens([name], [1], [-1.0], 1))
    assert [segment.number for segment in segments(tmp_path)] == [1, 2]
    assert set(read(tmp_path)) == {"a", "b"}


def test_only_the_lives_that_were_asked_for_are_read(tmp_path: Path) -> None:
    for life in (1, 2, 10):
        journal = FileJournal(tmp_path, "replica-0", life)
        journal.begin([request("a")])
        journal.append(StepTokens(["a"], [life], [-1.0], 1))
    assert [one.tokens.token_ids for one in read_journal(tmp_path, [2, 10])] == [[2], [10]]
    assert read_journal(tmp_path / "none", [1]) == []


def test_a_disk_that_is_full_ends_the_journal_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = FileJournal(tmp_path, "replica-0", 1)
    journal.begin([request("a")])
    journal.append(StepTokens(["a"], [1], [-1.0], 1))
    os.close(os.open(tmp_path / "full", os.O_CREAT))
    monkeypatch.setattr(journal, "_descriptor", os.open("/dev/full", os.O_WRONLY))
    for _ in range(3):
        journal.append(StepTokens(["a"], [2], [-1.0], 1))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert read(tmp_path)["a"].tokens.token_ids == [1]


KILLED = """
import os, signal, sys
from pathlib import Path
from paceline.core.sample import GenerationRequest, SamplingParams, StepTokens
from paceline.store.token_journal import FileJournal

journal = FileJournal(Path(sys.argv[1]), "replica-0", 1)
journal.begin([GenerationRequest("a", [7, 8], SamplingParams(1.0, 1.0, -1, 100, ()))])
for token in range(5):
    journal.append(StepTokens(["a"], [token], [-1.0], 1))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_nothing_that_was_appended(tmp_path: Path) -> None:
    code = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode
    assert code == -signal.SIGKILL
    assert read(tmp_path)["a"].tokens.token_ids == [0, 1, 2, 3, 4]
