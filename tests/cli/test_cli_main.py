"""Dispatch, errors and exit codes; and that a help text loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.main import COMMANDS, main
from octavo.errors import CheckpointError

HEAVY = (
    "numpy",
    "tokenizers",
    "starlette",
    "uvicorn",
    "msgspec",
    "prometheus_client",
    "rich",
    "jinja2",
    "huggingface_hub",
)


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        [],
        ["--version"],
        *([command.name, "--help"] for command in COMMANDS),
        ["bench", "latency", "--help"],
    ],
)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    script = (
        f"import sys; sys.argv[1:] = {argv!r}\nimport octavo.cli.main as m\ntry: m.main()\nexcept SystemExit: pass\n"
    )
    script += f"print('loaded:', [name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"
    assert done.stderr == ""


def test_overview_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for command in COMMANDS:
        assert any(line.split()[:1] == [command.name] and command.help in line for line in lines)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serv"], "`octavo` has no command 'serv'; did you mean serve? (see `octavo --help`)"),
        (
            ["bench", "latancy"],
            "`octavo bench` has no command 'latancy'; did you mean latency? (see `octavo bench --help`)",
        ),
        (
            ["serve", "m", "--max-modl-len", "9"],
            "unknown option --max-modl-len; did you mean --max-model-len? {see serve}",
        ),
        (["serve", "--max-num"], "unknown option --max-num; did you mean --max-num-seqs? {see serve}"),
        (["serve", "--port", "x"], "argument --port: 'x' is not a whole number (such as 4096, 8k or 2GiB) {see serve}"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs: max_num_seqs is 0; it must be at least 1"),
        (
            ["serve", "--scheduling-policy", "lifo"],
            "--scheduling-policy: scheduling_policy is 'lifo'; allowed: fcfs, priority, fair",
        ),
        (["bench", "throughput", "--num-prompts", "0"], "--num-prompts is 0; it must be at least 1"),
    ],
)
def test_wrong_line_is_one_line_and_exit_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    said = said.replace("{see serve}", "(see `octavo serve --help`)")
    assert capsys.readouterr() == ("", f"octavo: error: {said}\n")


@pytest.mark.parametrize(
    ("command", "option"),
    [(["latency"], "--output-json"), (["paging"], "--output-json"), (["paging"], "--plot"), (["plot", "x"], "--out")],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    command: list[str], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in (("no/x.svg", f": there is no folder {tmp_path / 'no'}"), ("", " is a folder")):
        assert main(["bench", *command, option, str(tmp_path / name)]) == 2
        assert f"{option}: {tmp_path / name}{said} (see" in capsys.readouterr().err


def test_checkpoint_error_is_exit_1_and_a_traceback_only_on_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise CheckpointError("tensor lm_head.weight is missing")

    monkeypatch.setattr("octavo.cli.collect_env.run", fail)
    assert main(["collect-env"]) == 1
    assert capsys.readouterr().err == "octavo: error: tensor lm_head.weight is missing\n"
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    with pytest.raises(CheckpointError):
        main(["collect-env"])


def test_interrupt_is_exit_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.cli.collect_env.run", interrupt)
    assert main(["collect-env"]) == 130


def test_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "octavo", "collect-env", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["octavo"] and facts["cpus_online"] >= 1 and facts["memory_total_gib"] > 0
    assert {"numpy", "starlette", "uvicorn", "msgspec"} <= facts["packages"].keys()  # as pyproject.toml names them
    assert not {"pytest", "pydantic"} & facts["packages"].keys()  # only others need these


def test_reader_that_leaves_is_no_traceback() -> None:
    command = f"{sys.executable} -m octavo serve --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
