"""Calls shared out among threads, without a hand-over for each: a worker takes the next item when it is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def share_out(threads: int, call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """`call` of every item, in the items' order; what a call raises is raised here, once every thread has ended."""
    if threads <= 1 or len(items) < 2:
        return [call(item) for item in items]
    done: dict[int, R] = {}
    left = iter(enumerate(items))  # taking from it is one step of the interpreter

    def work() -> None:
        for index, item in left:
            done[index] = call(item)

    with ThreadPoolExecutor(threads, thread_name_prefix="paceline-copy") as pool:
        workers = [pool.submit(work) for _ in range(threads)]
    for worker in workers:
        worker.result()
    return [done[index] for index in range(len(items))]
