"""What all sections of the configuration have in common: frozen, unknown keys are errors, numbers are finite."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One component's model; holds no keys itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)
