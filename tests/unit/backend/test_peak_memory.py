"""An update of a model with a large vocabulary does not hold its logits; rows of like length waste no padding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.backend.packing import plan_micro_batches, plan_rows
from paceline.core.sample import TrainSequence

# 2,048 response tokens by 150,000 entries are 1.1 GiB of float32 logits, of which a plain loss keeps several copies.
UPDATE = """
import sys, torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM
from paceline.backend.torch_backend import TorchBackend
from paceline.core.sample import TrainBatch, TrainSequence
from paceline.core.sections.actor import ActorConfig
torch.set_num_threads(1)
shape = dict(vocab_size=150_000, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
config = AutoConfig.for_model("qwen3", num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, **shape)
AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1])
actor = ActorConfig(entropy_coeff=0.01, use_kl_loss=True)
backend = TorchBackend(model_path=sys.argv[1], actor=actor, seed=0)
def update(tokens, sequences):
    ids = [(7 * number) % 150_000 for number in range(tokens)]
    one = lambda i: TrainSequence((1, 2, 3 + i), ids, [-11.9] * tokens, [1] * tokens, 1.0 if i % 2 else -1.0)
    backend.update(TrainBatch([one(i) for i in range(sequences)], 1.0))
def kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])
update(8, 2)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kib("VmRSS")
update(256, 8)
print(kib("VmHWM") - before)
"""


@pytest.mark.slow
def test_an_update_does_not_hold_the_logits(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UPDATE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    assert int(done.stdout.splitlines()[-1]) << 10 < 400 << 20


@pytest.mark.parametrize("longest_shared_row", [0, 2048])
def test_a_long_tailed_batch_has_little_padding(longest_shared_row: int) -> None:
    numbers = np.random.default_rng(0)
    lengths = np.minimum(numbers.lognormal(5.0, 1.0, 512).astype(int) + 1, 4096)
    sequences = [
        TrainSequence(tuple(range(prompt % 64, prompt % 64 + 40)), [0] * int(length), [], [], 1.0)
        for prompt, length in enumerate(lengths)
    ]
    batches = plan_micro_batches(plan_rows(sequences, range(len(sequences)), longest_shared_row), 16384)
    padded = sum(max(row.length for row in batch) * len(batch) for batch in batches)
    used = sum(row.length for batch in batches for row in batch)
    assert used <= padded <= 1.06 * used
