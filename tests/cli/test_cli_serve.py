"""`octavo serve` on checkpoints and options that cannot be served: one line, an exit code, and nobody was answered."""

from __future__ import annotations

import re
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from support.checkpoints import tiny_llama
from support.served import ServerProcess


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, and in shards."""
    return tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192, max_shard_size=100_000)


@pytest.fixture
def serve(tiny: Path) -> Iterator[Callable[..., ServerProcess]]:
    servers: list[ServerProcess] = []

    def start(model: Path = tiny, *options: str) -> ServerProcess:
        servers.append(ServerProcess(str(model), *options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def single_file(folder: Path, source: Path, without: str = "") -> Path:
    """A copy of `source` with all tensors, but one, in one file."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {
        name: tensor for path in sorted(source.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }
    tensors.pop(without, None)
    save_file(tensors, folder / "model.safetensors")
    return folder


def refusal(server: ServerProcess, code: int) -> str:
    """The one line that `server` ends with. A client that comes meanwhile gets no answer at all."""
    while server.process.poll() is None:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health", timeout=30)
        time.sleep(0.02)
    assert server.end() == code, server.log
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port)).close()
    (line,) = server.lines
    assert line.startswith("octavo: error: ")
    return line


def test_load_2_an_untied_model_without_lm_head(serve, tiny, tmp_path):
    folder = single_file(tmp_path / "model", tiny, without="lm_head.weight")
    assert "lacks lm_head.weight" in refusal(serve(folder), 1)


def test_load_3_a_missing_shard_is_named(serve, tiny, tmp_path):
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.unlink()
    assert f"{victim.name} is missing" in refusal(serve(folder), 1)


@pytest.mark.parametrize(
    ("start_of_file", "said"),
    [
        (struct.pack("<Q", 2**60) + b"{}", f"the header is said to have {2**60} bytes"),
        (struct.pack("<Q", 8) + b"{garbage", "the header is not a safetensors header"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "the header is not a safetensors header"),
    ],
    ids=["length", "garbage", "depth"],
)
def test_load_4_a_broken_header_is_a_clean_error(serve, tiny, tmp_path, start_of_file, said):
    folder = single_file(tmp_path / "model", tiny)
    (folder / "model.safetensors").write_bytes(start_of_file)
    line = refusal(serve(folder), 1)
    assert said in line and "model.safetensors" in line


def test_ops_4_a_context_that_does_not_fit_is_refused_with_one_that_does(serve, tiny):
    few = ("--kv-cache-memory-bytes", "64KiB", "--max-model-len")
    line = refusal(serve(tiny, *few, "8192"), 2)
    fits = re.fullmatch(
        r"octavo: error: max_model_len is 8192: its KV cache needs (\d+\.\d) MiB, but (\d+\.\d) MiB are available for "
        r"it; the longest that fits is (\d+) tokens .*\n",
        line,
    )
    assert fits and float(fits[1]) > float(fits[2])
    server = serve(tiny, *few, "auto")
    server.wait_until_ready()
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert model["max_model_len"] == int(fits[3]) < 8192
    body = {"prompt": [5] * (int(fits[3]) - 1), "max_tokens": 1}
    server.complete(**body)
