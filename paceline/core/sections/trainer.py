"""`trainer.*`: how long, how often, where to, and how a run goes on after it was stopped."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.core.sections.section import Section

NAME = r"^[^/.][^/]*$"  # one part of a path, neither hidden nor upwards


class TrainerConfig(Section):
    """`trainer.*`"""

    seed: int = Field(0, ge=0, description="Seed of sampling and of anything random in the trainer.")
    test_freq: int = Field(5, ge=0, description="Versions between two validations; 0: only at the start and the end.")
    val_before_train: bool = Field(True, description="Validate the weights as they are before the first update.")
    project_name: str = Field(
        "paceline", pattern=NAME, description="Name of the project, part of the path of the run directory."
    )
    experiment_name: str = Field(
        "arithmetic", pattern=NAME, description="Name of the run, part of the path of the run directory."
    )
    default_local_dir: str = Field("runs", min_length=1, description="Directory below which run directories are made.")
    save_freq: int = Field(
        20,
        ge=0,
        description="Updates between two checkpoints, each taken right after the next weights were captured; 0: never.",
    )
    max_ckpt_to_keep: int = Field(2, ge=1, description="Checkpoints that are kept, the newest ones.")
    resume_mode: Literal["auto", "disable", "resume_path"] = Field(
        "auto",
        description="auto: go on with the newest run of this project and experiment if it is unfinished and has a "
        "checkpoint, in its directory; disable: always a new run; resume_path: go on from trainer.resume_from_path.",
    )
    resume_from_path: str | None = Field(
        None, description="Checkpoint directory (global_step_<n> of a run) for trainer.resume_mode=resume_path."
    )
    grace_seconds: float = Field(
        5.0,
        ge=0,
        description="After SIGTERM the run saves a checkpoint at the next update boundary if it can within this time; "
        "0: it does not.",
    )
    logger: tuple[Literal["console", "tensorboard"], ...] = Field(
        ("console", "tensorboard"), description="Where progress is shown besides the event log."
    )
    stall_timeout_seconds: float = Field(
        600.0,
        gt=0,
        description="Longest wait for samples, queue room or a validation before the run fails, naming who waited.",
    )
