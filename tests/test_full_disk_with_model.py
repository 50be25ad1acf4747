"""A disk that is full under the folders of the cache: no request notices, and a start that needs the room says so."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.runtime import block_files
from support.checkpoints import tiny_llama, tiny_tokenizer

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 64, "max_model_len": 128}
PARAMS = SamplingParams(max_tokens=24, seed=3, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), vocab=len(tiny_tokenizer()))


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_full(path: str, mode: str) -> Any:
    """As `open`, but what is written finds no room."""
    open(path, mode).close()
    return open("/dev/full", "wb")


def answers(llm: LLM) -> list[Any]:
    """More prompts than the pool holds, so that blocks are evicted; twice, so that they are looked for."""
    prompts = [[3 + index] * 70 for index in range(6)] * 2
    return [output.outputs for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize(("name", "fault"), [("open", open_full), ("replace", no_room)])
def test_a_full_disk_costs_a_warning(tiny, tmp_path, monkeypatch, caplog, name, fault):
    with LLM(str(tiny), **SMALL) as llm:
        expected = answers(llm)
    monkeypatch.setattr(block_files if name == "open" else os, name, fault, raising=False)
    with LLM(str(tiny), kv_offload_dir=str(tmp_path), kv_offload_size=0.01, **SMALL) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected
    monkeypatch.undo()
    assert caplog.text.count("no KV block is written to disk any more") == 1
    assert not list(tmp_path.rglob("*.kv")) and not list(tmp_path.rglob("*.tmp"))


def test_a_swap_file_without_room_is_known_at_the_start(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(ConfigError, match=r"swap_dir is .*no file of \d+ bytes can be made there \(No space left"):
        LLM(str(tiny), swap_space=0.01, swap_dir=str(tmp_path), **SMALL)
    assert not list(tmp_path.iterdir())
