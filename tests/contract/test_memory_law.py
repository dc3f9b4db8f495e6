"""What a sync takes: two arenas for the writer whatever is cast or strided, and nothing of its own for a reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.store.arena_backing import ArenaKind

MIB = 1 << 20
BUCKET = 8 * MIB  # what a copy may have in hand at a time, allocator and threads included

# Prints the rise of the peak over the first capture, over the third, and the private memory that a first staging left,
# which loads its code, and three later ones.
MEASURED = """
import sys, torch
from pathlib import Path
from paceline.checkpoint_engine.shared_memory import SharedMemoryReceiver, SharedMemorySender
from paceline.testing.publication import publish

def kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])

def peak_over(action):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = kib("VmRSS")
    action()
    return kib("VmHWM") - before

directory, kind, source, dtype = sys.argv[1:]
torch.set_num_threads(1)
weight = torch.ones(4096, 4096)
if source == "transposed":
    weight = weight.t()
sender = SharedMemorySender(directory=directory, arena=kind, dtype=dtype or None, threads=2)
manifests = []
peaks = [peak_over(lambda: manifests.append(publish(sender, [("w", weight)], n))) for n in (1, 2, 3)]
receiver, private = SharedMemoryReceiver(holder="r"), []
for n in (4, 5, 6, 7):
    published = publish(sender, [("w", weight)], n)
    before = kib("RssAnon")
    staged = receiver.stage(published)
    assert staged.tensors["w"][7, 9] == 1
    private.append(kib("RssAnon") - before)
    staged.release()
    del staged
print(peaks[0], peaks[2], private[0], sum(private[1:]))
"""


@pytest.mark.parametrize(
    ("kind", "source", "dtype", "version_bytes"),
    [
        ("memfd", "dense", "bfloat16", 32 * MIB),
        ("memfd", "transposed", "", 64 * MIB),
        ("file", "dense", "", 64 * MIB),
        ("file", "transposed", "bfloat16", 32 * MIB),
    ],
)
def test_a_writer_takes_two_arenas_and_a_bucket_and_a_reader_nothing(
    tmp_path: Path, kind: ArenaKind, source: str, dtype: str, version_bytes: int
) -> None:
    command = [sys.executable, "-c", MEASURED, str(tmp_path), kind, source, dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    first, third, private, later = (int(field) * 1024 for field in done.stdout.split())
    assert 2 * version_bytes <= first < 2 * version_bytes + 8 * BUCKET  # compiles and loads as well
    assert third < BUCKET
    assert private < BUCKET
    assert later < MIB
