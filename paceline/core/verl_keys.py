"""Where the keys of verl's fully_async_policy are to be found here, for people who bring a configuration of theirs.

Facts alone, one line a key; the page docs/migrating_from_verl.md is made from them, and so is what is said of an
unknown key. A key is *same* (name and meaning), *renamed*, *irrelevant* (what it decides has one answer here) or
*unsupported*.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

Status = Literal["same", "renamed", "irrelevant", "unsupported"]


class VerlKey(NamedTuple):
    """`here` is the key of paceline, empty where there is none; `note` what differs, or why there is none."""

    key: str
    status: Status
    here: str
    note: str


# verl's key, and ours where the name is another; "" is the same name. Each may have a note.
_SAME: Final[tuple[tuple[str, str], ...]] = (
    ("async_training.staleness_threshold", "default 0.5; any decimal, computed exactly"),
    ("async_training.trigger_parameter_sync_step", "default 2"),
    ("async_training.require_batches", ""),
    ("async_training.partial_rollout", ""),
    ("async_training.use_trainer_do_validate", ""),
    ("rollout.n", ""),
    ("rollout.nnodes", ""),
    ("rollout.total_rollout_steps", "decides alone how long a run is"),
    ("data.train_files", "also names of reasoning-gym data sets"),
    ("data.val_files", "also names of reasoning-gym data sets"),
    ("data.val_max_samples", ""),
    ("data.prompt_key", ""),
    ("data.seed", ""),
    ("data.max_prompt_length", ""),
    ("data.max_response_length", ""),
    ("data.truncation", "`filter` in place of `middle`"),
    ("data.apply_chat_template_kwargs", ""),
    ("algorithm.adv_estimator", "grpo, rloo and dr_grpo"),
    ("algorithm.filter_groups.enable", "other prompts take the place of those that were dropped"),
    ("algorithm.rollout_correction.bypass_mode", ""),
    ("algorithm.rollout_correction.rollout_is", "needs bypass_mode=false"),
    ("algorithm.rollout_correction.rollout_is_threshold", ""),
    ("algorithm.rollout_correction.rollout_rs", "token, sequence or geometric"),
    ("algorithm.rollout_correction.rollout_rs_threshold", "a number"),
    ("algorithm.rollout_correction.rollout_rs_threshold_lower", ""),
    ("trainer.save_freq", "in updates"),
    ("trainer.test_freq", "in versions"),
    ("trainer.val_before_train", ""),
    ("trainer.resume_mode", ""),
    ("trainer.resume_from_path", ""),
    ("trainer.logger", "console and tensorboard"),
    ("trainer.project_name", ""),
    ("trainer.experiment_name", ""),
    ("trainer.default_local_dir", ""),
)
_RENAMED: Final[tuple[tuple[str, str, str], ...]] = (
    ("async_training.use_rollout_log_probs", "algorithm.rollout_correction.bypass_mode", ""),
    ("async_training.compute_prox_log_prob", "algorithm.rollout_correction.bypass_mode", "true is bypass_mode=false"),
    ("async_training.concurrent_samples_per_replica", "rollout.max_num_seqs", "in responses"),
    ("rollout.test_freq", "trainer.test_freq", ""),
    ("data.filter_overlong_prompts", "data.truncation", "true is truncation=filter"),
    ("actor_rollout_ref.model.path", "model.path", "a local directory"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size", "actor.ppo_mini_batch_size", ""),
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "actor.ppo_micro_batch_tokens", "in tokens"),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "actor.ppo_micro_batch_tokens", ""),
    ("actor_rollout_ref.actor.clip_ratio", "actor.clip_ratio_low", "and actor.clip_ratio_high"),
    ("actor_rollout_ref.actor.clip_ratio_low", "actor.clip_ratio_low", ""),
    ("actor_rollout_ref.actor.clip_ratio_high", "actor.clip_ratio_high", "default 0.28"),
    ("actor_rollout_ref.actor.clip_ratio_c", "actor.clip_ratio_c", "none switches it off"),
    ("actor_rollout_ref.actor.loss_agg_mode", "actor.loss_agg_mode", ""),
    ("actor_rollout_ref.actor.loss_scale_factor", "actor.loss_scale_factor", ""),
    ("actor_rollout_ref.actor.policy_loss.loss_mode", "actor.policy_loss.loss_mode", "vanilla, gspo and cispo"),
    ("actor_rollout_ref.actor.entropy_coeff", "actor.entropy_coeff", ""),
    ("actor_rollout_ref.actor.use_kl_loss", "actor.use_kl_loss", ""),
    ("actor_rollout_ref.actor.kl_loss_coef", "actor.kl_loss_coef", ""),
    ("actor_rollout_ref.actor.kl_loss_type", "actor.kl_loss_type", ""),
    ("actor_rollout_ref.actor.grad_clip", "actor.grad_clip", ""),
    ("actor_rollout_ref.actor.optim.lr", "actor.optim.lr", ""),
    ("actor_rollout_ref.actor.optim.lr_warmup_steps", "actor.optim.lr_warmup_steps", ""),
    ("actor_rollout_ref.actor.optim.weight_decay", "actor.optim.weight_decay", ""),
    ("actor_rollout_ref.actor.optim.betas", "actor.optim.betas", ""),
    ("actor_rollout_ref.actor.use_rollout_log_probs", "algorithm.rollout_correction.bypass_mode", ""),
    ("actor_rollout_ref.rollout.name", "rollout.name", ""),
    ("actor_rollout_ref.rollout.n", "rollout.n", ""),
    ("actor_rollout_ref.rollout.temperature", "rollout.temperature", ""),
    ("actor_rollout_ref.rollout.top_p", "rollout.top_p", ""),
    ("actor_rollout_ref.rollout.top_k", "rollout.top_k", ""),
    ("actor_rollout_ref.rollout.dtype", "rollout.dtype", ""),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size", "rollout.tensor_parallel_size", ""),
    ("actor_rollout_ref.rollout.gpu_memory_utilization", "rollout.engine_kwargs.vllm", "a key of it"),
    ("actor_rollout_ref.rollout.enforce_eager", "rollout.engine_kwargs.vllm", "a key of it"),
    ("actor_rollout_ref.rollout.max_num_seqs", "rollout.max_num_seqs", ""),
    ("actor_rollout_ref.rollout.max_model_len", "rollout.max_model_len", ""),
    ("actor_rollout_ref.rollout.val_kwargs.n", "rollout.val_kwargs.n", ""),
    ("actor_rollout_ref.rollout.val_kwargs.temperature", "rollout.val_kwargs.temperature", ""),
    ("actor_rollout_ref.rollout.val_kwargs.top_p", "rollout.val_kwargs.top_p", ""),
    ("actor_rollout_ref.rollout.val_kwargs.top_k", "rollout.val_kwargs.top_k", ""),
    ("actor_rollout_ref.rollout.val_kwargs.do_sample", "rollout.val_kwargs.do_sample", ""),
    ("actor_rollout_ref.rollout.checkpoint_engine.backend", "checkpoint_engine.backend", "backends of its own"),
    ("algorithm.norm_adv_by_std_in_grpo", "algorithm.adv_estimator", "false is adv_estimator=dr_grpo"),
    ("algorithm.rollout_correction.loss_type", "actor.policy_loss.loss_mode", "reinforce is nearest to cispo"),
    ("custom_reward_function.path", "reward.custom_reward_function.path", ""),
    ("custom_reward_function.name", "reward.custom_reward_function.name", ""),
    ("custom_reward_function.reward_kwargs", "reward.reward_kwargs", ""),
    ("reward_model.reward_kwargs.overlong_buffer_cfg.enable", "reward.overlong_buffer.enable", ""),
    ("reward_model.reward_kwargs.overlong_buffer_cfg.len", "reward.overlong_buffer.len", ""),
    ("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor", "reward.overlong_buffer.penalty_factor", ""),
    ("reward_model.overlong_buffer.enable", "reward.overlong_buffer.enable", ""),
    ("reward_model.overlong_buffer.len", "reward.overlong_buffer.len", ""),
    ("reward_model.overlong_buffer.penalty_factor", "reward.overlong_buffer.penalty_factor", ""),
    ("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep", ""),
    ("ray_kwargs.ray_init.address", "ray.address", ""),
)
_IRRELEVANT: Final[tuple[tuple[str, str], ...]] = (
    ("async_training.checkpoint_engine.enable", "weights always travel through a checkpoint engine"),
    ("async_training.checkpoint_engine.device_buffer_size_M", "weights are not moved in buffers of a device"),
    ("async_training.checkpoint_engine.overlap_broadcast_and_consume", "staging always runs beside generation"),
    ("rollout.n_gpus_per_node", "see rollout.num_replicas and rollout.tensor_parallel_size"),
    ("rollout.total_epochs", "rollout.total_rollout_steps decides alone; data is drawn again when it ends"),
    ("data.gen_batch_size", "samples are drawn one by one"),
    ("data.train_batch_size", "samples are drawn one by one; see actor.ppo_mini_batch_size"),
    ("data.shuffle", "prompts are always drawn in the order of data.seed"),
    ("data.return_raw_chat", "chat lists are always kept"),
    ("actor_rollout_ref.hybrid_engine", "trainer and replicas are always apart"),
    ("actor_rollout_ref.model.use_remove_padding", "responses to one prompt share a row, rows of like length a batch"),
    ("actor_rollout_ref.actor.use_dynamic_bsz", "micro-batches are always measured in tokens"),
    ("actor_rollout_ref.actor.use_torch_compile", "the model's own forward is used"),
    ("actor_rollout_ref.actor.checkpoint.save_contents", "a checkpoint holds all that a resumed run needs"),
    ("actor_rollout_ref.rollout.mode", "replicas are always asynchronous"),
    ("actor_rollout_ref.rollout.calculate_log_probs", "every token carries its log-prob"),
    ("actor_rollout_ref.rollout.free_cache_engine", "replicas share no device with the trainer"),
    ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", "see actor.ppo_micro_batch_tokens"),
    ("actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes", "weights are not sent in buckets"),
    ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "the reference sees the policy's micro-batches"),
    ("algorithm.gamma", "one reward per response, no critic"),
    ("algorithm.lam", "one reward per response, no critic"),
    ("algorithm.filter_groups.max_num_gen_batches", "dropped samples are replaced one by one"),
    ("trainer.nnodes", "the trainer is one process"),
    ("trainer.n_gpus_per_node", "the trainer is one process"),
    ("trainer.balance_batch", "the trainer is one process"),
    ("trainer.device", "the device of the model's process"),
    ("trainer.critic_warmup", "no critic"),
    ("trainer.log_val_generations", "every response is in the run's rollouts/"),
    ("ray_kwargs.ray_init.num_cpus", "a run's own Ray takes what it needs"),
)
_UNSUPPORTED: Final[tuple[tuple[str, str], ...]] = (
    ("async_training.use_dynamic_resource_scheduling", "devices do not change between training and generation"),
    ("async_training.dynamic_schedule_policy", "devices do not change between training and generation"),
    ("async_training.dynamic_schedule_deactivate_ratio", "devices do not change between training and generation"),
    ("async_training.dynamic_schedule_enable_rebalance", "devices do not change between training and generation"),
    ("data.train_max_samples", "cut the file"),
    ("data.reward_fn_key", "the field is always data_source"),
    ("data.image_key", "text only"),
    ("data.video_key", "text only"),
    ("data.custom_cls.path", "write JSONL or Parquet"),
    ("actor_rollout_ref.model.trust_remote_code", "code in a model's directory is never run"),
    ("actor_rollout_ref.model.enable_gradient_checkpointing", "lower actor.ppo_micro_batch_tokens"),
    ("actor_rollout_ref.model.lora_rank", "all weights are trained"),
    ("actor_rollout_ref.actor.strategy", "one process of plain PyTorch"),
    ("actor_rollout_ref.actor.ppo_epochs", "each batch is used once"),
    ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "one process of plain PyTorch"),
    ("actor_rollout_ref.actor.fsdp_config.param_offload", "one process of plain PyTorch"),
    ("actor_rollout_ref.actor.optim.lr_scheduler_type", "constant after the warm-up"),
    ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "set actor.optim.lr_warmup_steps"),
    ("actor_rollout_ref.rollout.multi_turn.enable", "one turn per sample"),
    ("actor_rollout_ref.rollout.agent.num_workers", "one turn per sample"),
    ("actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module", "backends are those of the package"),
    ("algorithm.use_kl_in_reward", "use actor.use_kl_loss"),
    ("algorithm.kl_ctrl.kl_coef", "use actor.kl_loss_coef"),
    ("algorithm.filter_groups.metric", "it is always the reward"),
    ("algorithm.rollout_correction.rollout_is_batch_normalize", "weights are used as they are"),
    ("algorithm.rollout_correction.rollout_token_veto_threshold", "use rollout_rs with a lower bound"),
    ("critic.model.path", "no critic"),
    ("reward_model.enable", "let an async reward function call the reward model's server"),
    ("reward_model.reward_manager", "rewards are a function of one response"),
    ("trainer.total_epochs", "set rollout.total_rollout_steps"),
    ("trainer.total_training_steps", "set rollout.total_rollout_steps"),
    ("trainer.val_only", "validate a model with trainer.val_before_train=true"),
    ("trainer.v1.trainer_mode", "one trainer"),
)
PREFIX: Final = "actor_rollout_ref."


def verl_keys() -> list[VerlKey]:
    """All of them, by status."""
    return list(_all())


def _all() -> Iterator[VerlKey]:
    yield from (VerlKey(key, "same", key, note) for key, note in _SAME)
    yield from (VerlKey(key, "renamed", here, note) for key, here, note in _RENAMED)
    yield from (VerlKey(key, "irrelevant", "", note) for key, note in _IRRELEVANT)
    yield from (VerlKey(key, "unsupported", "", note) for key, note in _UNSUPPORTED)


def verl_hint(key: str) -> str | None:
    """What to do about a key of verl that is unknown here; None: it is none of verl's that this table has.

    Example: `verl_hint("rollout.test_freq") == "verl's rollout.test_freq is trainer.test_freq here"`.
    """
    for known in _all():
        if key not in (known.key, known.key.removeprefix(PREFIX)):
            continue
        if known.status in ("same", "renamed"):
            return f"verl's {known.key} is {known.here} here" + (f" ({known.note})" if known.note else "")
        return f"verl's {known.key} is {known.status} here: {known.note}"
    return None
