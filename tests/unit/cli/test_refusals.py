"""The command refuses bad input: exit code 2, one line on stderr, nothing heavy imported, nothing started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# All commands run in one fresh interpreter, so that what any of them imports is seen.
DRIVER = """
import contextlib, io, json, sys
from paceline.cli.main import main
answers = []
for arguments in json.loads(sys.argv[1]):
    shown, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
        code = main(arguments)
    heavy = sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'ray', 'transformers'})
    answers.append([code, heavy, errors.getvalue()])
print(json.dumps(answers))
"""
REFUSALS = [
    (["train", "foo=1"], "unknown key foo"),
    (["train", "actor.optim.lrr=1"], "did you mean actor.optim.lr?"),
    (["train", "trainer.seed=many"], "trainer.seed: "),
    (["train", "rollout.n=1"], "rollout.n must be at least 2"),
    (["train", "model.path=nowhere"], "model.path: "),
    (["train", "model.path=empty"], "model.path: "),
    (["train", "model.path=huge"], "bytes need "),
    (["train", "-c", "nowhere.yaml"], "cannot read nowhere.yaml"),
    (["train", "-c", "broken.yaml"], "broken.yaml: line 2, column 1: "),
    (["train", "-c", "list.yaml"], "list.yaml: has to be a mapping of keys to values, not a list"),
    (["train", "-c", "empty"], "cannot read empty: Is a directory"),
    (["train", "rollout.total_rollout_steps=10"], "rollout.total_rollout_steps=10 is less than one update needs"),
    (["train", "data.max_prompt_length=3"], "data.max_prompt_length: "),
    (["train", "data.val_size=1000000"], "data.val_size: "),
    (["train", "trainer.experiment_name=../up"], "trainer.experiment_name: "),
    (["train", "trainer.default_local_dir=list.yaml/runs"], "trainer.default_local_dir: cannot make "),
    (["train", "rollout.tensor_parallel_size=2"], "need rollout.name=vllm"),
    (["train", "rollout.name=vllm", "rollout.servers=[http://a]"], "set rollout.num_replicas=1"),
    (["train", "rollout.name=vllm", "checkpoint_engine.backend=ray_object"], "use shared_memory"),
    (["train", "seed"], "'seed' is not of the form key.sub=value"),
    (["train", "--seed", "1"], "No such option: --seed"),
    (["trian"], "No such command 'trian'"),
    (["report"], "run_dir"),
    (["report", "nowhere"], "nowhere holds no run"),
    (["verify", "nowhere"], "nowhere holds no run"),
]

Answer = tuple[int, list[str], str]


def run(directory: Path, commands: list[list[str]]) -> list[Answer]:
    """Of each command: exit code, heavy libraries that are imported by then, stderr."""
    driver = [sys.executable, "-c", DRIVER, json.dumps(commands)]
    done = subprocess.run(driver, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [(code, heavy, errors) for code, heavy, errors in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    directory = tmp_path_factory.mktemp("refusals")
    (directory / "empty").mkdir()
    make_huge_model(directory / "huge")
    (directory / "broken.yaml").write_text("trainer: [1,\n", encoding="utf-8")
    (directory / "list.yaml").write_text("- trainer\n", encoding="utf-8")
    before = sorted(directory.rglob("*"))
    found = run(directory, [arguments for arguments, _ in REFUSALS])
    assert sorted(directory.rglob("*")) == before, "a refused command left something"
    return found


@pytest.mark.parametrize("index", range(len(REFUSALS)), ids=[" ".join(arguments) for arguments, _ in REFUSALS])
def test_bad_input_is_one_line(answers: list[Answer], index: int) -> None:
    code, heavy, errors = answers[index]
    assert code == 2
    assert errors.startswith("paceline: error: ")
    assert errors.count("\n") == 1
    assert REFUSALS[index][1].lower() in errors.lower()
    assert heavy == []


def make_huge_model(directory: Path) -> None:
    """Weights of 4 TiB, all of them a hole in the file."""
    directory.mkdir()
    (directory / "config.json").write_text("{}", encoding="utf-8")
    size = 4 << 40
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 20, 1 << 20], "data_offsets": [0, size]}}).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)


def test_help_and_version_need_nothing_heavy(tmp_path: Path) -> None:
    commands = [["--version"], ["--help"], ["train", "--help"], []]
    assert run(tmp_path, commands) == [(0, [], "")] * len(commands)


def test_a_temporary_directory_with_too_long_a_path_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    program = "import sys; from paceline.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "train"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(long)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "TMPDIR: " in done.stderr
    assert list(tmp_path.iterdir()) == [long]
    assert list(long.iterdir()) == []


def test_the_program_itself_refuses(tmp_path: Path) -> None:
    program = "import sys; from paceline.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "train", "foo=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert list(tmp_path.iterdir()) == []


def test_the_base_install_says_what_the_command_needs() -> None:
    program = "import sys; sys.modules['typer'] = None; from paceline.cli.main import main; sys.exit(main(['train']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "paceline: error: typer is not installed: the command needs pip install 'paceline[train]'\n"
