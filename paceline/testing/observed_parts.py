"""Thin covers around the parts of a simulated run that show the checker what really happens, and let faults in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from paceline.core.commands import ExchangeReply, ExchangeRequest
from paceline.core.errors import PacelineError
from paceline.core.manifest import Captured, WeightManifest
from paceline.core.sample import Completion, GenerationRequest, TrainBatch
from paceline.core.weight_ports import StagedWeights, WeightReceiver, WeightSender
from paceline.testing.fault_injector import FaultInjector
from paceline.testing.law_checker import LawChecker
from paceline.testing.marker_model import MarkerBackend, MarkerEngine
from paceline.testing.simulated_process import SimulatedProcess


class _Cover:
    """Attribute access goes to the covered part."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class ObservedEngine(_Cover):
    """A marker engine in a process: faults strike `bind` and the proof of what is served; each step is shown."""

    def __init__(
        self,
        engine: MarkerEngine,
        process: SimulatedProcess,
        *,
        injector: FaultInjector,
        checker: LawChecker,
        name: str,
    ) -> None:
        super().__init__(engine)
        self._engine = engine
        self._process = process
        self._injector = injector
        self._checker = checker
        self._name = name
        self._prefills: list[str] = []

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """See `InferenceEngine`."""
        self._injector.inside("bind", self._process, lambda: self._engine.bind(tensors, version))

    def patched(self, version: int) -> None:
        """See `PatchableEngine`."""
        self._injector.inside("bind", self._process, lambda: self._engine.patched(version))

    def served_tensors(self) -> Mapping[str, torch.Tensor]:
        """See `InferenceEngine`."""
        return self._injector.inside("prove", self._process, self._engine.served_tensors)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """See `InferenceEngine`."""
        self._prefills.extend(request.request_id for request in requests)
        self._engine.add(requests)

    def step(self) -> list[Completion]:
        """See `InferenceEngine`."""
        engine = self._engine
        finished = engine.step()
        marker = engine.marker
        self._checker.stepped(self._name, engine.version, marker, float(engine.served_tensors()["weight"][0]))
        if self._prefills:
            left: list[str] = []
            for request_id in self._prefills:
                used = engine.prefill_markers.pop(request_id, None)
                if used is None:
                    left.append(request_id)
                else:
                    self._checker.prefilled(self._name, used, marker)
            self._prefills = left
        return finished


class ObservedReceiver:
    """A receiver in a process: faults strike its fetch."""

    def __init__(self, receiver: WeightReceiver, process: SimulatedProcess, injector: FaultInjector) -> None:
        self._receiver = receiver
        self._process = process
        self._injector = injector
        self.close = receiver.close

    def stage(
        self,
        manifest: WeightManifest,
        base: StagedWeights | None = None,
        apply: Literal["mapped", "copied"] = "mapped",
    ) -> StagedWeights:
        """See `WeightReceiver`."""
        staged: list[StagedWeights] = []

        def fetch() -> StagedWeights:
            staged.append(self._receiver.stage(manifest, base, apply))
            return staged[0]

        try:
            return self._injector.inside("fetch", self._process, fetch)
        except PacelineError:
            for weights in staged:  # a receiver that fails leaves nothing behind
                weights.release()
            raise


class ObservedSender:
    """The trainer's sender; each snapshot's marker is shown."""

    def __init__(self, sender: WeightSender, checker: LawChecker) -> None:
        self._sender = sender
        self._checker = checker
        self.publish = sender.publish
        self.blocking_holders = sender.blocking_holders
        self.close = sender.close

    def capture(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, base_version: int | None = None
    ) -> Captured:
        """See `WeightSender`."""
        tensors = dict(named_tensors)
        captured = self._sender.capture(tensors.items(), version, base_version)
        self._checker.snapshot(version, int(tensors["marker"][0]))
        return captured


class ObservedBackend(_Cover):
    """The marker backend; each batch is shown before it is trained."""

    def __init__(self, backend: MarkerBackend, checker: LawChecker) -> None:
        super().__init__(backend)
        self._backend = backend
        self._checker = checker

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """See `TrainBackend`."""
        self._checker.batch(batch)
        return self._backend.update(batch)


class ObservedReplica(_Cover):
    """A replica: what it is sent and what it finishes is shown, and its pauses."""

    def __init__(self, replica: Any, *, checker: LawChecker, name: str) -> None:
        super().__init__(replica)
        self._checker = checker
        self._name = name
        self._pins: dict[str, int | None] = {}

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """See `ReplicaControl`."""
        if request.requests:
            self._checker.received(self._name)
            self._pins.update((r.request_id, r.pinned_version) for r in request.requests)
        reply: ExchangeReply = await self._part.exchange(request)
        if reply.running + reply.waiting:
            self._checker.has_work(self._name)
        for completion in reply.completions:
            self._checker.finished(self._name, completion, self._pins.pop(completion.request_id, None))
        return reply

    async def pause(self) -> None:
        """See `ReplicaControl`."""
        await self._part.pause()
        self._checker.pause_returned(self._name)

    async def resume(self) -> None:
        """See `ReplicaControl`."""
        self._checker.resume_began(self._name)
        await self._part.resume()


class ObservedValidator(_Cover):
    """The trainer's side of validations: what it finishes is shown."""

    def __init__(self, worker: Any, checker: LawChecker) -> None:
        super().__init__(worker)
        self._checker = checker

    async def generate(
        self, version: int, requests: Sequence[GenerationRequest], deadline_wall: float
    ) -> list[Completion]:
        """See `TrainerSide`."""
        made: list[Completion] = await self._part.generate(version, requests, deadline_wall)
        for completion in made:
            self._checker.finished("validator", completion, version)
        return made


class ObservedRollouter(_Cover):
    """A rollouter: what it is told is shown."""

    def __init__(self, rollouter: Any, checker: LawChecker, run: Callable[[], Any]) -> None:
        super().__init__(rollouter)
        self._checker = checker
        self.run = run

    async def confirm_replicas(self, confirmed: Mapping[str, int], fenced: Mapping[str, str]) -> None:
        """See `RolloutControl`."""
        self._checker.rollouter_told(confirmed)
        await self._part.confirm_replicas(confirmed, fenced)

    async def update_param_version(
        self, version: int, validate: bool, global_steps: int, use_trainer_do_validate: bool
    ) -> None:
        """See `RolloutControl`."""
        if validate:
            self._checker.validation_requested(version)
        await self._part.update_param_version(version, validate, global_steps, use_trainer_do_validate)


class ObservedQueue(_Cover):
    """A message queue: the versions that it learns are shown."""

    def __init__(self, queue: Any, checker: LawChecker) -> None:
        super().__init__(queue)
        self._checker = checker

    async def update_param_version(self, version: int) -> None:
        """See `QueueControl`."""
        self._checker.queue_told(version)
        await self._part.update_param_version(version)
