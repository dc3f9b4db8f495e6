"""Which class serves which port: the only place that branches on kinds, with `task_parts` for prompts and rewards.

Every function imports what it builds when it is called, so that a light process (queue, synchronizer, rollouter)
never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.checkpoint_ports import CheckpointStore, NoJournal, TokenJournal
from paceline.core.config import Config
from paceline.core.errors import ConfigError
from paceline.core.object_transport import ObjectTransport
from paceline.core.ports import InferenceEngine, TrainBackend
from paceline.core.weight_ports import ServingBoard, WeightReceiver, WeightSender
from paceline.runtime.spec import RunSpec
from paceline.runtime.system import SystemClock
from paceline.tokenizer.fast_tokenizer import FastTokenizer

if TYPE_CHECKING:
    from paceline.weights.coverage import CoverageRules

FIRST_LIFE = 1


def model_path(config: Config) -> Path:
    """Directory of the model: `model.path`, or the one that the package ships.

    Raises:
        ConfigError: it is no Hugging Face model directory.
    """
    path = (
        Path(config.model.path) if config.model.path else Path(str(resources.files("paceline"))) / "assets/tiny_model"
    )
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path: {path} is not a local Hugging Face model directory (it has no config.json)")
    return path.absolute()


def build_tokenizer(spec: RunSpec) -> FastTokenizer:
    """The model's tokenizer, without transformers."""
    return FastTokenizer(spec.model_path)


def build_checkpoints(spec: RunSpec) -> CheckpointStore:
    """Where the run's checkpoints go."""
    from paceline.store.checkpoint_directory import CheckpointDirectory

    keep = spec.config.trainer.max_ckpt_to_keep
    return CheckpointDirectory(spec.checkpoints_dir, life=spec.life, keep=keep, journal=spec.journal_dir)


def build_journal(spec: RunSpec, replica_id: str) -> TokenJournal:
    """A replica's token journal; none where no checkpoint will ever be taken."""
    from paceline.store.token_journal import FileJournal

    trainer = spec.config.trainer
    if trainer.save_freq == 0 and trainer.grace_seconds == 0:
        return NoJournal()
    # Without checkpoints on the way, only the one at the end needs the journal, and of it what is open then.
    return FileJournal(spec.journal_dir, replica_id, spec.life, keeps="all" if trainer.save_freq else "open")


def build_backend(spec: RunSpec, threads: int) -> TrainBackend:
    """The train backend; sets this process's torch threads."""
    import torch

    from paceline.backend.torch_backend import TorchBackend

    torch.set_num_threads(threads)
    config = spec.config
    return TorchBackend(
        model_path=spec.model_path,
        actor=config.actor,
        seed=config.trainer.seed,
        correction=config.algorithm.rollout_correction,
    )


def build_sender(spec: RunSpec, threads: int, objects: ObjectTransport) -> WeightSender:
    """The trainer's end of `checkpoint_engine.backend`; `objects` serve `ray_object` alone."""
    from paceline.checkpoint_engine.shared_memory import SharedMemorySender

    config = spec.config
    if config.checkpoint_engine.backend == "filesystem":
        return _filesystem_sender(config, threads)
    if config.checkpoint_engine.backend == "ray_object":
        return _ray_object_sender(config, threads, objects)
    return SharedMemorySender(
        directory=spec.private_dir,
        arenas=config.arenas,
        dtype=config.rollout.dtype,
        nonfinite=config.checkpoint_engine.guard,
        threads=threads,
        keep=config.checkpoint_engine.keep,
        any_value=config.checkpoint_engine.any_value,
        delta=config.checkpoint_engine.mode,
        arena=config.checkpoint_engine.engine_kwargs.shared_memory.arena,
    )


def build_coverage_rules(config: Config) -> CoverageRules:
    """How the trainer's tensors become the engine's."""
    from paceline.weights.coverage import CoverageRules

    engine = config.checkpoint_engine
    return CoverageRules(
        name_rules=engine.name_rules, trainer_only=engine.trainer_only, engine_static=engine.engine_static
    )


def build_receiver(spec: RunSpec, replica_id: str, objects: ObjectTransport) -> WeightReceiver:
    """A replica's end of `checkpoint_engine.backend`; `objects` serve `ray_object` alone."""
    from paceline.checkpoint_engine.shared_memory import SharedMemoryReceiver

    engine = spec.config.checkpoint_engine
    if engine.backend == "filesystem":
        return _filesystem_receiver(spec.config, replica_id)
    if engine.backend == "ray_object":
        from paceline.checkpoint_engine.ray_object import RayObjectReceiver
        from paceline.store.node_digests import NodeDigests

        return RayObjectReceiver(
            objects,
            holder=replica_id,
            verify="off" if engine.verify == "off" else "full",
            deadline_seconds=engine.sync_timeout_seconds,
            digests=NodeDigests(str(spec.serving_dir / "digests")),
        )
    return SharedMemoryReceiver(holder=replica_id, verify=engine.verify, deadline_seconds=engine.sync_timeout_seconds)


def warm_up_deltas(config: Config) -> None:
    """Compile what deltas need before the first version, where there may be some; takes a second or so."""
    engine = config.checkpoint_engine
    if not engine.sends_deltas:
        return
    import torch

    from paceline.weights.delta import warm_up

    warm_up(getattr(torch, config.rollout.dtype), "fast" if engine.backend == "shared_memory" else "small")


def _ray_object_sender(config: Config, threads: int, objects: ObjectTransport) -> WeightSender:
    from paceline.checkpoint_engine.ray_object import RayObjectSender

    return RayObjectSender(
        objects,
        arenas=config.arenas,
        dtype=config.rollout.dtype,
        nonfinite=config.checkpoint_engine.guard,
        threads=threads,
        keep=config.checkpoint_engine.keep,
        any_value=config.checkpoint_engine.any_value,
        delta=config.checkpoint_engine.mode,
    )


def _filesystem_sender(config: Config, threads: int) -> WeightSender:
    from paceline.checkpoint_engine.filesystem import FilesystemSender

    options = config.checkpoint_engine.engine_kwargs.filesystem
    return FilesystemSender(
        url=_url(config),
        keep_versions=options.keep,
        keep_seconds=options.keep_seconds,
        shard_bytes=options.shard_megabytes << 20,
        full_every=options.full_every,
        dtype=config.rollout.dtype,
        nonfinite=config.checkpoint_engine.guard,
        threads=threads,
        keep=config.checkpoint_engine.keep,
        any_value=config.checkpoint_engine.any_value,
        delta=config.checkpoint_engine.mode,
        clock=SystemClock(),
    )


def _filesystem_receiver(config: Config, replica_id: str) -> WeightReceiver:
    from paceline.checkpoint_engine.filesystem import FilesystemReceiver

    engine = config.checkpoint_engine
    return FilesystemReceiver(
        url=_url(config),
        holder=replica_id,
        verify="off" if engine.verify == "off" else "full",
        deadline_seconds=engine.sync_timeout_seconds,
        clock=SystemClock(),
    )


def _url(config: Config) -> str:
    url = config.checkpoint_engine.engine_kwargs.filesystem.url
    if url is None:
        raise ConfigError("checkpoint_engine.engine_kwargs.filesystem.url is not set")
    return url


def next_life(config: Config) -> int:
    """The life of a new run: above every life whose versions stay where this run publishes (V3).

    Raises:
        ConfigError: that place cannot be used.
    """
    if config.checkpoint_engine.backend != "filesystem":
        return FIRST_LIFE
    from paceline.checkpoint_engine.filesystem_opening import newest_life

    return max(FIRST_LIFE, newest_life(_url(config)) + 1)


def build_board(spec: RunSpec, replica_id: str) -> ServingBoard:
    """Where a replica tells outside processes what it serves."""
    from paceline.store.serving_table import FileServingBoard

    return FileServingBoard(directory=str(spec.serving_dir), replica_id=replica_id)


def engine_factory(spec: RunSpec, replica_id: str, threads: int) -> Callable[[], InferenceEngine]:
    """Makes engines of `rollout.name`; sets this process's torch threads."""
    import torch

    from paceline.engine.embedded_engine import EmbeddedEngine

    torch.set_num_threads(threads)
    config = spec.config
    number = replica_id.rpartition("-")[2]
    place = int(number) if number.isdigit() else config.rollout.num_replicas  # what is no replica comes after them
    # A later life draws other random numbers; 7919 lives and replicas do not share one.
    seed = config.trainer.seed * 1000 + place + 7919 * (spec.life - FIRST_LIFE)
    made = 0

    def make() -> InferenceEngine:
        nonlocal made
        made += 1
        return EmbeddedEngine(
            model_config_dir=spec.model_path,
            dtype=config.rollout.dtype,
            max_num_seqs=config.rollout.max_num_seqs,
            max_model_len=config.max_model_len,
            kv_cache=config.rollout.kv_cache,
            seed=seed + 500 * (made - 1),
        )

    return make
