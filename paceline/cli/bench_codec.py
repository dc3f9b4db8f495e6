"""`paceline bench codec`: bytes and speed of the lossless delta against what others send, on the same weights.

Law: one thread; seconds are the processor's, not the wall's, so that a busy machine distorts less; every codec is run
in turns, round after round, and medians are shown beside a plain copy in the same rounds. GB/s are of dense weights
(the size of one version). Each codec's receiver must end with the target's bits, or the command fails. Apply writes
into other memory, so it contains a copy of the base; ours are also timed in place, where the pause is the part that
touches the weights.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.core.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    import torch

    from paceline.cli.codec_peers import Codec

ROUNDS = 5
SYNTHETIC_ELEMENTS = 1 << 26
TRACE_LIST = "traces.json"
PLAIN_COPY = "plain copy"


class Row(msgspec.Struct):
    """One line of the table and of the JSON file; `changed` is a share of the elements.

    `apply_gbps` contains the copy of the base, `in_place_gbps` does not (None where a codec is not timed so), and
    `pause_gbps` is only the part of it that touches the weights. `copy_gbps` is a plain copy in the same rounds.
    """

    trace: str
    changed: float
    codec: str
    bytes: int
    bytes_per_change: float
    encode_gbps: float
    apply_gbps: float
    in_place_gbps: float | None
    pause_gbps: float | None
    copy_gbps: float


class TraceFile(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of `traces.json`: safetensors files beside it, as `benchmarks/make_delta_traces.py` makes them."""

    trace: str
    base: str
    target: str


@dataclass(frozen=True)
class Trace:
    """Two versions of the same weights."""

    name: str
    base: dict[str, torch.Tensor]
    target: dict[str, torch.Tensor]


def run(
    json_path: Path | None = None,
    traces: Path | None = None,
    rounds: int = ROUNDS,
    elements: int = SYNTHETIC_ELEMENTS,
) -> int:
    """Measure, print a table, write its rows to `json_path` if there is one; 0.

    Raises:
        ConfigError: `traces` has no list of traces, or a file of it cannot be read.
        PacelineError: a codec did not bring the target's bits.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[Row] = []
    print(
        f"{'trace':<38} {'changed':>8} {'codec':<16} {'bytes':>12} {'B/change':>8} {'of xor':>6} {'of i32':>6} "
        f"{'encode':>7} {'apply':>6} {'inplace':>7} {'pause':>6} {'copy':>5}  GB/s"
    )
    try:
        for trace in _traces(traces, elements):
            found = _measure(trace, rounds)
            _print_rows(found)
            rows += found
    finally:
        torch.set_num_threads(before)
    print(f"one thread, {rounds} rounds in turns, medians of processor time; GB/s of dense weights")
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
    return 0


def position_entropy(changed: float) -> float:
    """Bytes per change that tell which elements changed, if any were as likely: binary entropy over the share."""
    if not 0 < changed < 1:
        return 0.0
    kept = 1 - changed
    return -(changed * math.log2(changed) + kept * math.log2(kept)) / changed / 8


def _traces(folder: Path | None, elements: int) -> Iterator[Trace]:
    from paceline.cli.codec_traces import shipped_model_trace, synthetic_trace

    for learning_rate in (1e-6, 1e-5):
        base, target = synthetic_trace(elements, learning_rate)
        yield Trace(f"synthetic Adam, lr {learning_rate:g}, 1 step", base, target)
    if folder is None:
        base, target = shipped_model_trace()
        yield Trace("shipped model, lr 1e-6, 1 step", base, target)
        return
    for entry in _listed(folder):
        yield Trace(entry.trace, _load(folder / entry.base), _load(folder / entry.target))


def _listed(folder: Path) -> list[TraceFile]:
    try:
        return msgspec.json.decode((folder / TRACE_LIST).read_bytes(), type=list[TraceFile])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--traces: cannot read {folder / TRACE_LIST}: {error}") from error


def _load(file: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--traces: cannot read {file}: {error}") from error


def _measure(trace: Trace, rounds: int) -> list[Row]:
    from paceline.cli.codec_peers import codecs
    from paceline.weights.delta import count_changes
    from paceline.weights.delta.number_line import bits_of

    candidates = codecs()
    buffer = {name: tensor.clone() for name, tensor in trace.base.items()}
    full = sum(tensor.nbytes for tensor in trace.base.values())
    changed = count_changes(trace.base, trace.target)
    total = sum(len(bits_of(tensor)) for tensor in trace.base.values())
    times: dict[tuple[str, str], list[float]] = {}
    sizes: dict[str, int] = {}

    def timed(codec: str, part: str, call: Callable[[], Any]) -> Any:
        began = time.thread_time()
        result = call()
        times.setdefault((codec, part), []).append(time.thread_time() - began)
        return result

    def copy() -> None:
        for name, tensor in trace.base.items():
            bits_of(buffer[name])[:] = bits_of(tensor)

    for number in range(rounds + 1):
        timed(PLAIN_COPY, "copy", copy)
        for codec in candidates:
            sizes[codec.name] = _one_round(codec, trace, buffer, timed)
        if number == 0:
            times.clear()  # compilation, and pages that were never touched

    def speed(codec: str, *parts: str) -> float | None:
        found = [sum(each) for each in zip(*(times.get((codec, part), []) for part in parts), strict=True)]
        return round(full / max(1e-9, statistics.median(found)) / 1e9, 3) if found else None

    return [
        Row(
            trace=trace.name,
            changed=round(changed / max(1, total), 6),
            codec=codec.name,
            bytes=sizes[codec.name],
            bytes_per_change=round(sizes[codec.name] / max(1, changed), 4),
            encode_gbps=speed(codec.name, "encode") or 0.0,
            apply_gbps=speed(codec.name, "apply") or 0.0,
            in_place_gbps=speed(codec.name, "prepare", "pause"),
            pause_gbps=speed(codec.name, "pause"),
            copy_gbps=speed(PLAIN_COPY, "copy") or 0.0,
        )
        for codec in candidates
    ]


def _one_round(
    codec: Codec,
    trace: Trace,
    buffer: dict[str, torch.Tensor],
    timed: Callable[[str, str, Callable[[], Any]], Any],
) -> int:
    message = timed(codec.name, "encode", lambda: codec.encode(trace.base, trace.target))
    timed(codec.name, "apply", lambda: codec.apply(message, trace.base, buffer))
    _check(codec, trace, buffer)
    if codec.in_place is not None:
        for name, tensor in trace.base.items():
            buffer[name].copy_(tensor)
        prepared = codec.in_place
        move = timed(codec.name, "prepare", lambda: prepared(message, buffer))
        timed(codec.name, "pause", move)
        _check(codec, trace, buffer)
    return codec.size(message)


def _check(codec: Codec, trace: Trace, buffer: dict[str, torch.Tensor]) -> None:
    from paceline.weights.delta import count_changes

    wrong = count_changes(buffer, trace.target)
    if wrong:
        raise PacelineError(f"{codec.name} on {trace.name}: {wrong} elements are not the target's")


def _print_rows(rows: list[Row]) -> None:
    by_codec = {row.codec: row for row in rows}
    for row in rows:
        of_xor = row.bytes / max(1, by_codec["xor+zstd-1"].bytes)
        of_index = row.bytes / max(1, by_codec["int32 index+value"].bytes)
        in_place = f"{row.in_place_gbps:7.2f}" if row.in_place_gbps is not None else f"{'-':>7}"
        pause = f"{row.pause_gbps:6.2f}" if row.pause_gbps is not None else f"{'-':>6}"
        print(
            f"{row.trace:<38} {100 * row.changed:7.3f}% {row.codec:<16} {row.bytes:12d} {row.bytes_per_change:8.3f} "
            f"{of_xor:6.3f} {of_index:6.3f} {row.encode_gbps:7.2f} {row.apply_gbps:6.2f} {in_place} {pause} "
            f"{row.copy_gbps:5.2f}"
        )
    entropy = position_entropy(rows[0].changed)
    print(f"{rows[0].trace:<38} entropy of uniform positions alone: {entropy:.3f} bytes per change")
