"""`data.*`: prompts, how they are rendered, and how long they and their responses may be."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from paceline.core.sections.section import Section


class DataConfig(Section):
    """`data.*`"""

    train_files: tuple[str, ...] = Field(
        (),
        description="Training prompts: one or several JSONL or Parquet files, or reasoning-gym data sets such as "
        "reasoning_gym:chain_sum?max_terms=3; none: the embedded arithmetic task.",
    )
    val_files: tuple[str, ...] = Field(
        (),
        description="Validation prompts, in the same forms; none: problems of the training task that training never "
        "draws, where it is embedded or of reasoning-gym.",
    )
    prompt_key: str = Field("prompt", min_length=1, description="Field of a row that holds the chat list or the text.")
    seed: int = Field(0, ge=0, description="Seed of the order in which training prompts are drawn.")
    val_size: int = Field(
        2000, ge=1, description="Problems per validation of a task that makes its own; files are used whole."
    )
    val_max_samples: int = Field(-1, ge=-1, description="Rows of each validation file that are used; -1: all.")
    max_prompt_length: int = Field(16, ge=1, description="Longest prompt, in tokens.")
    max_response_length: int = Field(8, ge=1, description="Most tokens of a response.")
    truncation: Literal["error", "left", "right", "filter"] = Field(
        "error",
        description="What becomes of a longer prompt: refused at the start (one that comes up later is left out and "
        "counted), its beginning or its end cut off, or left out and counted.",
    )
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments for the model's chat template, for example {enable_thinking: false}.",
    )

    @field_validator("train_files", "val_files", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("val_max_samples")
    @classmethod
    def _some(cls, value: int) -> int:
        if value == 0:
            raise ValueError("has to be -1 (all rows) or at least 1")
        return value
