"""Where a model keeps its weights, and how other tensors are put there without a copy.

Law: a binding is checked whole before the first slot changes, so a refused one leaves the model as it was (V6). Bound
tensors are only read. All names of a tied weight point at the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from paceline.core.errors import CoverageError


class _Slot(NamedTuple):
    """One name: the module's own dictionary of parameters or buffers, and the key in it."""

    holder: dict[str, torch.Tensor | None]
    attribute: str
    parameter: bool


class WeightSlots:
    """Every parameter and persistent buffer of a model, by every name it has.

    Example: `WeightSlots(model).bind({"lm_head.weight": t, "model.embed_tokens.weight": t, ...})`.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._slots: dict[str, _Slot] = {}
        self._expected: dict[str, tuple[torch.dtype, torch.Size]] = {}
        first_name: dict[int, str] = {}
        self._ties: list[tuple[str, str]] = []
        for name, tensor in model.state_dict(keep_vars=True).items():
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            parameter = attribute in module._parameters  # noqa: SLF001 - torch has no public way to replace one
            holder = module._parameters if parameter else module._buffers  # noqa: SLF001
            self._slots[name] = _Slot(holder, attribute, parameter)  # type: ignore[arg-type]
            self._expected[name] = (tensor.dtype, tensor.shape)
            if (first := first_name.setdefault(id(tensor), name)) != name:
                self._ties.append((first, name))

    def expected(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape), aliases included; dtypes as in "float32"."""
        return {name: (_dtype_name(dtype), tuple(shape)) for name, (dtype, shape) in self._expected.items()}

    @property
    def ties(self) -> list[tuple[str, str]]:
        """Pairs of names that are one tensor of the model."""
        return self._ties

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the model read these tensors. They are not copied and never written.

        Raises:
            CoverageError: names, dtypes, shapes, layouts or ties differ; all of them are named and nothing has changed.
        """
        self._check(tensors)
        parameters: dict[int, nn.Parameter] = {}
        for name, slot in self._slots.items():
            tensor = tensors[name]
            if slot.parameter:
                parameter = parameters.get(tensor.data_ptr()) if tensor.numel() else None
                if parameter is None or parameter.shape != tensor.shape:
                    parameter = parameters[tensor.data_ptr()] = nn.Parameter(tensor.detach(), requires_grad=False)
                slot.holder[slot.attribute] = parameter
            else:
                slot.holder[slot.attribute] = tensor

    def release(self) -> None:
        """Hold nothing: every slot gets a tensor without memory, as before the first binding."""
        for name, slot in self._slots.items():
            dtype, shape = self._expected[name]
            empty = torch.empty(shape, dtype=dtype, device="meta")
            slot.holder[slot.attribute] = nn.Parameter(empty, requires_grad=False) if slot.parameter else empty

    def served(self) -> dict[str, torch.Tensor]:
        """Name -> the tensor that the module holds now, read from the modules themselves."""
        held = {name: slot.holder[slot.attribute] for name, slot in self._slots.items()}
        return {name: tensor.detach() for name, tensor in held.items() if tensor is not None}

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if len(tensors) == len(self._expected) and all(
            (tensor := tensors.get(name)) is not None
            and tensor.dtype == dtype
            and tensor.shape == shape
            and tensor.is_contiguous()
            and tensor.device.type == self._device.type
            for name, (dtype, shape) in self._expected.items()
        ):
            wrong = []
        else:
            wrong = self._offences(tensors)
        wrong += [
            f"{second}: tied to {first} but given other memory"
            for first, second in self._ties
            if not wrong and tensors[first].data_ptr() != tensors[second].data_ptr()
        ]
        if wrong:
            raise CoverageError(f"these weights do not fit the model: {'; '.join(wrong)}")

    def _offences(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        wrong = [f"{name}: missing" for name in self._expected if name not in tensors]
        wrong += [f"{name}: not in the model" for name in tensors if name not in self._expected]
        for name, (dtype, shape) in self._expected.items():
            tensor = tensors.get(name)
            if tensor is None:
                continue
            if (tensor.dtype, tensor.shape) != (dtype, shape):
                given = f"{_dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
                wrong.append(f"{name}: {given} instead of {_dtype_name(dtype)} {tuple(shape)}")
            elif not tensor.is_contiguous():
                wrong.append(f"{name}: strides {tensor.stride()} are not row-major")
            elif tensor.device.type != self._device.type:
                wrong.append(f"{name}: on {tensor.device} instead of {self._device}")
        return wrong


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
