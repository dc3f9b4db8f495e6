"""VllmHttpServer: a stock vLLM server, started by somebody else, as an `InferenceServer` by its URL.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "paceline"}'

Token ids go in and come out (`/v1/completions`, `return_token_ids`), streamed. Our streams are closed before a pause
and continued after it; requests of others get `wait_seconds` to end, then they are frozen and come out mixed. A server
on this host takes weights from shared memory, one elsewhere through the filesystem engine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from paceline.core.errors import ConfigError, DeadlineExceeded, PacelineError, SyncError, WorkerDied
from paceline.core.manifest import WeightManifest
from paceline.core.ports import Clock
from paceline.core.sample import GenerationRequest
from paceline.core.server_ports import HeldVersion, TokenBatch
from paceline.engine.vllm_commands import Hello, error_from, refuse_stop_strings
from paceline.engine.vllm_control import VllmWeights

if TYPE_CHECKING:
    import httpx2

START_HINT = (
    'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "paceline"}\', '
    "with paceline installed beside vLLM"
)
KEY_HINT = "set it in the variable that rollout.server_api_key_env names (VllmPusher: api_key)"
LOOK_SECONDS = 1.0
STREAM_INTERVAL = 8  # tokens of one event
MARGIN_SECONDS = 1.0  # between the end of a wait for others and the deadline
_RUNNING = re.compile(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([0-9.e+]+)", re.MULTILINE)


class VllmHttpServer:
    """Implements `core.server_ports.InferenceServer` and `engine.vllm_control.VllmCalls`.

    Args:
        url: of the server, for example `http://10.0.0.7:8000`.
        api_key: sent as a bearer token; None: none.
        hello: what the server's model has to be.
        start_seconds: how long it may take until it answers; call_seconds: how long any call may take.
        wait_seconds: how long requests of others may take to end at a pause.
        max_model_len: tokens that it has to take in one request; 0: not compared.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        clock: Clock,
        make_weights: Callable[[Any], VllmWeights],
        hello: Hello,
        api_key: str | None = None,
        start_seconds: float = 120.0,
        call_seconds: float = 60.0,
        wait_seconds: float = 10.0,
        max_model_len: int = 0,
    ) -> None:
        self._url = url.rstrip("/")
        self._name = f"{name} ({self._url})"
        self._clock = clock
        self._weights = make_weights(self)
        self._hello = hello
        self._api_key = api_key
        self._start_seconds = start_seconds
        self._call_seconds = call_seconds
        self._wait_seconds = wait_seconds
        self._max_model_len = max_model_len
        self._client: httpx2.AsyncClient | None = None

    @property
    def streams(self) -> Literal["kept", "closed"]:
        """A stream is one HTTP answer; ours end before a pause."""
        return "closed"

    async def start(self) -> None:
        """Wait until it answers and make sure that it takes our weights.

        Raises:
            ConfigError: it answers, but cannot be used; with what to do. WorkerDied: it does not answer in time.
        """
        import httpx2

        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx2.AsyncClient(
            base_url=self._url, headers=headers, limits=limits, timeout=self._call_seconds, trust_env=False
        )
        await self._until_healthy()
        if await self._status("GET", "/weight_info") != 200:
            raise ConfigError(f"{self._name} does not let weights be loaded: {START_HINT}")
        await self._check_models()
        try:
            await self._weights.greet(self._hello)
        except ConfigError as error:
            raise ConfigError(f"{self._name}: {error.message}") from error
        except SyncError as error:
            raise ConfigError(
                f"{self._name} does not take weights of paceline: {START_HINT} ({error.message})"
            ) from error

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenBatch]:
        """See the port."""
        import httpx2

        refuse_stop_strings(request)
        body = completion_body(request)
        ended = False
        try:
            async with self._http().stream("POST", "/v1/completions", json=body, timeout=None) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode("utf-8", "replace")
                    raise self._refusal("a request", answer.status_code, text)
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        batch = batch_of(msgspec.json.decode(line.removeprefix("data: ")))
                        ended = ended or batch.finish_reason is not None
                        yield batch
        except httpx2.HTTPError as error:
            raise self._gone("generated", error) from error
        if not ended:
            raise WorkerDied(f"{self._name} ended a stream without saying how", self._name)

    async def pause(self, deadline_wall: float) -> int:
        """Let others' requests end, or freeze them when they do not in time; keys and values are forgotten."""
        left = deadline_wall - self._clock.wall()
        try:
            async with asyncio.timeout(max(0.1, min(self._wait_seconds, left - MARGIN_SECONDS))):
                await self._post("/pause", params={"mode": "wait", "clear_cache": "true"})
        except TimeoutError:
            mixed = await self._requests()
            await self._post("/pause", params={"mode": "keep", "clear_cache": "true"})
            return mixed
        return 0

    async def resume(self) -> None:
        """See the port."""
        await self._post("/resume")

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
        answer = await self._post("/weight_checker", json={"action": "checksum"})
        return {str(name): str(digest) for name, digest in answer["checksums"].items()}

    async def close(self) -> None:
        """Leave the server as it is: it is not ours."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    # -- VllmCalls -----------------------------------------------------------------------------------------------------

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """See `VllmCalls`."""
        await self._post("/init_weight_transfer_engine", json={"init_info": dict(info)})

    async def start_weight_update(self) -> None:
        """See `VllmCalls`."""
        await self._post("/start_weight_update")

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """See `VllmCalls`."""
        await self._post("/update_weights", json={"update_info": dict(info)})

    async def finish_weight_update(self, label: str) -> None:
        """See `VllmCalls`."""
        await self._post("/finish_weight_update", json={"weight_version": label})

    async def weight_label(self) -> str:
        """See `VllmCalls`."""
        return str((await self._call("GET", "/weight_info"))["weight_version"])

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def _http(self) -> httpx2.AsyncClient:
        if self._client is None:
            raise WorkerDied(f"{self._name} was let go", self._name)
        return self._client

    async def _post(self, path: str, **arguments: Any) -> Any:
        return await self._call("POST", path, **arguments)

    async def _call(self, method: str, path: str, **arguments: Any) -> Any:
        """The answer's JSON.

        Raises:
            SyncError and the plug-in's errors: it refused. WorkerDied: it is gone. DeadlineExceeded: it hangs.
        """
        import httpx2

        # A server that answers with an error of vLLM's ends the connection, which another call would then find dead.
        headers = {"Connection": "close"}
        try:
            answer = await self._http().request(method, path, headers=headers, **arguments)
        except httpx2.TimeoutException as error:
            line = f"{self._name} did not answer {path} within {self._call_seconds:g} s"
            raise DeadlineExceeded(line, self._name, self._call_seconds) from error
        except httpx2.HTTPError as error:
            raise self._gone(path, error) from error
        if answer.status_code != 200:
            raise self._refusal(path, answer.status_code, answer.text)
        return msgspec.json.decode(answer.content)

    async def _status(self, method: str, path: str) -> int:
        import httpx2

        try:
            return (await self._http().request(method, path, timeout=self._call_seconds)).status_code
        except httpx2.HTTPError:
            return 0

    async def _until_healthy(self) -> None:
        ends = self._clock.now() + self._start_seconds
        while (status := await self._status("GET", "/health")) != 200:
            if self._clock.now() > ends:
                said = "does not answer" if status == 0 else f"answers {status}"
                raise WorkerDied(f"{self._name} {said}: is the server running, and is the URL right?", self._name)
            await self._clock.sleep(LOOK_SECONDS)

    async def _check_models(self) -> None:
        """The one route of those that the key guards which costs nothing.

        Raises:
            ConfigError: another key is wanted, or a request of this run would be too long.
        """
        (model, *_) = (await self._call("GET", "/v1/models"))["data"]
        takes = int(model.get("max_model_len") or 0)
        if takes and takes < self._max_model_len:
            raise ConfigError(
                f"{self._name} takes {takes} tokens in one request, but this run needs {self._max_model_len}: start it "
                f"with --max-model-len {self._max_model_len}, or set rollout.max_model_len"
            )

    async def _requests(self) -> int:
        """Requests that the server has, by its metrics."""
        import httpx2

        try:
            text = (await self._http().get("/metrics")).text
        except httpx2.HTTPError:
            return 1  # at least the one that was waited for
        return max(1, round(sum(float(number) for number in _RUNNING.findall(text))))

    def _refusal(self, what: str, status: int, text: str) -> PacelineError:
        known = error_from(text)
        if known is not None:
            return known
        line = " ".join(text.split())[:300]
        if status in (401, 403):
            return ConfigError(f"{self._name} refuses the API key ({status}): {KEY_HINT}")
        if what == "a request" and 400 <= status < 500:
            return ConfigError(f"{self._name} refuses a request ({status}): {line}")
        if "dead" in line.lower() or status == 503:
            return WorkerDied(f"{self._name}: its engine is dead ({status}): {line}", self._name)
        advice = f"; {START_HINT}" if status == 404 else ""
        return SyncError(f"{self._name} answers {status} to {what}: {line}{advice}")

    def _gone(self, what: str, error: Exception) -> WorkerDied:
        line = f"{self._name} went away while it {what}" if what == "generated" else f"{self._name} went away at {what}"
        return WorkerDied(f"{line}: {type(error).__name__}", self._name)


def completion_body(request: GenerationRequest) -> dict[str, Any]:
    """The request as vLLM's completion route takes it. Everything is said: what is left out would be the model's."""
    params = request.params
    return {
        "prompt": [*request.prompt_ids, *request.response_ids],
        "max_tokens": params.max_tokens - len(request.response_ids),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,  # the stop tokens are the request's
        "logprobs": 0,  # of the sampled token alone
        "return_token_ids": True,
        "stream": True,
        "stream_interval": STREAM_INTERVAL,
    }


def batch_of(chunk: Mapping[str, Any]) -> TokenBatch:
    """One event of the stream.

    Raises:
        SyncError: it is an error of the server's, or not as many log-probs as tokens.
    """
    if "choices" not in chunk:
        raise SyncError(f"the server failed a request: {str(chunk.get('error', chunk))[:300]}")
    if not chunk["choices"]:
        return TokenBatch([], [])
    choice = chunk["choices"][0]
    token_ids = list(choice.get("token_ids") or [])
    logprobs = [float(value) for value in (choice.get("logprobs") or {}).get("token_logprobs") or []]
    if len(token_ids) != len(logprobs):
        raise SyncError(f"the server sent {len(token_ids)} tokens with {len(logprobs)} log-probs")
    return TokenBatch(token_ids, logprobs, choice.get("finish_reason"))
