"""How much memory is free, and the refusal before anything is allocated that would not fit.

Free is the least of what the kernel can hand out (MemAvailable) and what each enclosing control group still allows
(v2 and v1). Page cache that a group can drop counts as free. Standard library only: it is asked before anything heavy
is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import CapacityError

_GIB = 1 << 30
# A v1 group without a limit shows the largest multiple of the page size.
_UNLIMITED = 1 << 60
# Limit, usage, and the line of memory.stat with the cache that can be dropped.
_V2_FILES = ("memory.max", "memory.current", "inactive_file")
_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def check_memory(needed_bytes: int, what: str) -> None:
    """Refuse what does not fit; `what` names the asker, for example "3 weight arenas of 40000000 bytes".

    Raises:
        CapacityError: with the bytes needed, the bytes free, and what limits them.
    """
    free, limit = free_memory()
    if needed_bytes > free:
        raise CapacityError(
            f"{what} need {needed_bytes} bytes ({needed_bytes / _GIB:.2f} GiB), "
            f"but {free} bytes ({free / _GIB:.2f} GiB) are free ({limit})"
        )


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """Free bytes and what limits them: "MemAvailable" or the control group's directory."""
    limits = [(_mem_available(proc), "MemAvailable"), *_group_limits(proc, groups)]
    free, limit = min(limits)
    return max(0, free), limit


def _mem_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _UNLIMITED


def _group_limits(proc: Path, groups: Path) -> Iterator[tuple[int, str]]:
    for line in _lines(proc / "self" / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            roots, files = [groups, groups / "unified"], _V2_FILES
        elif "memory" in controllers.split(","):
            roots, files = [groups / "memory"], _V1_FILES
        else:
            continue
        for root in roots:
            for directory in _enclosing(root, path):
                free = _group_free(directory, *files)
                if free is not None:
                    yield free, str(directory)


def _enclosing(root: Path, path: str) -> Iterator[Path]:
    """The group's directory and all above it, up to the root of its hierarchy."""
    # Seen from inside a container the path may lie above the visible root; the root then is the group itself.
    parts = [part for part in path.split("/") if part and part != ".."]
    for length in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:length])


def _group_free(directory: Path, limit_file: str, usage_file: str, cache_key: str) -> int | None:
    limit, usage = _lines(directory / limit_file), _lines(directory / usage_file)
    if not limit or not usage or not limit[0].isdigit() or int(limit[0]) >= _UNLIMITED:
        return None
    cache = next((int(line.split()[1]) for line in _lines(directory / "memory.stat") if line.startswith(cache_key)), 0)
    return int(limit[0]) - max(0, int(usage[0]) - cache)


def _lines(path: Path) -> list[str]:
    """Lines of a small kernel file; none where it does not exist or may not be read."""
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
