"""The token journal: every token of unfinished responses, appended step by step, so that a resume goes on from it.

Files are `<replica>.<life>.<segment>.bin`: frames of a four-byte little-endian length and a msgpack array.

    [0, alias, request id, checksum of the prompt, token ids, log-probs, versions]   a request, with what it has so far
    [1, version, aliases, token ids, log-probs]                                      one decode step

Lists of numbers are packed little-endian (aliases uint32, ids and versions int64, log-probs float64). One step is one
write(2), so `kill -9` loses nothing; a torn tail is left out by the reader. A segment that is full is followed by one
that begins with all that its predecessors still have open, so that those may be removed.
"""

from __future__ import annotations

import logging
import os
import re
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from paceline.core.checkpoint import JournalledSequence, Partial, prompt_checksum
from paceline.core.sample import GenerationRequest, StepTokens

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 16 << 20
MAX_FRAME_BYTES = 1 << 30
LENGTH_BYTES = 4
_BEGIN, _STEP = 0, 1
_NAME = re.compile(r"(?P<replica>.+)\.(?P<life>\d+)\.(?P<segment>\d+)\.bin")


class Segment(NamedTuple):
    """One file of a journal, by its name; segments sort by life, replica, number."""

    life: int
    replica: str
    number: int
    path: Path


def segments(directory: Path) -> list[Segment]:
    """All segments in a directory, sorted; none when it does not exist."""
    if not directory.is_dir():
        return []
    named = [(path, _NAME.fullmatch(path.name)) for path in directory.iterdir()]
    return sorted(Segment(int(m["life"]), m["replica"], int(m["segment"]), path) for path, m in named if m)


def superseded(directory: Path, life: int) -> list[Path]:
    """What is not needed once a checkpoint whose cut begins after this call is whole: older lives, and the segments of
    this life that have a successor.
    """
    found = segments(directory)
    newest = {segment.replica: segment.number for segment in found if segment.life == life}
    return [s.path for s in found if s.life < life or (s.life == life and s.number < newest[s.replica])]


@dataclass(slots=True)
class _Open:
    alias: int
    prompt_check: int
    tokens: list[tuple[int, float, int]]  # id, log-prob, version


class FileJournal:
    """A `TokenJournal` in files of `directory`. It ends, with one warning, when the disk does not take a frame.

    `keeps` says what stays: all segments, until a checkpoint removes them, or the newest, which has all that is open.
    """

    def __init__(
        self,
        directory: Path,
        replica_id: str,
        life: int,
        *,
        keeps: Literal["all", "open"] = "all",
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._keeps = keeps
        self._directory = directory
        self._replica_id = replica_id
        self._life = life
        self._segment_bytes = segment_bytes
        self._full_at = segment_bytes
        directory.mkdir(parents=True, exist_ok=True)
        mine = [s.number for s in segments(directory) if (s.life, s.replica) == (life, replica_id)]
        self._segment = max(mine, default=0)
        # Filled by the event loop, emptied by the thread that decodes.
        self._todo: deque[Sequence[GenerationRequest] | _Forget] = deque()
        self._open: dict[str, _Open] = {}
        self._aliases = 0
        self._written = 0
        self._descriptor: int | None = self._next_segment()

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Remember these; they are written with the next step."""
        if self._descriptor is not None:
            self._todo.append(list(requests))

    def forget(self, request_ids: Sequence[str]) -> None:
        """These need not be carried into a next segment."""
        if self._descriptor is not None:
            self._todo.append(_Forget(list(request_ids)))

    def append(self, step: StepTokens) -> None:
        """Write what has begun and the step, in one write."""
        if self._descriptor is None:
            return
        frames = bytearray()
        while self._todo:
            frames += self._take(self._todo.popleft())
        frames += self._step_frame(step)
        if self._write(self._descriptor, frames) and self._written >= self._full_at:
            self._rotate()

    def close(self) -> None:
        """Close the file; later steps are not recorded."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self, item: Sequence[GenerationRequest] | _Forget) -> bytes:
        if isinstance(item, _Forget):
            for request_id in item.request_ids:
                self._open.pop(request_id, None)
            return b""
        frames = bytearray()
        for request in item:
            self._aliases += 1
            check = prompt_checksum(request.prompt_ids)
            carried = zip(request.response_ids, request.logprobs, request.versions, strict=True)
            begun = _Open(self._aliases, check, list(carried))
            self._open[request.request_id] = begun
            frames += _begin_frame(request.request_id, begun)
        return bytes(frames)

    def _step_frame(self, step: StepTokens) -> bytes:
        opened = [self._open[request_id] for request_id in step.request_ids]
        for one, token in zip(opened, zip(step.token_ids, step.logprobs, repeat(step.version)), strict=True):
            one.tokens.append(token)
        aliases = array("I", [one.alias for one in opened])
        tokens, logprobs = array("q", step.token_ids), array("d", step.logprobs)
        return _frame((_STEP, step.version, aliases.tobytes(), tokens.tobytes(), logprobs.tobytes()))

    def _write(self, descriptor: int, frames: bytes | bytearray) -> bool:
        try:
            written = os.write(descriptor, frames)
            if written < len(frames):
                raise OSError("short write")
        except OSError as error:  # a resume makes these tokens again; the run goes on
            logger.warning("the token journal of %s ends: %s", self._replica_id, error)
            self.close()
            return False
        self._written += written
        return True

    def _rotate(self) -> None:
        self.close()
        full = self._path(self._segment)
        self._descriptor = self._next_segment()
        if self._descriptor is None:
            return
        written = self._write(
            self._descriptor, b"".join(_begin_frame(name, begun) for name, begun in self._open.items())
        )
        # As much again as was stated anew: a rotation never costs more than what was appended since the last.
        self._full_at = max(self._segment_bytes, self._written)
        self._written = 0
        if written and self._keeps == "open":
            full.unlink(missing_ok=True)

    def _path(self, segment: int) -> Path:
        return self._directory / f"{self._replica_id}.{self._life}.{segment}.bin"

    def _next_segment(self) -> int | None:
        self._segment += 1
        self._written = 0
        try:
            return os.open(
                self._path(self._segment), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            logger.warning("no token journal for %s: %s", self._replica_id, error)
            return None


class _Forget(NamedTuple):
    request_ids: list[str]


def read_journal(directory: Path, lives: Sequence[int]) -> list[JournalledSequence]:
    """Every request of these lives with all of its tokens; the newest record of each. Torn tails are left out."""
    found: dict[tuple[int, str], JournalledSequence] = {}
    for segment in segments(directory):
        if segment.life in lives:
            for sequence in _read_segment(segment):
                found[segment.life, sequence.request_id] = sequence
    return list(found.values())


def _read_segment(segment: Segment) -> list[JournalledSequence]:
    by_alias: dict[int, JournalledSequence] = {}
    for frame in _frames(segment.path.read_bytes()):
        if isinstance(frame, _BeginFrame):
            logprobs = array("d", frame.logprobs).tolist()
            carried = Partial(_integers("q", frame.tokens), logprobs, _integers("q", frame.versions))
            by_alias[frame.alias] = JournalledSequence(segment.life, frame.request_id, frame.prompt_check, carried)
            continue
        made = zip(_integers("q", frame.tokens), array("d", frame.logprobs), strict=True)
        for alias, (token, logprob) in zip(_integers("I", frame.aliases), made, strict=True):
            tokens = by_alias[alias].tokens
            tokens.token_ids.append(token)
            tokens.logprobs.append(logprob)
            tokens.versions.append(frame.version)
    return list(by_alias.values())


class _BeginFrame(msgspec.Struct, array_like=True, tag=_BEGIN):
    alias: int
    request_id: str
    prompt_check: int
    tokens: bytes
    logprobs: bytes
    versions: bytes


class _StepFrame(msgspec.Struct, array_like=True, tag=_STEP):
    version: int
    aliases: bytes
    tokens: bytes
    logprobs: bytes


def _frames(data: bytes) -> Iterator[_BeginFrame | _StepFrame]:
    decoder = msgspec.msgpack.Decoder(_BeginFrame | _StepFrame)
    start = 0
    while start + LENGTH_BYTES <= len(data):
        length = int.from_bytes(data[start : start + LENGTH_BYTES], "little")
        end = start + LENGTH_BYTES + length
        if length == 0 or length > MAX_FRAME_BYTES or end > len(data):
            return
        try:
            yield decoder.decode(data[start + LENGTH_BYTES : end])
        except msgspec.DecodeError:
            return
        start = end


def _frame(content: tuple[object, ...]) -> bytes:
    body = msgspec.msgpack.encode(content)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def _begin_frame(request_id: str, begun: _Open) -> bytes:
    lists = (
        array("q", [token for token, _, _ in begun.tokens]).tobytes(),
        array("d", [logprob for _, logprob, _ in begun.tokens]).tobytes(),
        array("q", [version for _, _, version in begun.tokens]).tobytes(),
    )
    return _frame((_BEGIN, begun.alias, request_id, begun.prompt_check, *lists))


def _integers(kind: Literal["I", "q"], data: bytes) -> list[int]:
    return array(kind, data).tolist()
