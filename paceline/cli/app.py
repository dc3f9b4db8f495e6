"""The sub-commands of `paceline` and their options. Nothing heavy is imported before it is known to be needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

# typer brings a click of its own in some versions; its base class of usage errors is reached through a public subclass.
UsageProblem = cast(
    "type[Exception]", next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
)


def build_app(command_wall: float) -> typer.Typer:
    """The command line; `command_wall` is when the command began, in unix seconds."""
    app = typer.Typer(
        help="Fully asynchronous RL post-training of language models.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.add_typer(_build_bench(), name="bench")

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
        overrides: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="KEY.SUB=VALUE",
                show_default=False,
                help="Values of the configuration, for example trainer.seed=1 or actor.optim.lr=1e-4; the last one "
                "of a key counts. `paceline config` lists all keys.",
            ),
        ] = None,
        config: Annotated[
            Path | None, typer.Option("-c", "--config", metavar="FILE.yaml", help="A configuration; may be partial.")
        ] = None,
    ) -> int:
        """Train; without arguments the shipped model on the arithmetic task."""
        from paceline.cli.train_command import train as run

        return run(config, overrides or [], command_wall)

    _add_looks(app)
    return app


def _add_looks(app: typer.Typer) -> None:
    """Commands that look at a configuration, a run or a reward function, and start no run."""

    @app.command("config")
    def show_config(
        pattern: Annotated[
            list[str] | None,
            typer.Argument(metavar="WORD", show_default=False, help="Only keys whose lines hold all these words."),
        ] = None,
    ) -> int:
        """List the keys of the configuration: default, type and meaning."""
        from paceline.cli.config_command import show_config as run

        return run(pattern or [])

    @app.command()
    def report(run_dir: Path) -> int:
        """Show the summary of a run, folded again from its event log."""
        from paceline.cli.report_command import report as run

        return run(run_dir)

    @app.command("check-reward")
    def check_reward(
        function: Annotated[
            str, typer.Argument(metavar="FILE", help="A Python file with compute_score, or math_verify, reasoning_gym.")
        ],
        data: Annotated[list[str], typer.Option(metavar="FILE", help="What data.train_files would name; repeatable.")],
        rows: Annotated[int, typer.Option("-n", min=1, help="Rows to try, drawn from all.")] = 50,
        name: Annotated[str, typer.Option(help="Name of the function in the file.")] = "compute_score",
        kwargs: Annotated[str, typer.Option(metavar="JSON", help="reward.reward_kwargs, as a JSON object.")] = "{}",
        timeout: Annotated[float, typer.Option(min=0.01, help="reward.timeout_seconds.")] = 30.0,
        prompt_key: Annotated[str, typer.Option(help="data.prompt_key.")] = "prompt",
    ) -> int:
        """Score real rows with their own ground truths, time it, and find rows that hang, raise or give no number."""
        from paceline.cli.check_reward_command import check_reward as run

        return run(function, data, rows=rows, name=name, kwargs=kwargs, timeout=timeout, prompt_key=prompt_key)

    @app.command()
    def verify(run_dir: Path) -> int:
        """Hash, from outside, what the replicas of a live run serve, and compare it with what was published."""
        from paceline.cli.verify_command import verify as run

        return run(run_dir)


def _build_bench() -> typer.Typer:
    bench = typer.Typer(help="Measure parts on this machine.")

    @bench.command()
    def engine(
        json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures there too.")] = None,
        model: Annotated[str | None, typer.Option(metavar="DIR", help="Another model than the shipped one.")] = None,
    ) -> int:
        """The embedded engine against `model.generate` on the same batches."""
        from paceline.cli.bench_engine import run

        return run(json_path=json, model_path=model)

    @bench.command()
    def codec(
        json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures there too.")] = None,
        traces: Annotated[
            Path | None, typer.Option(metavar="DIR", help="Traces that benchmarks/make_delta_traces.py made.")
        ] = None,
        rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 5,
    ) -> int:
        """Bytes and speed of the lossless delta against other codings of the same changes."""
        from paceline.cli.bench_codec import run

        return run(json_path=json, traces=traces, rounds=rounds)

    @bench.command()
    def sync(
        json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures there too.")] = None,
        gib: Annotated[float, typer.Option(help="Size of the model in GiB of bfloat16.")] = 1.0,
        replicas: Annotated[str, typer.Option(metavar="N,N", help="Numbers of replicas.")] = "1,2,4,8",
        engines: Annotated[
            str, typer.Option(metavar="NAMES", help="shared_memory, filesystem, ray_object.")
        ] = "shared_memory",
        modes: Annotated[str, typer.Option(metavar="NAMES", help="What is sent: full, delta.")] = "full",
        apply: Annotated[str, typer.Option(help="How replicas take weights: mapped, copied.")] = "mapped,copied",
        peers: Annotated[str, typer.Option(help="all, none, or names.")] = "all",
        rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 5,
    ) -> int:
        """Weights from a trainer to replicas in other processes, against plain copies and other ways."""
        from paceline.cli.bench_sync import run

        return run(
            json_path=json,
            gib=gib,
            replicas=replicas,
            engines=engines,
            modes=modes,
            apply=apply,
            peers=peers,
            rounds=rounds,
        )

    return bench
