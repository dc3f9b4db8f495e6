"""Block by block or all at once: the same log-probs, entropies and gradients; and memory that stays small."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from paceline.algo.linear_logprobs import BlockSizes, LogitForm, linear_logprobs

FORMS = {
    "plain": LogitForm(),
    "temperature": LogitForm(temperature=0.7),
    "scaled": LogitForm(scale=0.3, temperature=1.3),
    "capped": LogitForm(softcap=2.0),
    "all": LogitForm(scale=0.3, softcap=2.0, temperature=1.3),
}
BLOCKS = BlockSizes(tokens=4, vocabulary=5)
TOKENS, VOCABULARY, WIDTH = 13, 17, 6
Leaves = tuple[Tensor, Tensor, Tensor]


def leaves() -> tuple[Leaves, Tensor]:
    numbers = torch.Generator().manual_seed(3)
    shapes = ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    hidden, weight, bias = (
        torch.randn(shape, generator=numbers, dtype=torch.float64).requires_grad_() for shape in shapes
    )
    return (hidden, weight, bias), torch.randint(VOCABULARY, (TOKENS,), generator=numbers)


def whole(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: LogitForm
) -> tuple[Tensor, Tensor]:
    """The definition."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * form.scale
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    log_p = (logits / form.temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_values_and_gradients_are_those_of_the_whole(form: LogitForm) -> None:
    (hidden, weight, bias), targets = leaves()
    weights = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    results = []
    for found in (
        linear_logprobs(hidden, weight, bias, targets, form, BLOCKS),
        whole(hidden, weight, bias, targets, form),
    ):
        gradients = torch.autograd.grad((torch.stack(found) * weights).sum(), (hidden, weight, bias))
        results.append([*(value.detach() for value in found), *gradients])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_gradients_are_slopes(form: LogitForm) -> None:
    (hidden, weight, bias), targets = leaves()

    def of(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprobs(hidden, weight, bias, targets, form, BLOCKS)

    assert torch.autograd.gradcheck(of, (hidden, weight, bias))


def test_the_size_of_blocks_changes_nothing() -> None:
    (hidden, weight, _), targets = leaves()
    expected = linear_logprobs(hidden, weight, None, targets, LogitForm())
    for tokens, vocabulary in ((1, 1), (13, 17), (5, 100), (100, 3)):
        found = linear_logprobs(hidden, weight, None, targets, LogitForm(), BlockSizes(tokens, vocabulary))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_an_entry_that_is_never_drawn_spreads_nothing() -> None:
    (hidden, weight, bias), targets = leaves()
    with torch.no_grad():
        bias[5:10] = -torch.inf  # a whole block of the vocabulary
    possible = torch.where((targets >= 5) & (targets < 10), 0, targets)
    logprobs, entropies = linear_logprobs(hidden, weight, bias, possible, LogitForm(), BLOCKS)
    (logprobs.sum() + entropies.sum()).backward()  # type: ignore[no-untyped-call]
    kept = [*range(5), *range(10, VOCABULARY)]
    at = torch.tensor([kept.index(int(target)) for target in possible])
    expected = whole(hidden, weight[kept], bias[kept], at, LogitForm())
    torch.testing.assert_close((logprobs, entropies), expected)
    assert hidden.grad is not None
    assert bool(torch.isfinite(hidden.grad).all())


def test_large_logits_do_not_overflow() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[3e4], [2e4], [-3e4]])
    logprobs, entropies = linear_logprobs(hidden, weight, None, torch.tensor([1]), LogitForm(), BlockSizes(1, 1))
    assert logprobs.tolist() == pytest.approx([-1e4])
    assert entropies.tolist() == pytest.approx([0.0])


def test_no_tokens() -> None:
    (_, weight, _), _ = leaves()
    logprobs, entropies = linear_logprobs(
        torch.zeros(0, WIDTH, dtype=torch.float64), weight, None, torch.zeros(0, dtype=torch.int64), LogitForm()
    )
    assert logprobs.shape == entropies.shape == (0,)


# 4,096 tokens by 150,000 entries are 2.3 GiB of float32 logits, of which a plain loss keeps several copies.
MEASURE = """
import torch
from pathlib import Path
from paceline.algo.linear_logprobs import LogitForm, linear_logprobs
torch.set_num_threads(1)
hidden = torch.randn(4096, 8, requires_grad=True)
weight = torch.randn(150_000, 8, requires_grad=True)
targets = torch.randint(150_000, (4096,))
small = slice(0, 16)
sum(linear_logprobs(hidden[small], weight, None, targets[small], LogitForm())).sum().backward()
def kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kib("VmRSS")
logprobs, entropies = linear_logprobs(hidden, weight, None, targets, LogitForm())
(logprobs.sum() + entropies.sum()).backward()
print(kib("VmHWM") - before)
"""


@pytest.mark.slow
def test_memory_is_a_few_blocks() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=500, check=True)
    assert int(done.stdout) << 10 < 300 << 20
