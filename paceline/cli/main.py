"""The command `paceline`: its sub-commands, and how an error becomes one line and an exit code.

Exit codes: 0 done, 1 failed, 2 refused before anything started, 130 / 143 stopped by SIGINT / SIGTERM. Nothing heavy is
imported before it is known to be needed, so that a refusal is quick.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from paceline.core.errors import ConfigError, PacelineError, RunInterrupted

REFUSED = 2
FAILED = 1
INTERRUPTED = 130

# typer brings a click of its own in some versions; its base class of usage errors is reached through a public subclass.
UsageProblem = cast(
    "type[Exception]", next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
)


def entry_point() -> None:
    """The console script. Leaves without the exit hooks of libraries, which would start again what the run has ended."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    command = typer.main.get_command(_build_app(time.time()))
    try:
        code = command.main(list(sys.argv[1:] if arguments is None else arguments), "paceline", standalone_mode=False)
    except RunInterrupted as error:
        _complain(error.message)
        return 128 + error.signal_number
    except ConfigError as error:
        _complain(error.message)
        return REFUSED
    except PacelineError as error:
        _complain(error.message)
        return FAILED
    except UsageProblem as error:
        _complain(str(error))
        return REFUSED
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _complain(message: str) -> None:
    print(f"paceline: error: {' '.join(message.split())}", file=sys.stderr)


def _build_app(command_wall: float) -> typer.Typer:
    app = typer.Typer(
        help="Fully asynchronous RL post-training of language models.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    bench = typer.Typer(help="Measure parts on this machine.")
    app.add_typer(bench, name="bench")

    @app.callback(invoke_without_command=True)
    def paceline(
        context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
    ) -> None:
        if version:
            from importlib.metadata import version as installed

            print(installed("paceline"))
        elif context.invoked_subcommand is None:
            print(context.get_help())

    @app.command()
    def train(
        overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", show_default=False)] = None,
        config: Annotated[Path | None, typer.Option("-c", "--config", metavar="FILE.yaml")] = None,
    ) -> int:
        """Train; without arguments the shipped model on the arithmetic task."""
        from paceline.cli.train_command import train as run

        return run(config, overrides or [], command_wall)

    @app.command()
    def report(run_dir: Path) -> int:
        """Show the summary of a run, folded again from its event log."""
        from paceline.cli.report_command import report as run

        return run(run_dir)

    @app.command()
    def verify(run_dir: Path) -> int:
        """Hash, from outside, what the replicas of a live run serve, and compare it with what was published."""
        from paceline.cli.verify_command import verify as run

        return run(run_dir)

    @bench.command()
    def engine(
        json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures there too.")] = None,
        model: Annotated[str | None, typer.Option(metavar="DIR", help="Another model than the shipped one.")] = None,
    ) -> int:
        """The embedded engine against `model.generate` on the same batches."""
        from paceline.cli.bench_engine import run

        return run(json_path=json, model_path=model)

    return app
