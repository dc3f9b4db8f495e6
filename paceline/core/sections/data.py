"""`data.*`: prompts, and how long they and their responses may be."""

from __future__ import annotations

from pydantic import Field

from paceline.core.sections.section import Section


class DataConfig(Section):
    """`data.*`"""

    seed: int = Field(0, ge=0, description="Seed of the order in which training prompts are drawn.")
    val_size: int = Field(2000, ge=1, description="Problems per validation.")
    max_prompt_length: int = Field(
        16, ge=1, description="Longest prompt, in tokens; a longer one is refused at the start."
    )
    max_response_length: int = Field(8, ge=1, description="Most tokens of a response.")
