"""The memory check: the least of kernel and control groups, with both numbers in the refusal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import CapacityError
from paceline.store.capacity import check_memory, free_memory

GIB = 1 << 30


def machine(root: Path, cgroup: str, available_kib: int = 8 * 1024 * 1024) -> tuple[Path, Path]:
    proc, groups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kib} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc, groups


def group(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def test_without_groups_the_kernel_limits(tmp_path: Path) -> None:
    assert free_memory(*machine(tmp_path, "0::/\n")) == (8 * GIB, "MemAvailable")


def test_v2_limit_counts_droppable_cache_as_free(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/a/b\n")
    stat = f"anon 1\ninactive_file {GIB // 2}\nactive_file 7\n"
    group(groups / "a" / "b", memory__max=f"{2 * GIB}\n", memory__current=f"{GIB}\n", memory__stat=stat)
    assert free_memory(proc, groups) == (GIB + GIB // 2, str(groups / "a" / "b"))


def test_the_tightest_enclosing_group_counts(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/a/b\n")
    group(groups / "a" / "b", memory__max="max\n", memory__current="5\n")
    group(groups / "a", memory__max=f"{GIB}\n", memory__current="0\n")
    assert free_memory(proc, groups) == (GIB, str(groups / "a"))


def test_a_path_above_the_visible_root_means_the_root(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/../..\n")
    group(groups, memory__max=f"{GIB}\n", memory__current="0\n")
    assert free_memory(proc, groups) == (GIB, str(groups))


def test_v1_limit(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "5:cpu:/\n4:memory:/docker/x\n0::/\n")
    files = {"memory__limit_in_bytes": f"{3 * GIB}\n", "memory__usage_in_bytes": f"{2 * GIB}\n"}
    group(groups / "memory" / "docker" / "x", **files, memory__stat=f"total_inactive_file {GIB}\n")
    assert free_memory(proc, groups) == (2 * GIB, str(groups / "memory" / "docker" / "x"))


def test_v1_without_a_limit_is_no_limit(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "4:memory:/\n")
    group(groups / "memory", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="1\n")
    assert free_memory(proc, groups) == (8 * GIB, "MemAvailable")


def test_an_overdrawn_group_has_nothing_free(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/\n")
    group(groups, memory__max="10\n", memory__current="20\n")
    assert free_memory(proc, groups)[0] == 0


def test_the_refusal_has_needed_and_free() -> None:
    with pytest.raises(CapacityError, match=r"3 weight arenas need 1152921504606846976 bytes .* but \d+ bytes .* free"):
        check_memory(1 << 60, "3 weight arenas")
    check_memory(1, "one byte")


def test_it_needs_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; import paceline.store.capacity as c; c.check_memory(1, 'x');"
        "sys.exit(len({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
