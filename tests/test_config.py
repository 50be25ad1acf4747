"""Options out of range are refused by name, with the value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("num_threads", 0, r"in \[1, 256\]"),
        ("num_threads", 100000, r"in \[1, 256\]"),
        ("max_num_seqs", 0, "at least 1"),
        ("max_num_batched_tokens", True, "an integer"),
        ("max_num_seqs", 1.5, "an integer"),
        ("seed", 2**64, "an integer of at most 64 bits"),
        ("max_model_len", "8k", "an integer of at most 64 bits or a known word"),
        ("enable_prefix_caching", "no", "true or false"),
        ("swap_space", "4", "a number"),
        ("dtype", None, "a text"),
        ("tokenizer", 5, "a text"),
        ("pooler_config", 5, "a text or an object"),
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


def test_a_path_is_a_text():
    config = EngineConfig(model=Path("a/b.gguf"), packed_cache_dir=Path("/c"))
    assert (config.model, config.packed_cache_dir) == ("a/b.gguf", "/c")


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300])
def test_the_grace_of_a_shutdown_is_a_time(seconds):
    with pytest.raises(ConfigError, match=r"shutdown_timeout is .*; it must be in \[0, 604800\]"):
        ServerConfig(shutdown_timeout=seconds)


def test_server_options():
    for wrong in ("key", [5], ("key",)):
        with pytest.raises(ConfigError, match=r"api_key is .*; it must be a list of texts"):
            ServerConfig(api_key=wrong)
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
