"""Memory of the weight arenas, known before anything starts."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest

from paceline.cli.model_files import check_arenas
from paceline.core.config import build_config
from paceline.core.errors import CapacityError, ConfigError
from paceline.runtime.model_files import count_elements


def write_header(file: Path, **shapes: tuple[int, ...]) -> None:
    """A sparse safetensors file: a header, and a hole where the numbers would be."""
    offset = 0
    header: dict[str, object] = {}
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + offset)


def test_elements_of_all_files_are_counted(tmp_path: Path) -> None:
    write_header(tmp_path / "model-1.safetensors", a=(2, 3), b=())
    write_header(tmp_path / "model-2.safetensors", c=(5,))
    assert count_elements(tmp_path) == 12


def test_a_model_without_readable_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors file"):
        count_elements(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        count_elements(tmp_path)


def test_arenas_that_do_not_fit_are_refused_with_bytes_needed_and_free(tmp_path: Path) -> None:
    # 2^40 elements: no machine that runs this test has 12 TiB free.
    write_header(tmp_path / "model.safetensors", a=(1 << 20, 1 << 20))
    with pytest.raises(CapacityError) as caught:
        check_arenas(build_config({}), tmp_path)
    assert "3 weight arenas of 4398046511104 bytes need 13194139533312 bytes" in caught.value.message
    assert re.search(r"but \d+ bytes .* are free", caught.value.message)


def test_needed_bytes_follow_dtype_and_number_of_arenas(tmp_path: Path) -> None:
    write_header(tmp_path / "model.safetensors", a=(1 << 20, 1 << 20))
    half = build_config({"rollout": {"dtype": "bfloat16", "max_pinned_versions": 2}})
    with pytest.raises(CapacityError, match=r"4 weight arenas of 2199023255552 bytes need 8796093022208 bytes"):
        check_arenas(half, tmp_path)


def test_a_small_model_fits(tmp_path: Path) -> None:
    write_header(tmp_path / "model.safetensors", a=(8, 8))
    check_arenas(build_config({}), tmp_path)
