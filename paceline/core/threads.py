"""The thread plan: how many compute threads each process of a run gets.

The sum over all processes is at most the cores, except that a process that computes needs one: with fewer cores than
such processes each has exactly one and the system shares the cores between them. Light processes (queue,
synchronizer, rollouter) have none.
"""

from __future__ import annotations

from collections.abc import Sequence

LIGHT_PROCESSES = ("driver", "rollouter", "message_queue", "synchronizer")


def plan_threads(cores: int, num_replicas: int, validators: Sequence[str] = ()) -> dict[str, int]:
    """Role -> torch threads. Replicas share half of the cores evenly, the trainer has the rest; a process of its side
    of validations takes one of those.

    Example: `plan_threads(16, 2)` gives the trainer 8 and each replica 4; `plan_threads(2, 2)` gives 1, 1, 1.
    """
    each = max(1, (cores // 2) // num_replicas)
    trainer = max(1, cores - each * num_replicas - len(validators))
    plan = {"trainer": trainer, **dict.fromkeys(validators, 1)}
    for index in range(num_replicas):
        plan[f"replica-{index}"] = each
    plan.update(dict.fromkeys(LIGHT_PROCESSES, 0))
    return plan
