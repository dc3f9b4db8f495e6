"""VllmModel: loads checkpoint tensors into the model of one vLLM worker by vLLM's own layer-wise reload.

The reload keeps the storage of every parameter that is still there (CUDA graphs go on), and packs again what was
packed. Which checkpoint names share a layer (fused projections) is learned from vLLM itself in the first whole load, by
watching which layers take each tensor. Works on whatever device the model is; `vllm` is imported inside: it is there
when this runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from paceline.core.errors import CoverageError, DigestMismatch, SyncError
from paceline.engine.slot_plan import Group
from paceline.engine.slot_writer import Changes, SlotWriter

MOST_WATCHED = 20_000_000  # layers times tensors; beyond it watching would take longer than loading all


class VllmModel:
    """Implements `engine.vllm_worker.ModelLoader`. `model_config` is vLLM's."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model = model
        self._config = model_config
        self._layers: dict[str, set[str]] = {}  # checkpoint name -> layers that take it
        self._writer: SlotWriter | None = None

    def describe(self) -> Mapping[str, str]:
        """See the port."""
        return {
            "model_type": str(self._config.hf_text_config.model_type),
            "dtype": str(self._config.dtype).removeprefix("torch."),
            "quantization": str(self._config.quantization or ""),
            "logprobs_mode": str(self._config.logprobs_mode),
        }

    def load_all(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a whole checkpoint.

        Raises:
            CoverageError: vLLM refused a tensor, or parameters got none.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        expected = {name for name, _ in self._model.named_parameters()}  # tied ones once
        with torch.no_grad():
            initialize_layerwise_reload(self._model)
            try:
                loaded = self._load(self._watched(weights))
            finally:
                finalize_layerwise_reload(self._model, self._config)
            self._refresh_shared()
        missing = set() if loaded is None or self._config.quantization else expected - loaded
        if missing:
            raise CoverageError(f"these parameters of the server's model got no tensor: {sorted(missing)[:16]}")

    def layers_of(self, names: Collection[str]) -> set[str] | None:
        """The names of all tensors in the layers of these; None: that is not known."""
        if not set(names) <= self._layers.keys():
            return None
        layers: set[str] = set()
        wanted = set(names)
        while grown := {layer for name in wanted for layer in self._layers[name]} - layers:
            layers |= grown
            wanted = {name for name, theirs in self._layers.items() if theirs & layers}
        return wanted

    def load_layers(self, weights: Iterable[tuple[str, torch.Tensor]], names: Collection[str]) -> None:
        """Load whole layers, the others stay untouched."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        modules = dict(self._model.named_modules())
        layers = [modules[layer] for layer in sorted({layer for name in names for layer in self._layers[name]})]
        with torch.no_grad():
            for layer in layers:
                initialize_layerwise_reload(layer)
            try:
                self._load(weights)
            finally:
                for layer in layers:
                    finalize_layerwise_reload(layer, self._config)
            self._refresh_shared()

    def groups(self, names: Collection[str]) -> list[Group]:
        """Layers that are loaded together, with all names of a checkpoint; none: that is not known."""
        modules = dict(self._model.named_modules())
        known = {id(parameter): name for name, parameter in self._model.named_parameters()}
        groups: list[Group] = []
        left = set(names)
        while left:
            together = self.layers_of({min(left)})
            if together is None:
                return []
            layers = {layer for name in together for layer in self._layers[name]}
            reached = {id(p) for layer in layers for p in modules[layer].parameters(recurse=False)}
            groups.append(Group(frozenset(together), frozenset(known[one] for one in reached & known.keys())))
            left -= together
        return groups

    def learn(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Plan, once, where each element lies. A CPU packs its weights: there is nothing to write into."""
        if self._writer is None:
            parameters = dict(self._model.named_parameters())
            writer = SlotWriter(parameters, self._load, self.groups(loaded.keys()))
            on_cpu = any(parameter.device.type == "cpu" for parameter in parameters.values())
            self._writer = writer
            if not on_cpu and not self._config.quantization:
                with torch.no_grad():
                    writer.learn(loaded)

    def prepare(
        self, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], names: Collection[str]
    ) -> Changes | None:
        """What differs, where it can be written in place."""
        if self._writer is None or not self._writer.writes_into(dict(self._model.named_parameters())):
            return None
        return self._writer.prepare(before, after, names)

    def write(self, changes: Changes, after: Mapping[str, torch.Tensor] | None) -> None:
        """Scatter what differs; with `after` the parameters are read back and compared.

        Raises:
            DigestMismatch: they are not what was to be there.
        """
        if self._writer is None or not self._writer.writes_into(dict(self._model.named_parameters())):
            raise SyncError("nothing was prepared for the parameters that the server's model has now")
        with torch.no_grad():
            self._writer.write(changes)
            if after is not None and not self._writer.agrees(after):
                raise DigestMismatch("the server's parameters are not what was written")

    def checksums(self) -> dict[str, str]:
        """vLLM's own."""
        from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

        sums: dict[str, str] = compute_tensor_digests(self._model)
        return sums

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        load: Any = self._model.load_weights
        try:
            loaded: set[str] | None = load(weights)
        except (ValueError, KeyError, AssertionError) as error:
            raise CoverageError(f"the server's model does not take these weights: {error}") from error
        return loaded

    def _refresh_shared(self) -> None:
        """A layer that shares another's parameter (tied embeddings) gets nothing loaded, and vLLM leaves what it has
        made of the parameter as it was: on a CPU a packed copy of the old weights. It is made again.
        """
        owners: dict[int, list[Any]] = defaultdict(list)
        for module in self._model.modules():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)].append(module)
        for sharing in owners.values():
            for module in sharing if len(sharing) > 1 else ():
                method = getattr(module, "quant_method", None)
                if method is not None:
                    method.process_weights_after_loading(module)

    def _watched(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same pairs; what each one changed is seen when the next is asked for."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        if self._layers:
            yield from weights
            return
        infos = {name: get_layerwise_info(module) for name, module in self._model.named_modules() if _has_own(module)}
        seen: dict[str, set[str]] = defaultdict(set)
        before = {name: _progress(info) for name, info in infos.items()}
        looked = 0
        for name, tensor in weights:
            yield name, tensor
            looked += len(infos)
            if looked > MOST_WATCHED:
                continue
            now = {layer: _progress(info) for layer, info in infos.items()}
            seen[name] |= {layer for layer, progress in now.items() if progress != before[layer]}
            before = now
        if looked <= MOST_WATCHED:
            self._layers = dict(seen)


def _has_own(module: torch.nn.Module) -> bool:
    return (
        next(module.parameters(recurse=False), None) is not None
        or next(module.buffers(recurse=False), None) is not None
    )


def _progress(info: Any) -> tuple[bool, int]:
    return bool(info.can_load()), len(info.loaded_weights)
