"""Flags generated from config.py, and what becomes of their values."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from octavo.cli.flags import add_config_flags, config_from_args, flag_name, parse_count
from octavo.cli.parser import Parser
from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError


def parse(*words: str) -> argparse.Namespace:
    parser = Parser("octavo test", "", "")
    add_config_flags(parser, EngineConfig, "engine")
    add_config_flags(parser, ServerConfig, "server")
    return parser.parse_args(words)


def test_every_field_has_its_flag() -> None:
    parser = Parser("octavo test", "", "")
    add_config_flags(parser, EngineConfig, "engine")
    flags = {option for action in parser._actions for option in action.option_strings}
    for field in dataclasses.fields(EngineConfig):
        assert flag_name(field.name) in flags


def test_without_flags_the_defaults_of_the_dataclass_hold() -> None:
    args = parse()
    assert config_from_args(args, EngineConfig) == EngineConfig()
    assert config_from_args(args, ServerConfig) == ServerConfig()


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--max-model-len", "4096"], "max_model_len", 4096),
        (["--max-model-len=8k"], "max_model_len", 8000),
        (["--max-model-len", "8K"], "max_model_len", 8192),
        (["--max-model-len", "auto"], "max_model_len", "auto"),
        (["--max-model-len", "-1"], "max_model_len", "auto"),
        (["--max_model_len", "7"], "max_model_len", 7),
        (["--kv-cache-memory-bytes", "2GiB"], "kv_cache_memory_bytes", 2 * 2**30),
        (["--kv-cache-memory-bytes", "1.5G"], "kv_cache_memory_bytes", 3 * 2**29),
        (["--max-body-bytes", "500KB"], "max_body_bytes", 500_000),
        (["--max-logprobs", "-1"], "max_logprobs", -1),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--kv-offload-size", "0.5"], "kv_offload_size", 0.5),
        (["--kv-offload-dir", "kv"], "kv_offload_dir", "kv"),
        (["--shutdown-timeout", "1e1"], "shutdown_timeout", 10.0),
        (["--enforce-eager"], "enforce_eager", True),
        (["--enforce-eager", "--no-enforce-eager"], "enforce_eager", False),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--no-prefix-caching"], "enable_prefix_caching", False),
        (["--no-prefix-caching", "--enable-prefix-caching"], "enable_prefix_caching", True),
        (["--api-key", "a", "--api-key", "b,c"], "api_key", ["a", "b", "c"]),
        (["--served-model-name", "x"], "served_model_name", ["x"]),
        (["--served-model-name", "x", "org/y"], "served_model_name", ["x", "org/y"]),
        (["--allowed-origins", '["http://a", "http://b"]'], "allowed_origins", ["http://a", "http://b"]),
        (["-tp", "1"], "tensor_parallel_size", 1),
        (["-q", "int8"], "quantization", "int8"),
        (["--revision", "main"], "revision", "main"),
    ],
)
def test_values(words: list[str], field: str, value: Any) -> None:
    args = parse(*words)
    owner = EngineConfig if hasattr(EngineConfig, field) or field in EngineConfig.__dataclass_fields__ else ServerConfig
    assert getattr(config_from_args(args, owner), field) == value


@pytest.mark.parametrize("text", ["", "x", "1.5", "8q", "1 000", "0x10", "1e3", "inf", "nan", "1.0001k"])
def test_counts_are_whole_numbers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
        parse_count(text)


def test_wrong_value_names_flag_and_field() -> None:
    with pytest.raises(ConfigError, match=r"^--block-size: block_size is 17; it must be a multiple of 16$"):
        config_from_args(parse("--block-size", "17"), EngineConfig)
    with pytest.raises(ConfigError, match="argument --shutdown-timeout: 'soon' is not a number"):
        parse("--shutdown-timeout", "soon")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--api-key", ""], "argument --api-key: it is empty"),
        (["--api-key", " , "], "argument --api-key: it is empty"),
        (["--api-key", "[]"], "argument --api-key: it is empty"),
        (["--allowed-origins", "[1]"], r"argument --allowed-origins: '\[1\]' is not a JSON list of strings"),
        (["--allowed-origins", "[x"], r"argument --allowed-origins: '\[x' is not a JSON list of strings"),
    ],
)
def test_a_list_is_never_empty(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(*words)


def test_values_given_beside_the_flags() -> None:
    assert config_from_args(parse("--seed", "3"), EngineConfig, model="m") == EngineConfig(model="m", seed=3)
