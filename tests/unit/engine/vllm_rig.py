"""A vLLM worker's side over a model that is a dictionary, with the trainer's end in the same process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.core.errors import CoverageError, DigestMismatch, SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.version import Version
from paceline.engine.slot_writer import Changes, SlotWriter
from paceline.engine.vllm_commands import Confirm, Load, ReceiverSpec, Stage, Staged
from paceline.engine.vllm_worker import WorkerWeights
from paceline.testing.publication import publish

SPEC = ReceiverSpec("shared_memory")
LAYERS = {"q": "qkv", "k": "qkv", "v": "qkv", "norm": "norm", "embed": "embed"}


class DictModel:
    """A model of three layers; q, k and v are one of them. `spoil` changes what a tensor becomes on its way in."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.loads: list[set[str]] = []
        self.quantization = ""
        self.writes_in_place = False
        self.parameters: dict[str, nn.Parameter] = {}
        self.writer: SlotWriter | None = None
        self.written: list[int] = []
        self.fail_after: int | None = None
        self.fail_once_after: int | None = None
        self.drift = 0.0

    def describe(self) -> Mapping[str, str]:
        return {"model_type": "toy", "dtype": "float32", "quantization": self.quantization, "logprobs_mode": "raw"}

    def load_all(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._take(weights)
        if missing := LAYERS.keys() - self.weights.keys():
            raise CoverageError(f"{sorted(missing)} got no tensor")

    def layers_of(self, names: Collection[str]) -> set[str] | None:
        layers = {LAYERS[name] for name in names}
        return {name for name, layer in LAYERS.items() if layer in layers}

    def load_layers(self, weights: Iterable[tuple[str, torch.Tensor]], names: Collection[str]) -> None:
        self._take(weights)

    def learn(self, loaded: Mapping[str, torch.Tensor]) -> None:
        if self.writes_in_place and not self.parameters:
            self.parameters = {
                name: nn.Parameter(tensor.clone(), requires_grad=False) for name, tensor in loaded.items()
            }
            self.writer = SlotWriter(self.parameters, self._fill)
            assert self.writer.learn(loaded)

    def prepare(
        self, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], names: Collection[str]
    ) -> Changes | None:
        return self.writer.prepare(before, after, names) if self.writer else None

    def write(self, changes: Changes, after: Mapping[str, torch.Tensor] | None) -> None:
        assert self.writer is not None
        self.written.append(self.writer.write(changes))
        if after is not None and not self.writer.agrees(after):
            raise DigestMismatch("not what was written")
        self.weights = {name: parameter.data for name, parameter in self.parameters.items()}

    def _fill(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.parameters[name].data.copy_(tensor)

    def checksums(self) -> dict[str, str]:
        return {name: str(tensor.sum().item()) for name, tensor in self.weights.items()}

    def _take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads.append(set())
        self.drift += 1.0
        for name, tensor in weights:
            if self.fail_once_after is not None and len(self.loads[-1]) >= self.fail_once_after:
                self.fail_once_after = None
                raise CoverageError("the model refuses the rest")
            if self.fail_after is not None and len(self.loads[-1]) >= self.fail_after:
                raise CoverageError("the model refuses the rest")
            self.weights[name] = tensor.clone() + (self.drift if self.quantization == "drifting" else 0.0)
            self.loads[-1].add(name)


class Rig:
    """A worker, its model, and the trainer's end."""

    def __init__(self, model: DictModel | None = None, verify: Literal["full", "off"] = "full") -> None:
        exchange = InProcessExchange()
        self.sender = InProcessSender(exchange, arenas=6, dtype=None, nonfinite="error")
        self.model = model or DictModel()
        self.receivers: list[ReceiverSpec] = []

        def make_receiver(spec: ReceiverSpec) -> InProcessReceiver:
            self.receivers.append(spec)
            return InProcessReceiver(exchange, holder="worker", verify=verify)

        self.make_receiver = make_receiver
        self.worker = WorkerWeights(loader=self.model, make_receiver=make_receiver)
        self.tensors = {name: torch.full((4,), float(index)) for index, name in enumerate(LAYERS)}

    def publish(self, n: int, **changes: float) -> WeightManifest:
        self.tensors.update({name: torch.full((4,), value) for name, value in changes.items()})
        return publish(self.sender, self.tensors.items(), Version(1, n).packed)

    def stage(self, manifest: WeightManifest, **options: Any) -> None:
        self.worker.obey(Stage(manifest, SPEC, **options))
        until(lambda: self.worker.obey(Staged(manifest.version)))

    def serve(self, manifest: WeightManifest, extent: str = "changed") -> None:
        self.stage(manifest)
        self.worker.obey(Load(manifest.version, extent))  # type: ignore[arg-type]
        self.worker.obey(Confirm(manifest.version, manifest.digest))


def until(call: Callable[[], None]) -> None:
    for _ in range(500):
        try:
            return call()
        except SyncError as error:
            if "still being staged" not in error.message:
                raise
    raise AssertionError("never staged")
