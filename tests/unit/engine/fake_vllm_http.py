"""The HTTP face of a vLLM server, without vLLM: the routes that a driver calls, on a socket of this machine.

The plug-in behind it is the real one over a toy model. `misbehave` answers some paths with a status and a text.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.core.errors import PacelineError
from paceline.engine.vllm_commands import error_text, unpack_command
from paceline.engine.vllm_worker import WorkerWeights

REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 500: "Server Error"}


class FakeVllm:
    """Start it with `async with`; `url` is then where it listens."""

    def __init__(self, worker: WorkerWeights, *, api_key: str = "", tokens: int = 5) -> None:
        self._worker = worker
        self._api_key = api_key
        self._tokens = tokens
        self._server: asyncio.Server | None = None
        self.label = "default"
        self.paused: str | None = None
        self.wait_seconds = 0.0
        self.calls: list[str] = []
        self.misbehave: dict[str, tuple[int, str]] = {}
        self.hangs: set[str] = set()
        self.cut_streams = False
        self.updating = False
        self.another_worker_loaded = False
        self.asked: list[dict[str, Any]] = []
        self.max_model_len = 4096

    @property
    def url(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def __aenter__(self) -> FakeVllm:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")
            method, target, _ = lines[0].split(" ")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            await self._answer(writer, method, target, headers, json.loads(body or b"{}"))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: Mapping[str, str], body: Any
    ) -> None:
        path, _, query = target.partition("?")
        self.calls.append(f"{method} {target}")
        if path in self.hangs:
            await asyncio.sleep(600)
        if path in self.misbehave:
            status, text = self.misbehave[path]
        elif self._api_key and headers.get("authorization") != f"Bearer {self._api_key}" and path.startswith("/v1"):
            status, text = 401, '{"error": "Unauthorized"}'
        elif path == "/v1/completions":
            return await self._stream(writer, body)
        else:
            status, text = await self._control(path, query, body)
        writer.write(_head(status, f"Content-Length: {len(text.encode())}") + text.encode())
        await writer.drain()
        return None

    async def _control(self, path: str, query: str, body: Any) -> tuple[int, str]:
        told = {
            "/health": "{}",
            "/v1/models": json.dumps({"data": [{"id": "toy", "max_model_len": self.max_model_len}]}),
            "/weight_info": json.dumps({"weight_version": self.label}),
            "/metrics": 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n',
            "/weight_checker": json.dumps({"checksums": {"tp0:w": "abc"}}),
        }
        if path in told:
            return 200, told[path]
        if path == "/pause":
            if "mode=wait" in query:
                await asyncio.sleep(self.wait_seconds)
            self.paused = query
        elif path == "/resume":
            self.paused = None
        elif path in ("/start_weight_update", "/finish_weight_update"):
            return self._update_state(path, body)
        elif path in ("/init_weight_transfer_engine", "/update_weights"):
            return self._command(path, body)
        else:
            return 404, '{"detail": "Not Found"}'
        return 200, "{}"

    def _update_state(self, path: str, body: Any) -> tuple[int, str]:
        starts = path.startswith("/start")
        if starts == self.updating:
            return 500, '{"error": "already active, or without a matching start_weight_update"}'
        self.updating = starts
        if not starts:
            self.label = body["weight_version"]
        return 200, "{}"

    def _command(self, path: str, body: Any) -> tuple[int, str]:
        try:
            self._worker.obey(unpack_command(body.get("init_info") or body.get("update_info")))
        except PacelineError as error:
            self.updating = self.updating and (path != "/update_weights" or self.another_worker_loaded)
            return 500, json.dumps({"error": {"message": f"Call to collective_rpc failed: {error_text(error)}"}})
        return 200, "{}"

    async def _stream(self, writer: asyncio.StreamWriter, body: Any) -> None:
        self.asked.append(body)
        writer.write(_head(200, "Content-Type: text/event-stream", "Connection: close"))
        count = min(self._tokens, body["max_tokens"])
        for place in range(count):
            if self.cut_streams and place == 2:
                return
            last = place == count - 1
            choice = {
                "index": 0,
                "token_ids": [place + 10],
                "text": "",
                "logprobs": {"token_logprobs": [-0.5 * place], "tokens": ["x"]},
                "finish_reason": "length" if last else None,
            }
            writer.write(f"data: {json.dumps({'request_id': 'x', 'choices': [choice]})}\n\n".encode())
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()


@contextmanager
def listening(worker: WorkerWeights) -> Iterator[FakeVllm]:
    """A server on a loop of its own, for callers that have none."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = FakeVllm(worker)
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(60)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def _head(status: int, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} {REASONS[status]}", *headers]
    if not any(header.startswith("Connection") for header in headers):
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
