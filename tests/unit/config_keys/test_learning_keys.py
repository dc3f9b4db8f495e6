"""Keys of losses, corrections and the reference: two updates of a tiny random model, in one window of versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.backend.torch_backend import TorchBackend
from paceline.core.sample import TrainBatch, TrainSequence
from tests.unit.backend.tiny_models import ragged_sequences, write_model
from tests.unit.config_keys.keys import config_with, shows
from tests.unit.train.train_batches import batch_of, response

Metrics = list[dict[str, float]]
Learn = Callable[..., Metrics]
CORRECTION = "algorithm.rollout_correction"
DECOUPLED: dict[str, object] = {f"{CORRECTION}.bypass_mode": False}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model("qwen3", Path(tmp_path_factory.mktemp("model")))


@pytest.fixture
def learn(model_path: str) -> Learn:
    """The metrics of two updates over the same batch, at a large rate."""

    def run(settings: dict[str, object], sequences: list[TrainSequence] | None = None) -> Metrics:
        config = config_with({"actor.optim.lr": 0.01, "actor.optim.lr_warmup_steps": 0, **settings})
        correction = config.algorithm.rollout_correction
        backend = TorchBackend(model_path=model_path, actor=config.actor, seed=0, correction=correction)
        return [backend.update(TrainBatch(sequences or ragged_sequences(), 1.0, window=1)) for _ in range(2)]

    return run


@shows("actor.policy_loss.loss_mode")
def test_losses_have_different_gradients(learn: Learn) -> None:
    by_sequence: dict[str, object] = {"actor.loss_agg_mode": "seq-mean-token-mean"}
    norms = [
        learn({**by_sequence, "actor.policy_loss.loss_mode": mode})[0]["actor/grad_norm"]
        for mode in ("vanilla", "gspo", "cispo")
    ]
    assert len(set(norms)) == 3
    assert min(norms) > 0


@shows("actor.clip_ratio_c")
def test_bad_tokens_are_bounded(learn: Learn) -> None:
    likelier = [TrainSequence((3, 4), [5, 6], [-9.0, -9.0], [1, 1], -1.0)]
    tight, wide, off = (learn({"actor.clip_ratio_c": bound}, likelier)[0] for bound in (1.01, 1e6, None))
    assert tight["actor/pg_clipfrac_lower"] > 0.0 == wide["actor/pg_clipfrac_lower"]
    assert tight["actor/pg_loss"] < wide["actor/pg_loss"] == off["actor/pg_loss"]


@shows("actor.loss_scale_factor")
def test_the_loss_is_divided_by_it(learn: Learn) -> None:
    def loss(factor: float) -> float:
        settings: dict[str, object] = {"actor.loss_agg_mode": "seq-mean-token-sum-norm"}
        return learn({**settings, "actor.loss_scale_factor": factor})[0]["actor/pg_loss"]

    assert loss(8.0) == pytest.approx(loss(2.0) / 4)


@shows("actor.use_kl_loss", "actor.kl_loss_coef")
def test_the_penalty_enters_the_gradient(learn: Learn) -> None:
    off, light, heavy = (
        learn({"actor.use_kl_loss": use, "actor.kl_loss_coef": weight})[1]
        for use, weight in ((False, 9.0), (True, 0.0), (True, 9.0))
    )
    assert "actor/kl_loss" not in off
    assert light["actor/kl_loss"] > 0.0
    assert off["actor/grad_norm"] == pytest.approx(light["actor/grad_norm"], rel=1e-4)
    assert heavy["actor/grad_norm"] != pytest.approx(light["actor/grad_norm"], rel=1e-2)


@shows("actor.kl_loss_type")
def test_estimators_differ_and_verls_names_are_known(learn: Learn) -> None:
    def estimate(kind: str) -> float:
        return learn({"actor.use_kl_loss": True, "actor.kl_loss_type": kind})[1]["actor/kl_loss"]

    k1, k2, k3 = (estimate(kind) for kind in ("k1", "k2", "k3"))
    assert len({k1, k2, k3}) == 3
    assert (estimate("kl"), estimate("mse"), estimate("low_var_kl")) == (k1, k2, k3)


@shows("actor.reference_dtype")
def test_a_narrow_reference_is_a_little_off(learn: Learn) -> None:
    def first(dtype: str) -> float:
        return learn({"actor.use_kl_loss": True, "actor.kl_loss_type": "k2", "actor.reference_dtype": dtype})[0][
            "actor/kl_loss"
        ]

    assert first("float32") == pytest.approx(0.0, abs=1e-9)
    assert 1e-9 < first("bfloat16") < 0.1


@shows("algorithm.rollout_correction.bypass_mode")
def test_the_ratio_is_to_the_rollout_or_to_the_proximal_policy(learn: Learn) -> None:
    assert learn({f"{CORRECTION}.bypass_mode": True})[0]["actor/ratio_max"] > 1.5
    assert learn(DECOUPLED)[0]["actor/ratio_max"] == 1.0


@shows("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold")
def test_weights_are_truncated(learn: Learn) -> None:
    def weights(level: str, threshold: float) -> dict[str, float]:
        settings = {f"{CORRECTION}.rollout_is": level, f"{CORRECTION}.rollout_is_threshold": threshold}
        return learn({**DECOUPLED, **settings})[0]

    assert "rollout_corr/rollout_is_mean" not in learn(DECOUPLED)[0]
    assert weights("token", 1.5)["rollout_corr/rollout_is_max"] == 1.5
    assert weights("token", 2.0)["rollout_corr/rollout_is_max"] == 2.0
    names = ("rollout_corr/rollout_is_mean", "actor/grad_norm")
    assert all(weights("token", 2.0)[name] != weights("sequence", 2.0)[name] for name in names)


@shows(
    "algorithm.rollout_correction.rollout_rs",
    "algorithm.rollout_correction.rollout_rs_threshold",
    "algorithm.rollout_correction.rollout_rs_threshold_lower",
)
def test_bounds_take_tokens_out(learn: Learn) -> None:
    def rejected(level: str | None, upper: float | None = None, lower: float | None = None) -> float:
        settings = {"rollout_rs": level, "rollout_rs_threshold": upper, "rollout_rs_threshold_lower": lower}
        found = learn({f"{CORRECTION}.{name}": value for name, value in settings.items()})[0]
        return found["rollout_corr/rollout_rs_masked_fraction"]

    assert rejected(None) == rejected("token", 1e9, 0.0) == 0.0
    assert 0.0 < rejected("token", 3.0) < rejected("token", 1.5)
    assert rejected("token", 1e9, 0.9) > rejected("token", 1e9, 0.5) > 0.0
    assert rejected("token") == rejected("token", 2.0)  # that of rollout_is_threshold
    assert len({rejected(level, 1.5) for level in ("token", "sequence", "geometric")}) > 1


@shows("reward.overlong_buffer.enable", "reward.overlong_buffer.len", "reward.overlong_buffer.penalty_factor")
def test_long_responses_lose_reward() -> None:
    def gap(**overlong: object) -> float:
        """Between a response of 6 tokens and one of 8, the most there may be; both have reward 1."""
        settings = {f"reward.overlong_buffer.{name}": value for name, value in overlong.items()}
        settings = {"algorithm.adv_estimator": "dr_grpo", "data.max_response_length": 8, **settings}
        short, long = batch_of([response(6, 1.0), response(8, 1.0)], settings).sequences
        return short.advantage - long.advantage

    assert gap(enable=False) == 0.0
    assert gap(enable=True, len=2) == pytest.approx(1.0)
    assert gap(enable=True, len=4) == pytest.approx(0.5)
    assert gap(enable=True, len=4, penalty_factor=3.0) == pytest.approx(1.5)
