"""Makes the shipped tiny model from scratch: tokenizer, Qwen3 weights, and a warm start under a careless pupil.

    python scripts/make_tiny_model.py --out paceline/assets/tiny_model --seed 0

The warm start has two parts, both next-token prediction of the answer and its end token on the warm-start split alone:

1. Lessons: the right answers, until the model can compute pairs of operands that it never saw.
2. The careless pupil: he computes rightly, but each time he meets one of these he may overlook it:
   - the carry of the ones into the tens (47+85: 122 instead of 132),
   - the borrow of the ones from the tens (85-47: 48 instead of 38),
   - the minus sign of a negative result (47-85: 38 instead of -38).

He decides anew at every presentation, so the model learns his distribution and no list of mistakes: the likeliest
answer is the careless one, the right one keeps a good probability. The model is able, but poor; what reinforcement
learning has to do is to take the carelessness out. All is seeded. The time taken and the model's worth are printed.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paceline.task.arithmetic import Problem, is_well_formed, problems, score

# The special tokens lie outside ASCII, so that no printable text can spell one.
PAD: Final = "\u2400"
EOS: Final = "\u2404"
UNKNOWN: Final = "\ufffd"
CHARACTERS: Final = "\n" + "".join(chr(code) for code in range(0x20, 0x7F))
VOCABULARY: Final = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
PAD_ID: Final = VOCABULARY[PAD]
EOS_ID: Final = VOCABULARY[EOS]

CONTEXT_LENGTH: Final = 512
PROMPT_TOKENS: Final = 6
RESPONSE_TOKENS: Final = 4
NO_TARGET: Final = -100

LESSON_STEPS: Final = 900
PUPIL_STEPS: Final = 600
WARMUP_STEPS: Final = 50
BATCH_SIZE: Final = 256
LEARNING_RATE: Final = 2e-3
WEIGHT_DECAY: Final = 0.1
MAX_GRAD_NORM: Final = 1.0
REPORT_EVERY: Final = 300
EVALUATION_BATCH: Final = 500


@dataclass(frozen=True, slots=True)
class Pupil:
    """Who writes the answers; the fields are the probabilities in [0, 1] with which he overlooks each thing."""

    forget_carry: float
    forget_borrow: float
    forget_sign: float

    def answer(self, problem: Problem, draw: random.Random) -> str:
        """What he writes this time."""
        a, operator, b = int(problem.prompt[:2]), problem.prompt[2], int(problem.prompt[3:5])
        if operator == "+":
            carries = a % 10 + b % 10 >= 10
            return str(a + b - 10 * (carries and draw.random() < self.forget_carry))
        large, small = max(a, b), min(a, b)
        borrows = large % 10 < small % 10
        size = large - small + 10 * (borrows and draw.random() < self.forget_borrow)
        signed = a < b and draw.random() >= self.forget_sign
        return f"-{size}" if signed else str(size)


CAREFUL: Final = Pupil(forget_carry=0.0, forget_borrow=0.0, forget_sign=0.0)
CARELESS: Final = Pupil(forget_carry=0.75, forget_borrow=0.75, forget_sign=0.75)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of printable ASCII and newline; encoding adds no special tokens."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_model() -> Qwen3ForCausalLM:
    """A fresh model from torch's global seed: 2 layers, 0.4 M parameters, float32, tied embeddings."""
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]


def prompt_ids(chosen: Sequence[Problem]) -> Tensor:
    """int64 [len(chosen), PROMPT_TOKENS]."""
    return torch.tensor([[VOCABULARY[character] for character in problem.prompt] for problem in chosen])


def answer_ids(answers: Sequence[str]) -> Tensor:
    """int64 [len(answers), RESPONSE_TOKENS]: the characters, the end token, then PAD_ID."""
    rows = [[*(VOCABULARY[character] for character in answer), EOS_ID] for answer in answers]
    return torch.tensor([row + [PAD_ID] * (RESPONSE_TOKENS - len(row)) for row in rows])


def batches(draw: random.Random) -> Iterator[list[Problem]]:
    """The warm-start split, shuffled anew for every pass, without end; the short rest of a pass is left out."""
    order = list(problems("warm_start"))
    while True:
        draw.shuffle(order)
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            yield order[start : start + BATCH_SIZE]


def answer_loss(model: Qwen3ForCausalLM, prompts: Tensor, answers: Tensor) -> Tensor:
    """Mean cross entropy in nats per answer token, end token included."""
    ids = torch.cat([prompts, answers], dim=1)[:, :-1]
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, PROMPT_TOKENS - 1 :]
    targets = answers.masked_fill(answers == PAD_ID, NO_TARGET)
    return cross_entropy(model.lm_head(hidden).flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)


def build_optimizer(model: Qwen3ForCausalLM) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms' scales alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    scales = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to one hundredth."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * max(cosine, 0.01)


def warm_start(model: Qwen3ForCausalLM, pupil: Pupil, draw: random.Random) -> None:
    """Trains in place: LESSON_STEPS on right answers, then PUPIL_STEPS on the pupil's."""
    steps = LESSON_STEPS + PUPIL_STEPS
    validation = problems("validation")[:EVALUATION_BATCH]
    optimizer = build_optimizer(model)
    started = time.monotonic()
    for step, batch in zip(range(steps), batches(draw), strict=False):
        writer = CAREFUL if step < LESSON_STEPS else pupil
        loss = answer_loss(model, prompt_ids(batch), answer_ids([writer.answer(problem, draw) for problem in batch]))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        if (step + 1) % REPORT_EVERY == 0:
            accuracy, _ = measure(model, validation, temperature=0.0)
            seconds = time.monotonic() - started
            print(f"step {step + 1}: loss {loss.item():.4f}, greedy {accuracy:.3f}, {seconds:.0f} s", flush=True)


@torch.inference_mode()
def respond(model: Qwen3ForCausalLM, prompts: Tensor, temperature: float) -> list[str | None]:
    """The text before the end token for each row of `prompts`; None where it did not end. Temperature 0 is greedy."""
    ids = prompts
    for _ in range(RESPONSE_TOKENS):
        logits = model(ids, use_cache=False).logits[:, -1]
        if temperature == 0.0:
            token = logits.argmax(dim=-1, keepdim=True)
        else:
            token = torch.multinomial((logits / temperature).softmax(dim=-1), 1)
        ids = torch.cat([ids, token], dim=1)
    characters = list(VOCABULARY)
    rows: list[list[int]] = ids[:, prompts.shape[1] :].tolist()
    return ["".join(characters[i] for i in row[: row.index(EOS_ID)]) if EOS_ID in row else None for row in rows]


def measure(model: Qwen3ForCausalLM, chosen: Sequence[Problem], temperature: float) -> tuple[float, float]:
    """Share of right answers, and share of answers that ended and are well formed; both in [0, 1]."""
    right, formed = 0.0, 0
    for start in range(0, len(chosen), EVALUATION_BATCH):
        part = chosen[start : start + EVALUATION_BATCH]
        for problem, text in zip(part, respond(model, prompt_ids(part), temperature), strict=True):
            if text is not None:
                right += score(text, problem.answer)
                formed += is_well_formed(text)
    return right / len(chosen), formed / len(chosen)


def write(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Writes the Hugging Face directory: configuration, weights and tokenizer."""
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.pad_token_id = PAD_ID
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(str(directory))
    for path in directory.iterdir():
        path.chmod(0o644)  # weights are written for their owner alone, but a package is read by everyone
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{directory}: {size} bytes, {sum(parameter.numel() for parameter in model.parameters())} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the shipped tiny model from scratch.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the batches and the pupil")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch; the weights depend on it in the last bits"
    )
    parser.add_argument("--careful", action="store_true", help="no carelessness: measures what the recipe can reach")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    started = time.monotonic()
    model = build_model()
    warm_start(model, CAREFUL if arguments.careful else CARELESS, random.Random(arguments.seed))
    print(f"warm start: {time.monotonic() - started:.0f} s")
    for temperature in (0.0, 1.0):
        accuracy, formed = measure(model, problems("validation"), temperature)
        print(f"validation at temperature {temperature}: accuracy {accuracy:.4f}, well formed and ended {formed:.4f}")
    write(model, arguments.out)


if __name__ == "__main__":
    main()
