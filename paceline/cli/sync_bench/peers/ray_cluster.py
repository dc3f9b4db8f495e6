"""A Ray of its own for the two peers that use Ray's object store, reached through `runtime.ray_runtime`.

One trainer actor and the replica actors run on one node. Once per version the trainer puts an object, the replicas get
it and copy it into their parameters; the reference is dropped afterwards, so the store holds one version.
`runtime.ray_environment.prepare_environment` comes before the import of this module, since Ray reads it then.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.cli.sync_bench.frames import CALL_SECONDS
from paceline.cli.sync_bench.messages import SetUp
from paceline.cli.sync_bench.model_shapes import ModelShapes
from paceline.cli.sync_bench.weights import check_marks, make_weights, mark
from paceline.runtime.ray_runtime import PlainActors, start_local_ray

# Two versions while the older one is being let go, and what the allocator wastes.
_STORE_VERSIONS = 2.25
_STORE_BESIDE_BYTES = 256 << 20


class ObjectForm(Protocol):
    """How weights become an object of the store (`pack`) and parameters again (`unpack`); a module of each peer."""

    def pack(self, weights: dict[str, torch.Tensor]) -> Any: ...

    def unpack(self, packed: Any, weights: dict[str, torch.Tensor]) -> None: ...


class _Holder:
    """The actor of the trainer and of a replica: weights, and the module that packs and unpacks them."""

    def __init__(self, module: str, shapes: ModelShapes, seed: int) -> None:
        torch.set_num_threads(1)
        self._weights = make_weights(shapes, seed)
        self._form: ObjectForm = import_module(module).FORM
        self._actors = PlainActors(CALL_SECONDS)

    def ready(self) -> None:
        """Return once the weights are made."""

    def publish(self, version: int) -> list[Any]:
        """Put a version; its reference, in a list so that Ray does not fetch it for the caller."""
        mark(self._weights, version)
        return [self._actors.put(self._form.pack(self._weights))]

    def load(self, reference: list[Any]) -> None:
        """Get it and copy it into the parameters."""
        self._form.unpack(self._actors.get(reference[0]), self._weights)

    def check(self, version: int, name: str) -> None:
        """Fail unless all tensors are of `version`."""
        check_marks(self._weights, version, name)


class RayCluster:
    """Implements `peer_process.PeerSide`: trainer and all replicas of one peer."""

    def __init__(self, setup: SetUp, shapes: ModelShapes, module: str) -> None:
        start_local_ray(
            processes=setup.replicas + 1,
            store_bytes=int(_STORE_VERSIONS * shapes.nbytes) + _STORE_BESIDE_BYTES,
            private_dir=Path(setup.directory),
        )
        self._actors = PlainActors(CALL_SECONDS)
        self._trainer = self._actors.launch(_Holder, module, shapes, 0)
        self._replicas = [self._actors.launch(_Holder, module, shapes, i + 1) for i in range(setup.replicas)]
        self._actors.get([holder.ready.remote() for holder in (self._trainer, *self._replicas)])

    def sync(self, version: int) -> float:
        """Put, get everywhere, copy everywhere."""
        reference = self._actors.get(self._trainer.publish.remote(version))
        self._actors.get([replica.load.remote(reference) for replica in self._replicas])
        return 0.0

    def check(self, version: int) -> None:
        """See `PeerSide`."""
        self._actors.get([replica.check.remote(version, f"replica-{i}") for i, replica in enumerate(self._replicas)])

    def close(self) -> None:
        """Stop Ray."""
        self._actors.stop()
