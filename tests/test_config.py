"""Options out of range are refused by name, with the value and what is allowed."""

from __future__ import annotations

import pytest

from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("num_threads", 0, r"in \[1, 256\]"),
        ("num_threads", 100000, r"in \[1, 256\]"),
        ("max_num_seqs", 0, "at least 1"),
        ("max_num_batched_tokens", True, "at least 1"),
        ("gpu_memory_utilization", 1.5, r"in \[0.01, 1.0\]"),
        ("engine_timeout", -1, r"in \[0, 604800\]"),
        ("block_size", 24, "a multiple of 16"),
        ("dtype", "int4", "allowed: auto, float32"),
        ("tensor_parallel_size", 2, "only 1 is supported"),
        ("quantization", "awq", "int8, int4"),
        ("activation_dtype", "fp8", "auto, bfloat16, int8, int16"),
        ("kv_offload_size", 0, r"in \[0.001, 1048576\]"),
        ("kv_offload_size", float("inf"), r"in \[0.001, 1048576\]"),
        ("kv_offload_size", float("nan"), r"in \[0.001, 1048576\]"),
        ("kv_offload_dir", "", "name a folder"),
    ],
)
def test_engine_options(option, value, allowed):
    with pytest.raises(ConfigError, match=f"{option} is {value!r}.*{allowed}") as error:
        EngineConfig(**{option: value})
    assert error.value.param == option


def test_blocks_are_kept_on_disk_only_for_the_prefix_cache():
    with pytest.raises(ConfigError, match="kv_offload_dir is 'kv', but without enable_prefix_caching"):
        EngineConfig(kv_offload_dir="kv", enable_prefix_caching=False)


def test_server_options():
    with pytest.raises(ConfigError, match=r"port is 70000; it must be in \[0, 65535\]"):
        ServerConfig(port=70000)
    with pytest.raises(ConfigError, match=r"ssl_keyfile is 'key\.pem', but there is no ssl_certfile"):
        ServerConfig(ssl_keyfile="key.pem")
    for root_path in ("llm", "/llm/", "/"):
        with pytest.raises(ConfigError, match=f"root_path is '{root_path}'; it must begin, and not end, with a slash"):
            ServerConfig(root_path=root_path)


@pytest.mark.parametrize("keys", [[""], ["key", " "], ["key", ""]])
def test_an_empty_key_opens_no_server(keys):
    with pytest.raises(ConfigError, match="api_key has an empty key"):
        ServerConfig(api_key=keys)
