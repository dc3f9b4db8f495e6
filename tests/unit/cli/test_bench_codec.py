"""`paceline bench codec`: rows for every codec and trace, all bit-exact; what cannot be read is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.cli import codec_peers
from paceline.cli.bench_codec import position_entropy, run
from paceline.cli.codec_traces import shipped_model_trace, synthetic_trace
from paceline.core.errors import ConfigError, PacelineError

CODECS = ["paceline-fast", "paceline-small", "int32 index+value", "xor+zstd-1", "full zstd-1"]


def traces(folder: Path) -> Path:
    base, target = synthetic_trace(1 << 12, 1e-5)
    save_file(base, folder / "a.safetensors")
    save_file(target, folder / "b.safetensors")
    entry = {"trace": "mine", "base": "a.safetensors", "target": "b.safetensors"}
    (folder / "traces.json").write_text(json.dumps([entry]))
    return folder


def test_every_codec_on_every_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    file = tmp_path / "rows.json"
    assert run(file, traces(tmp_path), rounds=1, elements=1 << 16) == 0
    assert torch.get_num_threads() == before
    rows = json.loads(file.read_bytes())
    assert [row["codec"] for row in rows] == 3 * CODECS
    assert {row["trace"] for row in rows} >= {"mine"}
    for row in rows:
        assert row["bytes"] > 0
        assert 0 < row["changed"] < 1
        assert min(row["encode_gbps"], row["apply_gbps"], row["copy_gbps"]) >= 0
        assert (row["pause_gbps"] is None) == (not row["codec"].startswith("paceline"))
    index = [row for row in rows if row["codec"] == "int32 index+value"]
    assert all(row["bytes_per_change"] == 6 for row in index)
    assert capsys.readouterr().out.count("entropy of uniform positions alone") == 3


def test_a_codec_that_brings_other_bits_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = codec_peers.Codec("idle", lambda _base, _target: b"", len, lambda _message, _base, _target: None)
    monkeypatch.setattr(codec_peers, "codecs", lambda: [idle])
    with pytest.raises(PacelineError, match="idle on synthetic"):
        run(None, traces(tmp_path), rounds=1, elements=1 << 16)


def test_traces_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"traces\.json"):
        run(None, tmp_path, rounds=1, elements=1 << 10)
    (traces(tmp_path) / "b.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"b\.safetensors"):
        run(None, tmp_path, rounds=1, elements=1 << 10)


def test_the_shipped_model_has_a_trace() -> None:
    base, target = shipped_model_trace()
    assert base.keys() == target.keys()
    changed = sum(int((base[name] != target[name]).sum()) for name in base)
    assert 0 < changed < 0.05 * sum(tensor.numel() for tensor in base.values())


@pytest.mark.parametrize(("changed", "expected"), [(0.0, 0.0), (1.0, 0.0), (0.5, 0.25), (0.01, 1.0099)])
def test_entropy_of_positions(changed: float, expected: float) -> None:
    assert position_entropy(changed) == pytest.approx(expected, abs=1e-4)
