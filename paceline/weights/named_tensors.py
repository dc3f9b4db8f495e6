"""Which tensors a model has, under every name, and which names are one tensor.

A tie is decided from the storage alone, never from a model's configuration: two names are one tensor where storage,
offset, shape, strides and type are equal. Weights that were tied once and have drifted apart are two tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from paceline.core.errors import CoverageError, SyncError
from paceline.weights.digest import row_major

_BYTE_TYPES = (torch.bool, torch.int8, torch.uint8)


def collect(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """All parameters, then all persistent buffers, in the module's order; tied weights under each of their names.

    The tensors are the live ones (not detached, not copied).
    """
    kept = {id(value) for value in module.state_dict(keep_vars=True).values()}
    named: list[tuple[str, torch.Tensor]] = list(module.named_parameters(remove_duplicate=False))
    named += [(name, buffer) for name, buffer in module.named_buffers(remove_duplicate=False) if id(buffer) in kept]
    return named


def split_aliases(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Split into tensors to store and further names of them: `(stored, aliases)` with `aliases[name]` a stored name.

    The first name of a tensor is the stored one. Empty tensors share nothing and are never aliases.

    Raises:
        CoverageError: a name occurs twice (all such names are in the message).
        SyncError: a tensor has no dense memory to copy from (sparse, quantized or meta).
    """
    pairs = list(named)
    doubled = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if doubled:
        raise CoverageError(f"tensors sent twice: {', '.join(doubled)}")
    stored: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first_name: dict[tuple[object, ...], str] = {}
    for name, tensor in pairs:
        _check_movable(name, tensor)
        identity = _identity(tensor)
        if tensor.numel() > 0 and identity in first_name:
            aliases[name] = first_name[identity]
        else:
            first_name[identity] = name
            stored[name] = tensor if _is_copied_by_torch(tensor) else row_major(tensor.detach())
    return stored, aliases


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _is_copied_by_torch(tensor: torch.Tensor) -> bool:
    """False where elements cannot be copied one by one (integers of less than a byte) and would have to be."""
    dtype = tensor.dtype
    return tensor.is_contiguous() or dtype.itemsize > 1 or dtype.is_floating_point or dtype in _BYTE_TYPES


def _check_movable(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise SyncError(f"tensor {name!r} ({tensor.dtype}, {kind}) has no plain bytes to send")
