"""`checkpoint_engine.*`: how weights reach the replicas, and what is checked on the way."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.core.sections.section import Section


class FilesystemKwargs(Section):
    """`checkpoint_engine.engine_kwargs.filesystem.*`"""

    url: str | None = Field(
        None,
        description="Root of the versions: an absolute path or a URL that fsspec knows; empty or of an earlier run.",
    )
    keep: int = Field(4, ge=2, description="Versions that stay readable, the newest included.")
    keep_seconds: float = Field(30.0, ge=0, description="A version stays at least this long after it was published.")
    full_every: int = Field(
        8, ge=1, description="A full version every so many; in between deltas, where checkpoint_engine.mode sends them."
    )
    shard_megabytes: int = Field(256, ge=1, description="Most MiB of data per file; a larger tensor has its own file.")

    @model_validator(mode="after")
    def _absolute(self) -> FilesystemKwargs:
        # Every process of a run opens it, each with a working directory of its own.
        if self.url is not None and not (self.url.startswith("/") or "://" in self.url):
            raise ValueError(f"url={self.url} has to be an absolute path or a URL")
        return self


class SharedMemoryKwargs(Section):
    """`checkpoint_engine.engine_kwargs.shared_memory.*`"""

    arena: Literal["memfd", "file"] = Field(
        "memfd",
        description="What versions lie in: sealed memory, or nameless files in the run's private directory.",
    )


class EngineKwargs(Section):
    """`checkpoint_engine.engine_kwargs.*`: options of one backend each."""

    shared_memory: SharedMemoryKwargs = Field(
        default_factory=SharedMemoryKwargs, description="Options of checkpoint_engine.backend=shared_memory."
    )
    filesystem: FilesystemKwargs = Field(
        default_factory=FilesystemKwargs, description="Options of checkpoint_engine.backend=filesystem."
    )


class CheckpointEngineConfig(Section):
    """`checkpoint_engine.*`"""

    backend: Literal["shared_memory", "ray_object", "filesystem"] = Field(
        "shared_memory", description="How published weights reach a replica."
    )
    engine_kwargs: EngineKwargs = Field(default_factory=EngineKwargs, description="Options of the backends.")
    mode: Literal["auto", "full", "delta"] = Field(
        "auto",
        description="What is sent: every version in full; a delta against what replicas serve; or (auto) a delta where "
        "it takes less than half the bytes. Over shared_memory, which fetches nothing, auto is full.",
    )
    verify: Literal["full", "changed", "off"] = Field(
        "full",
        description="What is hashed of a staged version before it is served: all, or (after a replica's first version, "
        "shared_memory only) the tensors whose digest has changed, or nothing.",
    )
    nonfinite: Literal["error", "skip", "off"] = Field(
        "error",
        description="What a NaN or infinity in captured weights does: end the run, skip this sync (the version is not "
        "raised), or nothing.",
    )
    name_rules: tuple[tuple[str, str], ...] = Field(
        (),
        description="Rewrites from the trainer's names to the engine's, in order: a prefix ('module.', '') or a "
        "component ('.base_layer', '').",
    )
    trainer_only: tuple[str, ...] = Field(
        (), description="Tensors (names or patterns) that the engine has no use for, for example 'value_head.*'."
    )
    engine_static: tuple[str, ...] = Field(
        (), description="Tensors (names or patterns) of the engine that the trainer never sends."
    )
    keep: tuple[str, ...] = Field(
        (), description="Tensors (names or patterns) that are sent in their own type whatever rollout.dtype is."
    )
    any_value: tuple[str, ...] = Field(
        (), description="Tensors (names or patterns) that may hold NaN and infinity, whatever `nonfinite` says."
    )
    update_order: Literal["all", "rolling"] = Field(
        "all", description="Whether replicas swap all at once, or `rolling_size` at a time while the others generate."
    )
    rolling_size: int = Field(1, ge=1, description="Replicas that swap at the same time under update_order=rolling.")
    sync_timeout_seconds: float = Field(60.0, gt=0, description="Deadline of each phase of a sync.")
    sync_attempts: int = Field(
        3, ge=1, description="How often an aborted sync is tried, each time with a new version, before the run fails."
    )

    @property
    def guard(self) -> Literal["error", "off"]:
        """What the sender does about non-finite values; `skip` is the synchronizer's way to take its error."""
        return "off" if self.nonfinite == "off" else "error"

    @property
    def sends_deltas(self) -> bool:
        """Whether a version may be sent as a delta."""
        return self.mode == "delta" or (self.mode == "auto" and self.backend != "shared_memory")

    @model_validator(mode="after")
    def _names(self) -> CheckpointEngineConfig:
        for old, _ in self.name_rules:
            if len(old) < 2 or old.startswith(".") == old.endswith("."):
                raise ValueError(f"name_rules: {old!r} is neither a prefix ('module.') nor a component ('.base_layer')")
        if self.verify == "changed" and self.backend != "shared_memory":
            raise ValueError(f"verify=changed is not possible with backend={self.backend}, which reads every byte anew")
        return self

    @property
    def swaps_at_once(self) -> int | None:
        """Most replicas that may swap at the same time; None: no bound."""
        return self.rolling_size if self.update_order == "rolling" else None
