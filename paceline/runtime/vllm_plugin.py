"""The plug-in that vLLM finds by itself (entry point group `vllm.general_plugins`): the weight backend `paceline`.

    vllm serve MODEL --weight-transfer-config '{"backend": "paceline"}'      (and VLLM_SERVER_DEV_MODE=1)

`register` runs in every process of vLLM. The class below has the methods that a vLLM worker calls on a weight-transfer
engine; all of a load happens inside `update_weights`, so that a load that fails can be undone by another one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.core.errors import PacelineError
from paceline.core.weight_ports import WeightReceiver
from paceline.engine.vllm_commands import BACKEND, ENDS_WITH_PARENT, Load, ReceiverSpec, error_text, unpack_command

if TYPE_CHECKING:
    import torch

_WATCH = "paceline-watch-parent"
_LAST_SECONDS = 3.0


def register() -> None:
    """Make the backend known to vLLM; harmless when it is. Processes of an engine of our own end with their parent."""
    if os.environ.get(ENDS_WITH_PARENT):
        end_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "paceline.runtime.vllm_plugin", "PacelineWeightTransfer")
    except ValueError as error:
        if "already registered" not in str(error):
            raise


def end_with_parent() -> None:
    """From now on this process ends when the one that has spawned it is gone: vLLM's engine process would wait for
    requests for ever. It gets time to remove its shared memory. Does nothing in a process that multiprocessing has not
    started.
    """
    parent = multiprocessing.parent_process()
    watching = any(thread.name == _WATCH for thread in threading.enumerate())
    if parent is None or watching:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name=_WATCH, daemon=True).start()


def make_receiver(spec: ReceiverSpec) -> WeightReceiver:
    """A worker's end of a checkpoint engine."""
    holder = f"vllm-{os.getpid()}"
    if spec.backend == "filesystem":
        from paceline.checkpoint_engine.filesystem import FilesystemReceiver
        from paceline.runtime.system import SystemClock

        return FilesystemReceiver(
            url=spec.url,
            holder=holder,
            verify="off" if spec.verify == "off" else "full",
            deadline_seconds=spec.deadline_seconds,
            clock=SystemClock(),
        )
    from paceline.checkpoint_engine.shared_memory import SharedMemoryReceiver

    return SharedMemoryReceiver(holder=holder, verify=spec.verify, deadline_seconds=spec.deadline_seconds)


class PacelineWeightTransfer:
    """What a vLLM worker calls, in the order of one update: (init) start, update, finish."""

    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        from paceline.engine.vllm_model import VllmModel
        from paceline.engine.vllm_worker import WorkerWeights

        self.config = config
        self.vllm_config = vllm_config
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config
        self.device = device
        self.model = model
        self._weights = WorkerWeights(loader=VllmModel(model, vllm_config.model_config), make_receiver=make_receiver)

    def parse_init_info(self, init_info: Mapping[str, Any]) -> Mapping[str, Any]:
        """Checked where it is obeyed."""
        return init_info

    def init_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Everything that does not touch the model: greet, stage, confirm, discard."""
        self._obey(init_info)

    def start_weight_update(self) -> None:
        """Nothing: a load is one call."""

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Load a version that is held."""
        self._obey(update_info, only=Load)

    def finish_weight_update(self) -> None:
        """Nothing: a load is one call."""

    def drain_pending(self) -> None:
        """Nothing is deferred."""

    def set_weight_update_target(self, model: torch.nn.Module, model_config: Any) -> None:
        """A draft model is not updated by this backend; vLLM asks `supports_draft_weight_update` first."""

    def reset_weight_update_target(self) -> None:
        """The target never changes."""

    def shutdown(self) -> None:
        """Release what is held."""
        self._weights.close()

    def _obey(self, carried: Mapping[str, Any], only: type | None = None) -> None:
        try:
            command = unpack_command(carried)
            if only is not None and not isinstance(command, only):
                raise PacelineError(f"{type(command).__name__} is no command for update_weights")
            self._weights.obey(command)
        except PacelineError as error:
            raise RuntimeError(error_text(error)) from error
