"""A Ray of its own for the two peers that use Ray's object store; the only file of the benchmark that imports ray.

One trainer actor and the replica actors run on one node. Once per version the trainer puts an object, the replicas get
it and copy it into their parameters; the reference is dropped afterwards, so the store holds one version.
`runtime.ray_environment.prepare_environment` comes before the import of this module.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import ray
import torch

from paceline.cli.sync_bench.frames import CALL_SECONDS
from paceline.cli.sync_bench.messages import SetUp
from paceline.cli.sync_bench.model_shapes import ModelShapes
from paceline.cli.sync_bench.weights import check_marks, make_weights, mark

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

    def ready(self) -> None:
        """Return once the weights are made."""

    def publish(self, version: int) -> list[Any]:
        """Put a version; its reference, in a list so that Ray does not fetch it for the caller."""
        mark(self._weights, version)
        return [ray.put(self._form.pack(self._weights))]

    def load(self, reference: list[Any]) -> None:
        """Get it and copy it into the parameters."""
        self._form.unpack(ray.get(reference[0], timeout=CALL_SECONDS), self._weights)

    def check(self, version: int, name: str) -> None:
        """Fail unless all tensors are of `version`."""
        check_marks(self._weights, version, name)


class RayCluster:
    """Implements `peer_process.PeerSide`: trainer and all replicas of one peer."""

    def __init__(self, setup: SetUp, shapes: ModelShapes, module: str) -> None:
        private = Path(setup.directory)
        self._start(setup.replicas, int(_STORE_VERSIONS * shapes.nbytes) + _STORE_BESIDE_BYTES, private)
        actor: Any = ray.remote(num_cpus=0)(_Holder)
        self._trainer = actor.remote(module, shapes, 0)
        self._replicas = [actor.remote(module, shapes, index + 1) for index in range(setup.replicas)]
        self._wait([holder.ready.remote() for holder in (self._trainer, *self._replicas)])

    def sync(self, version: int) -> float:
        """Put, get everywhere, copy everywhere."""
        reference = self._wait(self._trainer.publish.remote(version))
        self._wait([replica.load.remote(reference) for replica in self._replicas])
        return 0.0

    def check(self, version: int) -> None:
        """See `PeerSide`."""
        self._wait([replica.check.remote(version, f"replica-{i}") for i, replica in enumerate(self._replicas)])

    def close(self) -> None:
        """Stop Ray."""
        ray.shutdown()

    def _wait(self, pending: Any) -> Any:
        return ray.get(pending, timeout=CALL_SECONDS)

    def _start(self, replicas: int, store_bytes: int, private: Path) -> None:
        ray.init(
            address="local",
            num_cpus=replicas + 1,  # so many workers are started ahead of the actors
            num_gpus=0,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            object_store_memory=store_bytes,
            _temp_dir=str(private / "ray"),
        )
