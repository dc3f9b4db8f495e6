"""VllmEngine: a vLLM engine of our own (`AsyncLLM`) as an `InferenceServer`; streams are kept over a pause.

Log-probs are those of the sampled distribution (`processed_logprobs`), tokens come in batches, and vLLM itself says in
the last one which weights made each token. Device-agnostic: what runs on a CPU needs only fewer sequences and less
memory. `vllm` is imported when the engine starts.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from paceline.core.errors import ConfigError, DeadlineExceeded, PacelineError, SyncError, WorkerDied
from paceline.core.manifest import WeightManifest
from paceline.core.ports import Clock
from paceline.core.sample import GenerationRequest
from paceline.core.server_ports import HeldVersion, TokenBatch, VersionSpan
from paceline.engine.vllm_commands import (
    BACKEND,
    ENDS_WITH_PARENT,
    INSTALL,
    Hello,
    error_from,
    refuse_stop_strings,
)
from paceline.engine.vllm_control import VllmWeights, within
from paceline.engine.vllm_devices import devices_of

T = TypeVar("T")

KEEP: Literal["keep"] = "keep"


@dataclass(frozen=True)
class VllmOptions:
    """What the engine is built with. `kv_cache` is that of `rollout.kv_cache`; `stream_interval` tokens come at a
    time; `threads` are those of a worker on a CPU; `socket_dir` is where its sockets go; `place` counts the engines of
    this machine, which share its GPUs (None: vLLM chooses); `further` are keyword arguments of vLLM's
    `AsyncEngineArgs`.
    """

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    tensor_parallel_size: int = 1
    kv_cache: Literal["recompute", "keep"] = "recompute"
    seed: int = 0
    stream_interval: int = 8
    threads: int = 1
    socket_dir: str = ""
    call_seconds: float = 60.0
    place: int | None = None
    further: Mapping[str, Any] = field(default_factory=dict)


class VllmEngine:
    """Implements `core.server_ports.InferenceServer`. `make_weights` is handed this object's calls."""

    def __init__(
        self,
        options: VllmOptions,
        *,
        name: str,
        clock: Clock,
        make_weights: Callable[[Any], VllmWeights],
        hello: Hello | None = None,
    ) -> None:
        self._options = options
        self._name = name
        self._hello = hello or Hello()
        self._clock = clock
        self._weights = make_weights(self)
        self._engine: Any = None
        self._streams = 0

    @property
    def streams(self) -> Literal["kept", "closed"]:
        """A pause freezes streams."""
        return "kept"

    async def start(self) -> None:
        """Build the engine; its processes load the model from its directory.

        Raises:
            ConfigError: vLLM is not there, or does not take the model or the options.
        """
        options = self._options
        try:
            from vllm.config.weight_transfer import WeightTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise ConfigError(f"{INSTALL}: {error}") from error
        _tell_environment(options)
        arguments: dict[str, Any] = {
            "model": options.model,
            "dtype": options.dtype,
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "tensor_parallel_size": options.tensor_parallel_size,
            "seed": options.seed,
            "stream_interval": options.stream_interval,
            "logprobs_mode": "processed_logprobs",
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            # What a running request has computed stays its own: nothing of it may serve another one after a swap.
            "enable_prefix_caching": options.kv_cache == "recompute",
            "enforce_eager": not torch.cuda.is_available(),  # a CPU would compile for minutes
            **options.further,
        }
        try:
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            raise ConfigError(f"vLLM does not start: {' '.join(str(error).split())[:400]}") from error
        await self._weights.greet(self._hello)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenBatch]:
        """See the port."""
        refuse_stop_strings(request)
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = request.params
        sampling = SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            max_tokens=params.max_tokens - len(request.response_ids),
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=True,  # the stop tokens are the request's
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._streams += 1
        prompt = TokensPrompt(prompt_token_ids=[*request.prompt_ids, *request.response_ids])
        stream = self._engine.generate(prompt, sampling, f"{request.request_id}#{self._streams}")
        try:
            async for output in stream:
                yield batch_of(output.outputs[0])
        except ValueError as error:
            raise ConfigError(f"{self._name}: vLLM refuses request {request.request_id}: {error}") from error
        except PacelineError:
            raise
        except Exception as error:  # vLLM's own errors: what they mean is in their text
            raise self._as_ours(error, "generate") from error
        finally:
            await stream.aclose()

    async def pause(self, deadline_wall: float) -> int:
        """Freeze all requests; with `kv_cache=recompute` their keys and values are forgotten and computed again."""
        clear = self._options.kv_cache == "recompute"
        seconds = max(0.1, deadline_wall - self._clock.wall())
        await self._bounded(self._engine.pause_generation(mode=KEEP, clear_cache=clear), "a pause", seconds)
        return 0

    async def resume(self) -> None:
        """See the port."""
        await self._bounded(self._engine.resume_generation(), "a resume")

    async def stage(self, manifest: WeightManifest, deadline_wall: float) -> HeldVersion:
        """See the port."""
        return await self._weights.stage(manifest, deadline_wall)

    async def load(self, version: int) -> None:
        """See the port."""
        await self._weights.load(version)

    async def confirm(self, version: int, digest: str) -> None:
        """See the port."""
        await self._weights.confirm(version, digest)

    async def discard(self, version: int) -> None:
        """See the port."""
        await self._weights.discard(version)

    async def weight_version(self) -> int | None:
        """See the port."""
        return await self._weights.weight_version()

    async def checksums(self) -> dict[str, str]:
        """See the port."""
        sums: list[dict[str, str]] = await self._bounded(self._engine.compute_weight_checksums(), "checksums")
        return {name: digest for worker in sums for name, digest in worker.items()}

    async def close(self) -> None:
        """End vLLM's processes."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    # -- VllmCalls -----------------------------------------------------------------------------------------------------

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """See `VllmCalls`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=dict(info))
        await self._bounded(self._engine.init_weight_transfer_engine(request), "a command to its workers")

    async def start_weight_update(self) -> None:
        """See `VllmCalls`."""
        await self._bounded(self._engine.start_weight_update(), "the start of an update")

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """See `VllmCalls`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=dict(info))
        await self._bounded(self._engine.update_weights(request), "an update")

    async def finish_weight_update(self, label: str) -> None:
        """See `VllmCalls`."""
        await self._bounded(self._engine.finish_weight_update(label), "the end of an update")

    async def weight_label(self) -> str:
        """See `VllmCalls`."""
        return str(await self._bounded(self._engine.get_weight_version(), "its weight version"))

    async def _bounded(self, call: Awaitable[T], what: str, seconds: float | None = None) -> T:
        try:
            return await within(call, seconds or self._options.call_seconds, who=self._name, what=what)
        except DeadlineExceeded:
            raise
        except Exception as error:  # vLLM's own errors: what they mean is in their text
            raise self._as_ours(error, what) from error

    def _as_ours(self, error: Exception, what: str) -> PacelineError:
        known = error_from(str(error))
        if known is not None:
            return known
        line = " ".join(str(error).split())[:300]
        if type(error).__name__ == "EngineDeadError" or self._engine is None or self._engine.errored:
            return WorkerDied(f"{self._name}: vLLM's engine is dead ({what}): {line}", self._name)
        return SyncError(f"{self._name}: {what} failed in vLLM: {type(error).__name__}: {line}")


def batch_of(output: Any) -> TokenBatch:
    """What vLLM calls a completion output, as one batch of a stream."""
    ids = list(output.token_ids)
    logprobs = [float(step[token].logprob) for token, step in zip(ids, output.logprobs or [], strict=True)]
    spans = output.weight_versions
    return TokenBatch(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=output.finish_reason,
        spans=None if spans is None else [VersionSpan(span.version, span.start, span.end) for span in spans],
    )


def _tell_environment(options: VllmOptions) -> None:
    """vLLM is told by its environment; what the user has set stays."""
    os.environ[ENDS_WITH_PARENT] = "1"  # a process that is killed cannot end those that it has started
    if options.place is not None and torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
            devices_of(options.place, options.tensor_parallel_size, visible.split(","))
        )
    os.environ["OMP_NUM_THREADS"] = str(max(1, options.threads))
    if options.socket_dir:  # an engine that is killed leaves its sockets, and torch's compiler its headers
        os.environ["VLLM_RPC_BASE_PATH"] = os.environ["TMPDIR"] = tempfile.tempdir = options.socket_dir
    if options.tensor_parallel_size == 1 and not torch.cuda.device_count():
        # Engine and worker in one process: two would spin while they wait for each other, on cores that others need.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    for name, value in (
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),  # its processes start clean of what this one has loaded
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("HF_HUB_OFFLINE", "1"),
    ):
        os.environ.setdefault(name, value)
