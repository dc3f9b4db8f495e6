"""The command `paceline`: how its end becomes one line and an exit code.

Exit codes: 0 done, 1 failed, 2 refused before anything started, 130 / 143 stopped by SIGINT / SIGTERM, 141 nobody reads
the output. The module imports next to nothing, so that a signal or a refusal is answered at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from paceline.core.errors import ConfigError, PacelineError, RunInterrupted
from paceline.runtime.stop_signal import StopRequested, raise_stop_signals

REFUSED = 2
FAILED = 1
SIGNALLED = 128
OF_THE_TRAIN_EXTRA = (
    *("jinja2", "omegaconf", "pyarrow", "ray", "reasoning_gym", "rich"),
    *("tensorboard", "tokenizers", "transformers", "typer", "yaml"),
)


def entry_point() -> None:
    """The console script. Leaves without the exit hooks of libraries, which would start again what has been ended."""
    try:
        raise_stop_signals()
        code = main()
    except StopRequested as asked:
        code = _complain(asked.as_error().message, SIGNALLED + asked.number)
    with suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    began = time.time()
    try:
        return _run(arguments, began)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in OF_THE_TRAIN_EXTRA:
            raise
        line = f"{error.name} is not installed: the command needs pip install 'paceline[train]'"
        return _complain(line, REFUSED)


def _run(arguments: Sequence[str] | None, began: float) -> int:
    import typer

    from paceline.cli.app import UsageProblem, build_app

    command = typer.main.get_command(build_app(began))
    try:
        code = command.main(list(sys.argv[1:] if arguments is None else arguments), "paceline", standalone_mode=False)
    except PacelineError as error:
        return _complain(error.message, _code_of(error))
    except UsageProblem as error:
        return _complain(str(error), REFUSED)
    except (typer.Abort, KeyboardInterrupt):
        return SIGNALLED + signal.SIGINT
    except BrokenPipeError:
        return SIGNALLED + signal.SIGPIPE
    return code if isinstance(code, int) else 0


def _code_of(error: PacelineError) -> int:
    if isinstance(error, RunInterrupted):
        return SIGNALLED + error.signal_number
    return REFUSED if isinstance(error, ConfigError) else FAILED


def _complain(message: str, code: int) -> int:
    with suppress(BrokenPipeError):
        print(f"paceline: error: {' '.join(message.split())}", file=sys.stderr)
    return code
