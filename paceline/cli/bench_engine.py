"""`paceline bench engine`: tokens per second of the embedded engine against `model.generate` on the same requests.

Law: both run in this process, on the same weights, threads, prompts and lengths, in turns, and at least five times;
the ratio is the median over rounds of the two neighbours' ratio, so that a busy machine slows both. Greedy, and no
token ends a response.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline.core.sample import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from paceline.engine.embedded_engine import EmbeddedEngine
    from paceline.engine.generate_reference import GenerateReference

SEQUENCES = 64
PROMPT_TOKENS = 8
LONGEST = 128
ROUNDS = 5
THREADS = (1, 2)


class Row(msgspec.Struct):
    """One line of the table and of the JSON file."""

    scenario: str
    threads: int
    sequences: int
    requests: int
    new_tokens: int
    rounds: int
    engine_tokens_per_second: float
    generate_tokens_per_second: float
    ratio: float
    ratio_smallest: float
    equal_responses: float


@dataclass(frozen=True)
class Workload:
    """Prompts, all of `PROMPT_TOKENS`, and how many tokens each response has."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]


def run(
    json_path: Path | None = None,
    model_path: str | None = None,
    threads: Sequence[int] = THREADS,
    rounds: int = ROUNDS,
) -> int:
    """Measure, print a table, write its rows to `json_path` if there is one; 0.

    Raises:
        ConfigError: `model_path` is no model that the engine can serve.
    """
    import torch

    from paceline.engine.embedded_engine import EmbeddedEngine
    from paceline.engine.generate_reference import GenerateReference

    path = model_path or str(files("paceline") / "assets" / "tiny_model")
    engine = EmbeddedEngine(
        model_config_dir=path, dtype="float32", max_num_seqs=SEQUENCES, max_model_len=PROMPT_TOKENS + LONGEST
    )
    reference = GenerateReference(path)
    engine.bind(reference.state_dict(), 0)
    before = torch.get_num_threads()
    print(f"{'scenario':<10} {'threads':>7} {'engine tok/s':>13} {'generate tok/s':>15} {'ratio':>6} {'smallest':>9}")
    rows: list[Row] = []
    try:
        for count in threads:
            if count > len(os.sched_getaffinity(0)):
                print(f"{count} threads: left out, this process may use fewer cores")
                continue
            torch.set_num_threads(count)
            for workload in workloads(reference.vocab_size):
                rows.append(_measure(workload, engine, reference, count, rounds))
                _print_row(rows[-1])
    finally:
        torch.set_num_threads(before)
    print(f"{SEQUENCES} sequences at a time, {rounds} rounds, medians; smallest: the lowest ratio of a round")
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
    return 0


def workloads(vocab_size: int) -> list[Workload]:
    """The two batches, seeded: `SEQUENCES` responses of `LONGEST` tokens; four times as many of log-normal length."""
    draw = random.Random(0)

    def prompts(count: int) -> list[list[int]]:
        return [[draw.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]

    tail = [max(1, min(LONGEST, round(draw.lognormvariate(math.log(24), 0.8)))) for _ in range(4 * SEQUENCES)]
    return [
        Workload("equal", prompts(SEQUENCES), [LONGEST] * SEQUENCES),
        Workload("long tail", prompts(len(tail)), tail),
    ]


def run_engine(engine: EmbeddedEngine, workload: Workload) -> list[list[int]]:
    """Greedy responses by the engine, in the order of the prompts."""
    engine.add(
        [
            GenerationRequest(str(index), prompt, SamplingParams(0.0, 1.0, -1, length, ()))
            for index, (prompt, length) in enumerate(zip(workload.prompts, workload.lengths, strict=True))
        ]
    )
    made: dict[str, list[int]] = {}
    while engine.running or engine.waiting:
        made.update((done.request_id, done.token_ids) for done in engine.step())
    return [made[str(index)] for index in range(len(workload.prompts))]


def _measure(
    workload: Workload, engine: EmbeddedEngine, reference: GenerateReference, threads: int, rounds: int
) -> Row:
    by_engine = run_engine(engine, workload)
    by_generate = reference.generate(workload.prompts, workload.lengths, SEQUENCES)
    for made in (by_engine, by_generate):
        if [len(tokens) for tokens in made] != workload.lengths:
            raise AssertionError("a side did not make the lengths that were asked for")
    tokens = sum(workload.lengths)
    engine_rates, generate_rates = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        run_engine(engine, workload)
        middle = time.perf_counter()
        reference.generate(workload.prompts, workload.lengths, SEQUENCES)
        engine_rates.append(tokens / (middle - start))
        generate_rates.append(tokens / (time.perf_counter() - middle))
    ratios = [mine / theirs for mine, theirs in zip(engine_rates, generate_rates, strict=True)]
    return Row(
        scenario=workload.name,
        threads=threads,
        sequences=SEQUENCES,
        requests=len(workload.prompts),
        new_tokens=tokens,
        rounds=rounds,
        engine_tokens_per_second=round(statistics.median(engine_rates), 1),
        generate_tokens_per_second=round(statistics.median(generate_rates), 1),
        ratio=round(statistics.median(ratios), 3),
        ratio_smallest=round(min(ratios), 3),
        equal_responses=sum(a == b for a, b in zip(by_engine, by_generate, strict=True)) / len(by_engine),
    )


def _print_row(row: Row) -> None:
    print(
        f"{row.scenario:<10} {row.threads:>7} {row.engine_tokens_per_second:>13,.0f} "
        f"{row.generate_tokens_per_second:>15,.0f} {row.ratio:>6.2f} {row.ratio_smallest:>9.2f}",
        flush=True,
    )
