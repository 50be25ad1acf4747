"""Models from a copy of their packed weights: the same bytes as from the checkpoint, or no use of the copy at all."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import octavo
from octavo.checkpoint import packed_cache, packed_file, packed_key, weight_files
from octavo.checkpoint.base import open_checkpoint
from octavo.checkpoint.packed_cache import PACKED, PackedCache
from octavo.config import EngineConfig, packed_cache_folder
from octavo.engine.engine import Engine
from octavo.errors import ConfigError
from octavo.ops import isa
from octavo.quant.formats import MatrixFormat
from support.checkpoints import tiny_llama, write_gguf
from support.engines import all_logits, make_engine

TOKENS = np.random.default_rng(7).integers(0, 379, 20).tolist()
# Checkpoint and options: every storage, and every type of activations that goes with it.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("float32", {}),
    "bfloat16": ("bfloat16", {}),
    "float16 gguf": ("half.gguf", {}),
    **{
        f"{name} {activations}": (checkpoint, {**options, "activation_dtype": activations})
        for name, checkpoint, options in (
            ("gguf", "mixed.gguf", {}),
            ("int8", "bfloat16", {"quantization": "int8"}),
            ("int4", "bfloat16", {"quantization": "int4"}),
        )
        for activations in ("bfloat16", "int8", "int16")
        if activations != "int16" or name == "int8"
    },
    "tied with biases": ("tied", {"quantization": "int8"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for dtype in ("float32", "bfloat16"):
        tiny_llama(folder / dtype, dtype=dtype, hidden=256, heads=4, kv_heads=2)
    tiny_llama(folder / "tied", dtype="bfloat16", tie=True, attention_bias=True, mlp_bias=True)
    types = {"token_embd": "Q8_0", "attn_v": "Q6_K", "attn_": "Q4_K", "ffn_down": "Q5_0", "ffn_": "Q4_1"}
    write_gguf(folder / "mixed.gguf", folder / "float32", types)
    write_gguf(folder / "half.gguf", folder / "float32", "F16")
    return folder


class Start(NamedTuple):
    logits: np.ndarray
    is_copy: bool  # whether its weights came from one


def start(model: Path, folder: Path, **options: Any) -> Start:
    """A whole life of an engine: its copy is written when this returns."""
    engine = make_engine(model, packed_cache_dir=str(folder), **options)
    logits = all_logits(engine, TOKENS)
    engine.close()
    return Start(logits, not engine.info.loading.startswith(PACKED))


def copies(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize("variant", isa.available())
@pytest.mark.parametrize("form", FORMS)
def test_the_second_start_gives_the_bytes_of_the_first(models: Path, tmp_path: Path, form: str, variant: str) -> None:
    checkpoint, options = FORMS[form]
    first = start(models / checkpoint, tmp_path, isa=variant, **options)
    second = start(models / checkpoint, tmp_path, isa=variant, **options)
    assert (first.is_copy, second.is_copy) == (False, True)
    assert np.array_equal(first.logits.view(np.uint32), second.logits.view(np.uint32))
    assert len(copies(tmp_path)) == 1


def test_whatever_changes_the_packed_bytes_has_a_copy_of_its_own(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = isa.available()
    lives = [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "float32"}, {"isa": others[-1]}]
    for count, options in enumerate(lives, 1):
        assert not start(models / "bfloat16", tmp_path, **({"isa": first} | options)).is_copy
        assert len(copies(tmp_path)) == count
    monkeypatch.setattr(octavo, "__version__", "99")
    assert not start(models / "bfloat16", tmp_path, isa=first).is_copy
    same = {"num_threads": 1, "max_model_len": 64, "kv_cache_dtype": "int8", "enforce_eager": True}
    assert start(models / "bfloat16", tmp_path, isa=first, **same).is_copy


def test_a_moved_model_keeps_its_copy_and_a_changed_one_does_not(models: Path, tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(models / "float32", model)
    first = start(model, folder)
    (tmp_path / "link").symlink_to(model)
    assert start(tmp_path / "link", folder).is_copy
    weights = model / "model.safetensors"
    info, data = weights.stat(), bytearray(weights.read_bytes())
    data[len(data) // 2 + 3] ^= 0x40  # in the middle, and with the times that it had
    weights.write_bytes(data)
    os.utime(weights, ns=(info.st_atime_ns, info.st_mtime_ns))
    changed = start(model, folder)
    assert not changed.is_copy and not np.array_equal(first.logits, changed.logits)


def test_other_weights_are_told_apart_by_samples_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all files have the same times, and equal headers."""
    monkeypatch.setattr(packed_key, "weight_files", lambda checkpoint: iter(()))
    keys = set()
    for seed in (1, 2):
        checkpoint = open_checkpoint(tiny_llama(tmp_path / str(seed), seed=seed))
        matrices = [([source], MatrixFormat("float32", "plain")) for source in checkpoint.tensors.values()]
        keys.add(packed_key.packed_key(checkpoint, matrices, isa.choose()))
        # One tensor less, or in another format.
        keys.add(packed_key.packed_key(checkpoint, matrices[1:], isa.choose()))
        keys.add(
            packed_key.packed_key(checkpoint, [(s, MatrixFormat("bfloat16", "plain")) for s, _ in matrices], "x86_v3")
        )
    assert len(keys) == 6
    assert weight_files.EDGE_BYTES == 65536


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "folder"])
def test_a_damaged_copy_is_not_used_but_replaced(
    models: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = start(models / "mixed.gguf", tmp_path)
    (path,) = copies(tmp_path)
    whole = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        data = bytearray(whole)
        data[len(data) // 2] ^= 1
        path.write_bytes({"flipped": data, "cut": whole[:-64], "empty": b""}[damage])
    second = start(models / "mixed.gguf", tmp_path)
    assert not second.is_copy and np.array_equal(first.logits, second.logits)
    assert any("are not used" in record.message for record in caplog.records)
    if damage != "folder":
        assert path.read_bytes() == whole
        assert start(models / "mixed.gguf", tmp_path).is_copy


def test_a_copy_may_go_while_it_is_used(models: Path, tmp_path: Path) -> None:
    first = start(models / "mixed.gguf", tmp_path)
    engine = make_engine(models / "mixed.gguf", packed_cache_dir=str(tmp_path))
    for path in copies(tmp_path):
        path.unlink()
    assert engine.info.loading.startswith("read from ")
    assert np.array_equal(all_logits(engine, TOKENS), first.logits)


def errors_of(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == level]


@pytest.mark.parametrize(
    ("number", "level"), [(errno.ENOSPC, logging.WARNING), (errno.EROFS, logging.INFO), (errno.EACCES, logging.INFO)]
)
def test_a_disk_that_takes_nothing_is_one_line(
    models: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    level: int,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(packed_file, "_write_all", fail)
    first = start(models / "mixed.gguf", tmp_path)
    monkeypatch.undo()
    assert errors_of(caplog, level) == [f"no packed weights are kept in {tmp_path}: {os.strerror(number)}"]
    assert copies(tmp_path) == [] and not first.is_copy


def test_a_folder_that_cannot_be_made(models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "file").touch()
    assert not start(models / "mixed.gguf", tmp_path / "file" / "folder").is_copy
    assert len(errors_of(caplog, logging.INFO)) == 1 and not errors_of(caplog, logging.WARNING)


def test_a_disk_that_is_nearly_full_is_left_alone(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda path: usage(10 * 2**30, 9 * 2**30, 2**30))
    start(models / "mixed.gguf", tmp_path)
    assert copies(tmp_path) == [] and "the disk has 1.00 GiB left" in errors_of(caplog, logging.WARNING)[0]


def test_the_copies_used_longest_ago_make_room(models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    start(models / "mixed.gguf", tmp_path)
    (own,) = copies(tmp_path)
    own.unlink()
    now = time.time()
    for name, size, age in (("a", 700_000, 300), ("b", 700_000, 200), ("c", 200_000, 100), ("d", 1, 40 * 86400)):
        path = tmp_path / f"{name * 32}.packed"
        path.write_bytes(bytes(size))
        os.utime(path, (now - age, now - age))
    for name, age in ((f".{'0' * 32}.tmp", 900), (f".{'1' * 32}.tmp", 10), ("mine.txt", 9000)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - age, now - age))
    limit = (own_bytes := start_size(models, tmp_path)) + 950_000
    start(models / "mixed.gguf", tmp_path, packed_cache_size=limit / 2**30)
    left = {path.name[:6] for path in copies(tmp_path)}
    assert left == {own.name[:6], "bbbbbb", "cccccc", ".11111", "mine.t"}
    assert own.stat().st_size == own_bytes
    # Nothing is removed for a copy that would not fit at all.
    own.unlink()
    start(models / "mixed.gguf", tmp_path, packed_cache_size=(own_bytes - 1) / 2**30)
    assert {path.name[:6] for path in copies(tmp_path)} == left - {own.name[:6]}
    assert any("packed_cache_size is" in message for message in errors_of(caplog, logging.INFO))


def start_size(models: Path, tmp_path: Path) -> int:
    other = tmp_path.parent / f"{tmp_path.name}-other"
    start(models / "mixed.gguf", other)
    return copies(other)[0].stat().st_size


def test_use_counts_as_use(models: Path, tmp_path: Path) -> None:
    start(models / "mixed.gguf", tmp_path)
    (path,) = copies(tmp_path)
    os.utime(path, (1e9, 1e9))
    start(models / "mixed.gguf", tmp_path)
    assert path.stat().st_mtime > 1.1e9


def test_what_changed_while_it_was_loaded_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = iter([bytes(32), bytes(31) + b"1"])
    cache = PackedCache(tmp_path, 2**30, lambda: next(keys), Stub())
    cache.add(StubMatrix())
    cache.keep()
    cache.close()
    assert copies(tmp_path) == [] and "has changed while it was loaded" in caplog.text


def test_the_end_does_not_wait_for_a_slow_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    entered = threading.Event()

    def write(path: Path, key: bytes, matrices: Any, backend: Any, pace: Any) -> None:
        entered.set()
        while True:
            time.sleep(0.001)
            pace(0.001)

    monkeypatch.setattr(packed_file, "write", write)
    monkeypatch.setattr(packed_cache, "EXIT_SECONDS", 0.05)
    cache = PackedCache(tmp_path, 2**30, lambda: bytes(32), Stub())
    cache.add(StubMatrix())
    cache.keep()
    cache.close()
    assert entered.is_set() and "the process ends before they are written" in caplog.text


class StubMatrix:
    nbytes = 64
    data = np.zeros(64, np.uint8)


class Stub:
    """A backend that has nothing to do."""


SCRIPT = """
import sys
from support.engines import make_engine
engine = make_engine(sys.argv[1], packed_cache_dir=sys.argv[2], num_threads=1)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_two_processes_at_once(models: Path, tmp_path: Path) -> None:
    """Both load, both end at the same time without a word to the engine, and both write."""
    tests = Path(__file__).resolve().parent.parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tests), *filter(None, sys.path)))}
    words = [sys.executable, "-c", SCRIPT, str(models / "mixed.gguf"), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(words, env=env, **pipes) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        said = [process.communicate("go\n", timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0] and [err for _, err in said] == ["", ""]
    assert len(copies(tmp_path)) == 1
    assert start(models / "mixed.gguf", tmp_path).is_copy


def test_random_weights_have_no_copy(models: Path, tmp_path: Path) -> None:
    assert not start(models / "bfloat16", tmp_path, load_format="dummy").is_copy
    assert copies(tmp_path) == []


def test_where_copies_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OCTAVO_PACKED_CACHE", "OCTAVO_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/anna")
    assert packed_cache_folder(EngineConfig()) == Path("/home/anna/.cache/octavo/packed")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert packed_cache_folder(EngineConfig()) == Path("/fast/octavo/packed")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "/octavo")
    assert packed_cache_folder(EngineConfig()) == Path("/octavo/packed")
    assert packed_cache_folder(EngineConfig(packed_cache_dir="~/mine")) == Path("/home/anna/mine")
    assert packed_cache_folder(EngineConfig(enable_packed_cache=False, packed_cache_dir="/mine")) is None
    for value in ("0", "off", "False", " no "):
        monkeypatch.setenv("OCTAVO_PACKED_CACHE", value)
        assert packed_cache_folder(EngineConfig()) is None
    assert packed_cache_folder(EngineConfig(packed_cache_dir="/mine")) == Path("/mine")
    with pytest.raises(ConfigError, match="packed_cache_dir is ''"):
        EngineConfig(packed_cache_dir="")
    with pytest.raises(ConfigError, match="packed_cache_size is 0"):
        EngineConfig(packed_cache_size=0)


def test_an_engine_says_where_its_weights_come_from(models: Path, tmp_path: Path) -> None:
    engine: Engine = make_engine(models / "mixed.gguf", packed_cache_dir=str(tmp_path))
    assert engine.info.loading.startswith("packed from the checkpoint in 0.")
    engine.close()
    engine = make_engine(models / "mixed.gguf", packed_cache_dir=str(tmp_path))
    assert engine.info.loading.startswith(f"read from {copies(tmp_path)[0]} in 0.")
