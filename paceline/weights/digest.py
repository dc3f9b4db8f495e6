"""The tree digest of tensors: that of dense, row-major bytes; strides do not count. `tree_digest` has the scheme."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.weights.dtypes import dtype_name
from paceline.weights.leaf_runs import digest_leaves
from paceline.weights.tree_digest import root_digest, tensor_digest


def digest_tensors(tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str], threads: int = 1) -> str:
    """Hex root digest of tensors of any strides; names in `aliases` stand for the stored tensor they map to."""
    stored = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    entries = {
        name: (dtype_name(tensors[name].dtype), tuple(tensors[name].shape), digest)
        for name, digest in digest_each(stored, threads).items()
    }
    return root_digest(entries, aliases)


def digest_each(tensors: Mapping[str, torch.Tensor], threads: int = 1) -> dict[str, bytes]:
    """Digest of each tensor's dense bytes; large tensors are shared out among the threads."""
    dense = [name for name, tensor in tensors.items() if tensor.is_contiguous()]
    found = dict(zip(dense, digest_leaves([dense_bytes(tensors[name]) for name in dense], threads), strict=True))
    for name in tensors.keys() - found.keys():  # one copy at a time
        (found[name],) = digest_leaves([dense_bytes(tensors[name])], threads)
    return {name: tensor_digest([found[name]]) for name in tensors}


def dense_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The row-major bytes of a CPU tensor, one-dimensional; a view where the tensor is dense."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    array: NDArray[np.uint8] = flat(row_major(plain)).view(torch.uint8).numpy()
    return array


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where it is row-major, else a copy that is.

    For integers of less than a byte torch copies no elements; each of them has a byte of its own, which is copied.
    """
    try:
        return tensor.contiguous()
    except NotImplementedError:
        return tensor.view(torch.uint8).contiguous().view(tensor.dtype)


def flat(dense: torch.Tensor) -> torch.Tensor:
    """One-dimensional, stride 1: a dense tensor of one element may have any stride, and byte views refuse others."""
    return dense.as_strided((dense.numel(),), (1,))
