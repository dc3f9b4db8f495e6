"""A judge behind HTTP that is overloaded at first: the function is called again, as its user would have to do it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from paceline.core.errors import RewardError
from paceline.core.sample import Score
from paceline.reward.process_reward import ProcessReward
from tests.unit.reward.functions import prompt, spec_of, with_reward, write

JUDGE = """
import json, urllib.request
{kind} compute_score(data_source, solution_str, ground_truth, extra_info, url):
    with urllib.request.urlopen(url, data=solution_str.encode(), timeout=20) as answer:
        return json.load(answer)
"""


@contextmanager
def overloaded_judge(refusals: int) -> Iterator[tuple[str, list[bytes]]]:
    """Its URL, and what it was asked; the first requests are answered with 503, the others with a score."""
    asked: list[bytes] = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(503 if len(asked) <= refusals else 200)
            self.end_headers()
            self.wfile.write(b'{"score": 0.5, "acc": 1}')

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", asked
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_judge_that_is_overloaded_is_asked_again(tmp_path: Path, kind: str) -> None:
    async def scenario(reward: ProcessReward) -> None:
        assert await reward.score(prompt(), "42") == Score(0.5, {"acc": 1.0})

    with overloaded_judge(2) as (url, asked):
        spec = spec_of(write(tmp_path, JUDGE.format(kind=kind)), url=url)
        with_reward(spec, tmp_path / "log", scenario)
        assert asked == [b"42"] * 3


def test_a_judge_that_stays_overloaded_is_the_reason(tmp_path: Path) -> None:
    async def scenario(reward: ProcessReward) -> None:
        with pytest.raises(RewardError, match="reward: HTTPError: HTTP Error 503: Service Unavailable"):
            await reward.score(prompt(), "42")

    with overloaded_judge(3) as (url, asked):
        with_reward(spec_of(write(tmp_path, JUDGE.format(kind="def")), url=url), tmp_path / "log", scenario)
        assert asked == [b"42"] * 3
