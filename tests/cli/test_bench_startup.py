"""`octavo bench startup` on a tiny model, and how its parts are told apart."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from octavo.cli.bench import startup
from octavo.cli.bench.common import make_parser, parse
from octavo.cli.bench.startup import engine_flags, parts_of, wait_until_ready
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.errors import OctavoError
from support.checkpoints import tiny_llama


def test_startup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama(tmp_path / "tiny")
    file = tmp_path / "startup.json"
    words = ["--num-iters", "1", "--num-gpu-blocks-override", "64", "--output-json", str(file)]
    assert main(["bench", "startup", str(tmp_path / "tiny"), *words]) == 0
    figures = json.loads(file.read_text())
    assert list(figures["offline"]["median"]) == ["import", "load", "first token", "all"]
    assert list(figures["served"]["median"]) == ["ready", "first token", "all"]
    for kind in ("offline", "served"):
        *parts, whole = figures[kind]["median"].values()
        assert min(parts) > 0 and whole == pytest.approx(sum(parts)) and len(figures[kind]["rounds"]) == 1
    assert "offline  first token" in capsys.readouterr().out


def test_starts_with_a_copy_of_the_packed_weights_stand_beside_those_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(config: EngineConfig) -> dict[str, float]:
        return {"all": 1.0 if config.enable_packed_cache else 2.0}

    for name in ("start_offline", "start_server"):
        monkeypatch.setattr(startup, name, start)
    file = tmp_path / "startup.json"
    words = ["--num-iters", "2", "--output-json", str(file)]
    assert main(["bench", "startup", "x.gguf", "--packed-cache-dir", str(tmp_path), *words]) == 0
    figures = json.loads(file.read_text())
    medians = {"offline": 1.0, "served": 1.0, "offline, no copy": 2.0, "served, no copy": 2.0}
    assert {kind: figures[kind]["median"]["all"] for kind in medians} == medians
    assert main(["bench", "startup", "x.gguf", "--packed-cache-dir", str(tmp_path), "--no-packed-cache", *words]) == 0
    assert "offline, no copy" not in json.loads(file.read_text())


def test_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", str(tmp_path / "none.gguf")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("octavo: error: the process failed: ") and "none.gguf" in error


def test_parts() -> None:
    parts = parts_of(10.0, {"import": 11.0, "load": 14.0, "first token": 14.5})
    assert parts == {"import": 1.0, "load": 3.0, "first token": 0.5, "all": 4.5}


def test_server_that_ends_before_it_is_ready() -> None:
    assert wait_until_ready(io.StringIO("hello\nready on http://127.0.0.1:81; try\n")) == "http://127.0.0.1:81"
    with pytest.raises(OctavoError, match="the server failed: no memory"):
        wait_until_ready(io.StringIO("hello\nno memory\n"))
    with pytest.raises(OctavoError, match="it said nothing"):
        wait_until_ready(io.StringIO())


def test_flags_give_the_same_engine() -> None:
    config = EngineConfig(
        model="m", dtype="float32", max_model_len=99, enable_prefix_caching=False, enforce_eager=True, max_logprobs=-1
    )
    assert parse(make_parser("x", "x", ()), ["m", *engine_flags(config)], {})[1] == config
    assert engine_flags(EngineConfig(model="m")) == []
