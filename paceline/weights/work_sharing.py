"""Calls shared out among threads: a worker that is free takes the next item, and makes it, where items are made lazily.

So what the interpreter does for one item hides behind the calls of other threads that do without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def share_out(threads: int, call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """`call` of every item, in the items' order, by the caller and `threads` less one others.

    What a call or the making of an item raises is raised here, once every thread has ended.
    """
    if threads <= 1:
        return [call(item) for item in items]
    done: dict[int, R] = {}
    left = enumerate(items)
    one_at_a_time = threading.Lock()

    def work() -> None:
        while True:
            with one_at_a_time:
                taken = next(left, None)
            if taken is None:
                return
            done[taken[0]] = call(taken[1])

    with ThreadPoolExecutor(threads - 1, thread_name_prefix="paceline-copy") as pool:
        workers = [pool.submit(work) for _ in range(threads - 1)]
        work()
    for worker in workers:
        worker.result()
    return [done[index] for index in range(len(done))]
