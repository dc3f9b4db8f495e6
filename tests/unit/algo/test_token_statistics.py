"""What is measured of tokens, by hand; sums of parts are those of the whole."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.algo.token_statistics import HIGHEST_LAG, TokenSums, token_sums


def sums_of(ratios: list[float], mask: list[int], lags: list[int] | None = None) -> TokenSums:
    rollout = torch.linspace(-2.0, -0.5, len(ratios), dtype=torch.float64)
    ratio = torch.tensor(ratios, dtype=torch.float64)
    return token_sums(
        rollout + ratio.log(),
        rollout,
        torch.tensor(mask),
        torch.tensor(lags or [-1] * len(ratios)),
        means={"actor/ratio_mean": ratio},
        maxima={"actor/ratio_max": ratio},
    )


def test_by_hand() -> None:
    # The third token is outside the mask.
    log = math.log(1.5)
    assert sums_of([1.0, 1.5, 7.0], [1, 1, 0]).metrics() == pytest.approx(
        {
            "rollout_corr/kl": -log / 2,
            "rollout_corr/k3_kl": (1.5 - 1 - log) / 2,
            "actor/logprob_diff_mean": log / 2,
            "actor/ratio_mean": 1.25,
            "actor/ratio_max": 1.5,
            "rollout_corr/rollout_is_eff_sample_size": 2.5**2 / (2 * 3.25),
        }
    )


def test_divergence_per_version_lag() -> None:
    found = sums_of([1.0, 1.5, 2.0, 0.5, 3.0], [1, 1, 1, 1, 0], [0, 1, 1, HIGHEST_LAG + 5, 0]).metrics()
    k3 = {ratio: ratio - 1 - math.log(ratio) for ratio in (1.0, 1.5, 2.0, 0.5)}
    per_lag = {name.rpartition("/")[2]: value for name, value in found.items() if "k3_kl/lag_" in name}
    assert per_lag == pytest.approx(
        {"lag_0": 0.0, "lag_1": (k3[1.5] + k3[2.0]) / 2, f"lag_{HIGHEST_LAG}_or_more": k3[0.5]}
    )


def test_parts_add_up() -> None:
    ratios, mask, lags = [1.0, 1.5, 0.5, 0.9], [1, 0, 1, 1], [0, 0, 1, 0]
    whole = sums_of(ratios, mask, lags).metrics()
    rollout = torch.linspace(-2.0, -0.5, 4, dtype=torch.float64)
    total = TokenSums()
    for i in range(4):
        ratio = torch.tensor(ratios[i : i + 1], dtype=torch.float64)
        total = total.plus(
            token_sums(
                rollout[i : i + 1] + ratio.log(),
                rollout[i : i + 1],
                torch.tensor(mask[i : i + 1]),
                torch.tensor(lags[i : i + 1]),
                means={"actor/ratio_mean": ratio},
                maxima={"actor/ratio_max": ratio},
            )
        )
    assert total.metrics() == pytest.approx(whole)


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_values_outside_the_mask_may_be_anything(junk: float) -> None:
    assert sums_of([1.0, junk], [1, 0]).metrics() == sums_of([1.0, 2.0], [1, 0]).metrics()


def test_no_token_at_all() -> None:
    assert set(sums_of([3.0, 2.0], [0, 0]).metrics().values()) == {0.0}
