"""Every error survives the way between processes as itself."""

from __future__ import annotations

import pickle

import pytest

from paceline.core import errors
from paceline.core.errors import DeadlineExceeded, PacelineError, RunInterrupted, WorkerDied


def all_errors() -> list[type[PacelineError]]:
    return [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, PacelineError)]


@pytest.mark.parametrize("kind", all_errors())
def test_errors_survive_pickling(kind: type[PacelineError]) -> None:
    error = kind("replica-1 did not answer", "replica-1", 2.0)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert again.args == error.args
    assert again.message == "replica-1 did not answer"


def test_the_tree_is_drawn_in_the_docstring() -> None:
    assert errors.__doc__ is not None
    assert [c.__name__ for c in all_errors() if c.__name__ not in errors.__doc__] == []


def test_named_facts_are_kept() -> None:
    assert DeadlineExceeded("late", "replica-1", 2.0).culprit == "replica-1"
    assert WorkerDied("gone", "trainer").worker == "trainer"
    assert RunInterrupted("stopped", 15).signal_number == 15
    assert PacelineError().message == "PacelineError"
