"""`paceline bench sync` at a small size: the real processes, what is written, and that nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import bench_sync
from paceline.cli.sync_bench.engine_session import SyncRound
from paceline.cli.sync_bench.figures import Costs, Way, bytes_moved, peer_row, percentile, sync_row
from paceline.cli.sync_bench.messages import CaptureParts, CopyRate, PauseRecord
from paceline.cli.sync_bench.model_shapes import EMBEDDING, VOCABULARY, shapes_of
from paceline.cli.sync_bench.peer_session import PeerRound
from paceline.cli.sync_bench.peers.peer_table import PEERS, chosen_peers
from paceline.core.errors import CapacityError, ConfigError

GIB = 1 << 30


def run_small(json_path: Path | None = None, **changed: Any) -> int:
    options: dict[str, Any] = {"gib": 0.05, "replicas": "1", "engines": "shared_memory", "modes": "full"}
    return bench_sync.run(
        json_path=json_path, **{**options, "apply": "mapped", "peers": "none", "rounds": 2, **changed}
    )


def left_behind() -> set[str]:
    return {str(path) for root in ("/tmp", "/dev/shm") for path in Path(root).glob("paceline-bench-*")}


def test_rows_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = left_behind()
    file = tmp_path / "sync.json"
    assert run_small(file, apply="copied,mapped") == 0
    assert left_behind() <= before
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["machine"]["memcpy_1thread_gbps"] > 0
    assert report["machine"]["memcpy_2threads_gbps"] > 0
    assert report["peers"] == []
    rows = report["results"]
    assert [(r["engine"], r["mode"], r["apply"], r["replicas"]) for r in rows] == [
        ("shared_memory", "full", "mapped", 1),
        ("shared_memory", "full", "copied", 1),
    ]
    nbytes = shapes_of(0.05).nbytes
    assert [r["bytes_moved"] // nbytes for r in rows] == [1, 2]
    for row in rows:
        assert row["peak_bytes"] > 3 * nbytes  # the trainer's weights and two arenas
        assert 0 < row["pause_seconds_p50"] <= row["pause_seconds_p99"] < row["pause_with_first_step_p99"]
        assert row["verify_share"] > 0
        assert set(row["phase_seconds"]) == {"capture", "encode", "stage", "swap"}
        assert sum(row["phase_seconds"].values()) <= 1.5 * row["seconds"]
    printed = capsys.readouterr().out
    assert "copied" in printed
    assert "memcpy" in printed


@pytest.mark.parametrize("engine", ["shared_memory", "filesystem"])
def test_a_delta_moves_less(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "sync.json"
    assert run_small(file, engines=engine, modes="full,delta", apply="copied") == 0
    full, delta = json.loads(file.read_text(encoding="utf-8"))["results"]
    nbytes = shapes_of(0.05).nbytes
    assert (full["mode"], full["bytes_moved"]) == ("full", 2 * nbytes)
    assert delta["mode"] == "delta"
    # Over shared memory the whole version lies in the arena all the same.
    assert delta["bytes_moved"] < nbytes * (1.1 if engine == "shared_memory" else 0.1)
    assert set(delta["phase_seconds"]) == {"capture", "encode", "stage", "swap"}


def test_peers_take_turns_with_the_engine(tmp_path: Path) -> None:
    before = left_behind()
    file = tmp_path / "sync.json"
    assert run_small(file, peers="safetensors_shm,reference_flow") == 0
    assert left_behind() <= before
    flow, files = sorted(json.loads(file.read_text(encoding="utf-8"))["peers"], key=lambda row: str(row["name"]))
    assert (flow["name"], flow["replicas"], files["name"]) == ("reference_flow", 1, "safetensors_shm")
    assert flow["seconds"] > 0
    assert flow["pause_seconds"] > 0.5 * flow["seconds"]  # the whole transfer is a pause
    assert files["pause_seconds"] == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"replicas": "0"}, "--replicas"),
        ({"replicas": "1,x"}, "--replicas"),
        ({"apply": "moved"}, "--apply"),
        ({"peers": "nccl"}, "nccl"),
        ({"peers": ""}, "--peers"),
        ({"rounds": 0}, "--rounds"),
        ({"modes": "delta"}, "no delta for mapped"),
        ({"modes": "half"}, "half"),
        ({"engines": "carrier_pigeon"}, "carrier_pigeon"),
        ({"gib": 0.001}, "--gib"),
        ({"gib": float("nan")}, "--gib"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    before = left_behind()
    with pytest.raises(ConfigError, match=named):
        run_small(**options)
    assert left_behind() <= before


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(CapacityError, match=r"need \d+ bytes .* are free"):
        run_small(gib=4096.0)


def test_the_shapes_are_those_of_the_model() -> None:
    whole = shapes_of(0.92)
    assert whole.layers == 24
    assert whole.nbytes == 2 * 494_032_768  # the parameters of Qwen2.5-0.5B
    assert len(whole.stored) == 24 * 12 + 2
    assert whole.stored["model.layers.23.self_attn.k_proj.weight"] == (128, 896)


@pytest.mark.parametrize("gib", [0.03, 0.05, 0.25, 0.2815, 0.3, 1.0, 2.5])
def test_the_shapes_reach_the_size(gib: float) -> None:
    shapes = shapes_of(gib)
    assert gib * GIB <= shapes.nbytes <= gib * GIB + 2 * 15_000_000
    assert shapes.layers >= 1
    assert 1 <= shapes.stored[EMBEDDING][0] <= VOCABULARY


def test_peers_are_chosen_by_name() -> None:
    assert chosen_peers("all") == tuple(PEERS)
    assert chosen_peers("none") == ()
    assert chosen_peers("ray_torch, gloo_broadcast") == ("ray_torch", "gloo_broadcast")


def test_nearest_rank_percentiles() -> None:
    assert percentile([5.0], 99) == 5.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.0
    assert percentile([float(i) for i in range(1, 101)], 99) == 99.0
    assert percentile([float(i) for i in range(1, 100)], 99) == 99.0


def made_round(seconds: float, gaps: list[float], rate: float = 8e9) -> SyncRound:
    pauses = tuple(
        PauseRecord(gap=g, plain_gap=1e-4, first_step=2e-3, plain_step=1e-3, first_step_faults=0) for g in gaps
    )
    phases = {"capture": seconds / 2, "stage": seconds / 4, "swap": seconds / 4}
    taken = tuple(GIB for _ in gaps)
    return SyncRound(
        seconds=seconds, nbytes=GIB, taken=taken, rate=CopyRate(rate, 2 * rate), phases=phases, pauses=pauses
    )


WAYS = [(engine, "full", "mapped") for engine in ("shared_memory", "ray_object", "filesystem")]


def test_figures_of_known_rounds() -> None:
    first = [made_round(0.2, [1e-3]), made_round(0.4, [1e-3]), made_round(0.5, [1e-3])]
    rounds = [made_round(0.3, [1e-3, 3e-3]), made_round(0.4, [1e-3, 2e-3], rate=4e9), made_round(1.0, [1e-3, 1e-2])]
    costs = Costs(CaptureParts(copy_seconds=0.1, digest_seconds=0.03, guard_seconds=0.02), 0.05, 7 * GIB)
    row = sync_row(Way("shared_memory", "full", "copied"), 2, rounds, first, costs)
    assert row.seconds == 0.4
    assert row.ratio_to_memcpy == pytest.approx(GIB / 8e9 / 0.3)  # of 0.447, 0.671, 0.134
    assert row.times_first == pytest.approx(1.5)  # of 1.5, 1.0, 2.0
    assert (row.pause_seconds_p50, row.pause_seconds_p99) == (1e-3, 1e-2)
    assert row.pause_with_first_step_p99 == pytest.approx(1.2e-2)
    assert row.pause_to_sync == pytest.approx(0.01)  # of 0.01, 0.005, 0.01
    assert row.bytes_moved == 3 * GIB
    moved = {way: bytes_moved(Way(*way), rounds[0]) // GIB for way in WAYS}  # type: ignore[arg-type]
    assert moved == dict(zip(WAYS, (1, 1, 3), strict=True))
    assert row.verify_share == pytest.approx(0.2)
    assert row.guard_share == pytest.approx(0.05)
    assert row.peak_bytes == 7 * GIB
    peer = peer_row("gloo_broadcast", 2, [PeerRound(0.6, 0.0), PeerRound(2.0, 0.0), PeerRound(3.0, 0.0)], rounds)
    assert peer.times_engine == pytest.approx(3.0)  # of 2, 5, 3
    assert (peer.seconds, peer.engine_seconds) == (2.0, 0.4)
