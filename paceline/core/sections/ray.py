"""`ray.*`: the Ray cluster that a run uses."""

from __future__ import annotations

from pydantic import Field, model_validator

from paceline.core.sections.section import Section


class RayConfig(Section):
    """`ray.*`"""

    address: str | None = Field(
        None,
        description="Running cluster to join, from one of its nodes: host:port of its head, or auto for the one that "
        "runs on this machine; none: a Ray of the run's own, that nobody else can reach.",
    )

    @model_validator(mode="after")
    def _form(self) -> RayConfig:
        if self.address in (None, "auto"):
            return self
        host, colon, port = str(self.address).rpartition(":")
        if not host or not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"address={self.address} has to be auto or host:port, for example 10.0.0.1:6379")
        return self
