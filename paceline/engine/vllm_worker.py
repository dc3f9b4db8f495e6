"""WorkerWeights: the versions that one vLLM worker holds, staged beside the model and loaded into it.

    stage      a thread fetches and verifies; generation goes on
    load       every tensor is hashed on its way into the model; the version before stays held, so that it can be
               loaded again
    confirm    what entered the model was this digest; only then other versions are let go

Law: after a load that failed nothing is known of the model, so the next one is full and nothing can be confirmed
before it. Nothing here imports vLLM: the model is behind `ModelLoader`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from paceline.core.errors import ConfigError, CoverageError, DigestMismatch, SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.version import Version
from paceline.core.weight_ports import StagedWeights, WeightReceiver
from paceline.engine.slot_writer import Changes
from paceline.engine.vllm_commands import (
    PROTOCOL,
    STILL_STAGING,
    Confirm,
    Discard,
    Hello,
    Load,
    ReceiverSpec,
    Stage,
    Staged,
    Took,
    WorkerCommand,
    Wrote,
    host_id,
)
from paceline.weights.coverage import CoverageRules, matches
from paceline.weights.digest import digest_each
from paceline.weights.tree_digest import root_digest

if TYPE_CHECKING:
    import torch

LOOK_SECONDS = 0.02  # the model waits for as long while a caller asks whether a version is staged


class ModelLoader(Protocol):
    """The model of one worker."""

    def describe(self) -> Mapping[str, str]:
        """`model_type` and `dtype` of the model, `logprobs_mode`, and `quantization` ("" for none)."""
        ...

    def load_all(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a whole checkpoint. Raises CoverageError: tensors are missing, unknown or of other shapes."""
        ...

    def layers_of(self, names: Collection[str]) -> set[str] | None:
        """All names that have to be loaded with these, since they share a layer; None: only a whole checkpoint."""
        ...

    def load_layers(self, weights: Iterable[tuple[str, torch.Tensor]], names: Collection[str]) -> None:
        """Load whole layers: exactly these names, as `layers_of` gave them."""
        ...

    def checksums(self) -> dict[str, str]:
        """One per parameter."""
        ...

    def learn(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """This is what the model holds now: find out once whether elements can be written in place."""
        ...

    def prepare(
        self, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], names: Collection[str]
    ) -> Changes | None:
        """What to write in place to get from one version to the next; None: layers have to be loaded."""
        ...

    def write(self, changes: Changes, after: Mapping[str, torch.Tensor] | None) -> None:
        """Write it. `after`: what has to be there then, compared bit by bit. Raises DigestMismatch: it is not."""
        ...


@dataclass(frozen=True)
class _InPlace:
    """Changes that turn the version `base` into another one; `names` are sent names."""

    base: int
    names: frozenset[str]
    changes: Changes


class WorkerWeights:
    """Obeys `WorkerCommand`s; `make_receiver` opens an end of a checkpoint engine. Not thread-safe."""

    def __init__(self, *, loader: ModelLoader, make_receiver: Callable[[ReceiverSpec], WeightReceiver]) -> None:
        self._loader = loader
        self._make_receiver = make_receiver
        self._receivers: dict[ReceiverSpec, WeightReceiver] = {}
        self._stager = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-stage")
        self._commands: dict[int, Stage] = {}
        self._held: dict[int, Future[StagedWeights]] = {}
        self._in_place: dict[int, _InPlace] = {}
        self._loaded: dict[str, str] | None = None  # stored name -> digest of what is in the model, None: unknown
        self._proved: tuple[int, str] | None = None
        self._written: int | None = None  # the version that the last load has written in place
        self._repeats: bool | None = None

    def obey(self, command: WorkerCommand) -> None:
        """Do it, or raise a `PacelineError`."""
        match command:
            case Hello():
                self._greet(command)
            case Stage():
                self._stage(command)
            case Staged(version=version):
                self._staged(version, LOOK_SECONDS)
            case Took():
                self._took(command)
            case Wrote(version=version):
                if self._written != version:
                    raise SyncError(f"version {Version.unpack(version)} was not written in place")
            case Load():
                self._load(command)
            case Confirm():
                self._confirm(command)
            case Discard(version=version):
                self._let_go(version)

    def close(self) -> None:
        """Release everything."""
        for version in list(self._held):
            self._let_go(version)
        self._stager.shutdown(wait=True)
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()

    def _greet(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            raise ConfigError(
                f"the server's paceline speaks protocol {PROTOCOL}, the trainer's {hello.protocol}: "
                "install the same version on both sides"
            )
        if hello.host and hello.host != host_id():
            raise ConfigError(
                "the server runs on another host than the trainer, whose shared memory it cannot map: use "
                "checkpoint_engine.backend=filesystem with a place that both reach"
            )
        own = self._loader.describe()
        for key in ("model_type", "dtype", "logprobs_mode"):
            wanted = getattr(hello, key)
            if wanted and own[key] != wanted:
                raise ConfigError(f"the server has {key} {own[key]}, but this run needs {wanted}")

    def _stage(self, command: Stage) -> None:
        version = command.manifest.version
        self._let_go(version)
        if command.receiver not in self._receivers:
            self._receivers[command.receiver] = self._make_receiver(command.receiver)
        receiver = self._receivers[command.receiver]
        served = self._held.get(self._proved[0]) if self._proved is not None else None
        base = served.result() if served is not None else None  # with it a delta may be taken
        self._commands[version] = command
        self._held[version] = self._stager.submit(self._fetch, command, receiver, base)

    def _fetch(self, command: Stage, receiver: WeightReceiver, base: StagedWeights | None) -> StagedWeights:
        """In the thread: get it here, verified; then find what differs from what is served, where that can be used."""
        try:
            return self._fetch_and_compare(command, receiver, base)
        finally:
            if command.hints and Path(command.hints).is_dir():
                (Path(command.hints) / str(command.manifest.version)).touch()

    def _fetch_and_compare(self, command: Stage, receiver: WeightReceiver, base: StagedWeights | None) -> StagedWeights:
        staged = receiver.stage(command.manifest, base)
        if base is not None:
            names = _engine_names(command)
            published = {meta.name: meta.digest for meta in base.manifest.tensors}
            changed = {
                m.name for m in command.manifest.tensors if m.name in names and m.digest != published.get(m.name)
            }
            changes = self._loader.prepare(
                _named(base, names), _named(staged, names), [names[sent] for sent in changed]
            )
            if changes is not None:
                self._in_place[command.manifest.version] = _InPlace(base.manifest.version, frozenset(changed), changes)
        return staged

    def _staged(self, version: int, seconds: float) -> StagedWeights:
        if version not in self._held:
            raise SyncError(f"version {Version.unpack(version)} was never staged here")
        try:
            return self._held[version].result(timeout=seconds)
        except NotYet as waiting:
            if self._held[version].done():
                raise
            raise SyncError(f"version {Version.unpack(version)} {STILL_STAGING}") from waiting

    def _took(self, command: Took) -> None:
        taken = self._staged(command.version, LOOK_SECONDS).base_version
        if taken != command.base_version:
            raise SyncError(f"version {Version.unpack(command.version)} was not made from a delta against that one")

    def _load(self, command: Load) -> None:
        version = command.version
        if version not in self._held:
            raise SyncError(f"version {Version.unpack(version)} is not held here, so it cannot be loaded")
        stage = self._commands[version]
        staged = self._staged(version, stage.receiver.deadline_seconds)
        names = _engine_names(stage)
        known, was, self._loaded, self._proved, self._written = self._loaded, self._proved, None, None, None
        load = _Load(staged, names, hashes=stage.receiver.verify != "off")
        in_place = self._in_place.get(version)
        if command.extent == "full" or known is None:
            chosen: Collection[str] = names
            self._load_all(load, staged)
        elif in_place is not None and was is not None and was[0] == in_place.base:
            chosen = in_place.names
            after = dict(load.tensors(chosen))  # hashed
            self._loader.write(in_place.changes, after if stage.receiver.verify == "full" else None)
            self._written = version
        else:
            chosen = self._load_changed(load, staged, known)
        entered = load.finish(chosen)
        digest = _root(staged.manifest, entered)
        if digest != staged.manifest.digest:
            raise DigestMismatch(f"what entered the model adds up to {digest}, not {staged.manifest.digest}")
        self._loaded = entered
        self._proved = (version, digest)

    def _load_all(self, load: _Load, staged: StagedWeights) -> None:
        self._refuse_unrepeatable(load)
        self._loader.load_all(load.tensors(load.names))
        self._loader.learn(_named(staged, load.names))

    def _load_changed(self, load: _Load, staged: StagedWeights, known: Mapping[str, str]) -> Collection[str]:
        """Load the layers that hold a tensor that has changed; returns the sent names of all that was loaded."""
        unlike = {
            meta.name
            for meta in staged.manifest.tensors
            if meta.name in load.names and (not meta.digest or known.get(meta.name) != meta.digest)
        }
        if not unlike:
            return unlike
        together = self._loader.layers_of({load.names[sent] for sent in unlike})
        if together is None:
            self._load_all(load, staged)
            return load.names
        chosen = {sent for sent, name in load.names.items() if name in together}
        self._loader.load_layers(load.tensors(chosen), together)
        return chosen

    def _refuse_unrepeatable(self, load: _Load) -> None:
        """A quantised model has to come out the same when the same checkpoint is loaded once more."""
        if self._repeats is None and self._loader.describe()["quantization"]:
            sums = []
            for _ in range(2):
                self._loader.load_all(load.tensors(load.names))
                sums.append(self._loader.checksums())
            self._repeats = sums[0] == sums[1]
        if self._repeats is False:
            raise ConfigError(
                f"loading the same weights twice into this {self._loader.describe()['quantization']} model gives two "
                "models: serve it without quantization, or with one that vLLM can reload"
            )

    def _confirm(self, command: Confirm) -> None:
        if self._proved != (command.version, command.digest):
            proved = "nothing" if self._proved is None else f"{Version.unpack(self._proved[0])} ({self._proved[1]})"
            raise DigestMismatch(
                f"what entered the model is {proved}, not {Version.unpack(command.version)} ({command.digest})"
            )
        for version in [held for held in self._held if held < command.version]:
            self._let_go(version)

    def _let_go(self, version: int) -> None:
        self._commands.pop(version, None)
        self._in_place.pop(version, None)
        staging = self._held.pop(version, None)
        if staging is not None and not staging.cancel():
            staging.add_done_callback(_release)


class _Load:
    """One version on its way into the model: each tensor is hashed as it is handed over."""

    def __init__(self, staged: StagedWeights, names: Mapping[str, str], *, hashes: bool) -> None:
        self.names = names
        self._staged = staged
        self._hashes = hashes
        self._published = {meta.name: meta.digest for meta in staged.manifest.tensors}
        self._entered: dict[str, str] = {}

    def tensors(self, sent_names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(engine's name, tensor) of these, in the order of the manifest.

        Raises:
            DigestMismatch: a tensor is not what was published.
        """
        for sent in self._published:
            if sent not in sent_names:
                continue
            tensor = self._staged.tensors[sent]
            if self._hashes:
                digest = digest_each({sent: tensor})[sent].hex()
                if digest != (self._published[sent] or digest):
                    raise DigestMismatch(f"{sent} entered the model as {digest}, published was {self._published[sent]}")
                self._entered[sent] = digest
            yield self.names[sent], tensor

    def finish(self, loaded: Collection[str]) -> dict[str, str]:
        """Stored name -> digest of what the model holds now.

        Raises:
            CoverageError: the model did not ask for a tensor to the end.
        """
        if self._hashes and (left := set(loaded) - self._entered.keys()):
            raise CoverageError(f"the model did not take {sorted(left)[:8]}")
        return {name: self._entered.get(name, digest) for name, digest in self._published.items()}


def _engine_names(stage: Stage) -> dict[str, str]:
    """Sent name -> name in the engine's checkpoint, of what is loaded. Other names of tied tensors are left out."""
    rules = CoverageRules(name_rules=stage.name_rules, trainer_only=stage.trainer_only)
    names = {meta.name: rules.engine_name(meta.name) for meta in stage.manifest.tensors}
    return {
        sent: name
        for sent, name in names.items()
        if not matches(sent, rules.trainer_only) and not matches(name, rules.trainer_only)
    }


def _named(staged: StagedWeights, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The tensors that are loaded, by the engine's names."""
    return {name: staged.tensors[sent] for sent, name in names.items()}


def _root(manifest: WeightManifest, entered: Mapping[str, str]) -> str:
    if not all(entered.values()):
        return manifest.digest  # nothing was hashed, neither here nor where it was published
    entries = {meta.name: (meta.dtype, meta.shape, bytes.fromhex(entered[meta.name])) for meta in manifest.tensors}
    return root_digest(entries, manifest.aliases)


def _release(staging: Future[StagedWeights]) -> None:
    if not staging.cancelled() and staging.exception() is None:
        staging.result().release()
