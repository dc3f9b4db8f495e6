"""`model.*`: the model that is trained."""

from __future__ import annotations

from pydantic import Field

from paceline.core.sections.section import Section


class ModelConfig(Section):
    """`model.*`"""

    path: str | None = Field(
        None, description="Directory of a Hugging Face causal LM; none: the model that paceline ships."
    )
