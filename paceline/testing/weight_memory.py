"""Two ways in which a fake engine keeps its weights: it points at what it is given, or owns its memory and copies.

`OwnedWeights` can be made to fail in the middle of a copy, or to write a wrong byte, as real engines do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch


class WeightMemory(Protocol):
    """Where the marker engine's tensors are."""

    @property
    def apply(self) -> Literal["mapped", "copied"]: ...

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def clear(self) -> None: ...

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...


class PointedWeights:
    """Points at the tensors it is given."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def apply(self) -> Literal["mapped", "copied"]:
        """Mapped."""
        return "mapped"

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What is pointed at now."""
        return self._tensors

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Point at these."""
        self._tensors = dict(tensors)

    def clear(self) -> None:
        """Point at nothing."""
        self._tensors = {}


class OwnedWeights:
    """Memory of its own, one storage per name, made at the first `put` and kept.

    `fail_at` is the name whose copy raises ValueError, once per `put`, after the tensors before it were overwritten;
    `corrupt` is the name of which one byte is written wrong.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.fail_at: str | None = None
        self.corrupt: str | None = None
        self._turned: set[str] = set()

    @property
    def apply(self) -> Literal["mapped", "copied"]:
        """Copied."""
        return "copied"

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The own memory."""
        return self._tensors

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy, tensor after tensor."""
        fail_at, self.fail_at = self.fail_at, None
        for name, tensor in tensors.items():
            if name == fail_at:
                raise ValueError(f"boom in {name}")
            if name not in self._tensors:
                dense = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                self._tensors[name] = _column_major(dense) if name in self._turned else dense
            own = self._tensors[name]
            own.copy_(tensor)
            if name == self.corrupt:
                own.view(-1).view(torch.uint8)[0] ^= 1

    def turn(self, name: str) -> None:
        """Keep this matrix column-major from now on, as engines with fast kernels of their own do."""
        self._turned.add(name)
        if name in self._tensors:
            self._tensors[name] = _column_major(self._tensors[name])

    def clear(self) -> None:
        """The memory stays; its bytes mean nothing."""


def _column_major(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.t().contiguous().t()
