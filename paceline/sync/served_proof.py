"""Proof of what an engine serves after a swap, by its stated capability.

mapped  every name reads the staged bytes themselves: same address, shape, strides and dtype; those bytes were verified
copied  the engine's own bytes have the published digest of each tensor (or, where none was published, are equal to
        the staged ones); without verification only shapes, strides and dtypes are compared

What is staged is row-major, so an engine that reads it in another order serves other weights from the same bytes, and
memory in another order could not be read from outside (`ServingBoard`).
"""

from __future__ import annotations

import torch

from paceline.core.ports import InferenceEngine
from paceline.sync.covered_weights import CoveredWeights
from paceline.weights.digest import dense_bytes, digest_each


def strided_memory(engine: InferenceEngine) -> dict[str, tuple[int, ...]]:
    """Name -> strides of the tensors that an engine copies to and that are not row-major; empty for one that points."""
    if engine.apply == "mapped":
        return {}
    return {name: tensor.stride() for name, tensor in engine.served_tensors().items() if not tensor.is_contiguous()}


def wrong_tensors(engine: InferenceEngine, staged: CoveredWeights) -> list[str]:
    """The engine's names under which it does not serve what is staged; empty: it is proved."""
    served = engine.served_tensors()
    if engine.apply == "mapped" and all(served.get(name) is tensor for name, tensor in staged.tensors.items()):
        return []  # the staged tensors themselves, which takes less of the pause than to compare them
    unlike = [
        name
        for name, tensor in staged.tensors.items()
        if name not in served
        or (served[name].shape, served[name].dtype) != (tensor.shape, tensor.dtype)
        or not served[name].is_contiguous()
    ]
    if unlike:
        return unlike
    if engine.apply == "mapped":
        return [name for name, tensor in staged.tensors.items() if served[name].data_ptr() != tensor.data_ptr()]
    if not staged.digest:
        return []
    return _other_bytes({name: served[name] for name in staged.tensors}, staged)


def _other_bytes(served: dict[str, torch.Tensor], staged: CoveredWeights) -> list[str]:
    manifest = staged.manifest
    published = {meta.name: meta.digest for meta in manifest.tensors}
    expected = {name: published[manifest.aliases.get(staged.sources[name], staged.sources[name])] for name in served}
    taken = digest_each({name: tensor for name, tensor in served.items() if expected[name]})
    wrong = [name for name, digest in taken.items() if digest.hex() != expected[name]]
    return wrong + [
        name
        for name, tensor in served.items()
        if not expected[name] and dense_bytes(tensor).tobytes() != dense_bytes(staged.tensors[name]).tobytes()
    ]
