"""`--config FILE.yaml`: the same options as on the command line, which beats it; complaints name file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.cli.flags import config_from_args
from octavo.cli.serve import parse
from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError


def configs(path: Path, text: str, *words: str) -> tuple[EngineConfig, ServerConfig]:
    path.write_text(text, encoding="utf-8")
    args = parse([*words, "--config", str(path)])
    return config_from_args(args, EngineConfig), config_from_args(args, ServerConfig)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("model: org/model", "model", "org/model"),
        ("max-model-len: 8K", "max_model_len", 8192),
        ("max_model_len: 4096", "max_model_len", 4096),
        ("max-model-len: auto", "max_model_len", "auto"),
        ("enable-prefix-caching: false", "enable_prefix_caching", False),
        ("no-enable-prefix-caching: true", "enable_prefix_caching", False),
        ("enforce-eager: yes", "enforce_eager", True),
        ("gpu-memory-utilization: 0.5", "gpu_memory_utilization", 0.5),
        ("revision: 1.10", "revision", "1.10"),
        ("revision: null", "revision", None),
        ("chat-template: |\n  {{ a }}\n  {{ b }}", "chat_template", "{{ a }}\n{{ b }}"),
        ("served-model-name: a", "served_model_name", ["a"]),
        ("served-model-name: [a, org/b]", "served_model_name", ["a", "org/b"]),
        ("api-key:\n- k1\n- k2", "api_key", ["k1", "k2"]),
        ("trust-remote-code: true\ncompilation-config: 3", "model", "smollm2"),
        ("pooler-config: {pooling_type: MEAN}", "pooler_config", {"pooling_type": "mean"}),
        ("pooler-config:\n  normalize: no", "pooler_config", {"normalize": False}),
        ("pooler-config: '{\"normalize\": false}'", "pooler_config", {"normalize": False}),
        ("compilation-config: {level: 3, cache: false}", "model", "smollm2"),
        ("trust-remote-code: false", "model", "smollm2"),
        ("", "model", "smollm2"),
        ("# nothing\n", "model", "smollm2"),
    ],
)
def test_values(tmp_path: Path, text: str, field: str, value: Any) -> None:
    engine, server = configs(tmp_path / "c.yaml", text)
    assert getattr(engine if hasattr(engine, field) else server, field) == value


def test_the_command_line_beats_the_file(tmp_path: Path) -> None:
    text = "model: a\nseed: 1\nport: 1\nserved-model-name: [x, y]\nenforce-eager: true\n"
    path = tmp_path / "c.yaml"
    assert configs(path, text)[1].served_model_name == ["x", "y"]
    engine, server = configs(path, text, "b", "--seed=2", "--served-model-name", "z", "--no-enforce-eager")
    assert (engine.model, engine.seed, engine.enforce_eager) == ("b", 2, False)
    assert (server.served_model_name, server.port) == (["z"], 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "seed: 1\n\nmax-modl-len: 3",
            ":3: unknown option --max-modl-len; did you mean --max-model-len? (see `octavo serve --help`)",
        ),
        ("enable-lora: true", ":1: --enable-lora is not supported yet (see `octavo serve --help`)"),
        ("speculative-config:\n  method: ngram", ":1: --speculative-config is not supported yet (see `octavo serve"),
        ("port: x", ":1: argument --port: 'x' is not a whole number (such as 4096, 8k or 2GiB) (see"),
        ("port: [1, 2]", ":1: --port: a sequence; it must be one value"),
        ("api-key: {a: b}", ":1: --api-key: a mapping; it must be one value or a list"),
        ("pooler-config: [MEAN]", ":1: --pooler-config: a sequence; it must be one value"),
        ("api-key: []", ":1: argument --api-key: it is empty (see"),
        ("enforce-eager: 1", ":1: --enforce-eager: '1'; it must be true or false"),
        ("seed: 1\nseed: 2", ":2: seed stands in line 1 already"),
        ("config: other.yaml", ":1: a config file names no other"),
        ("--seed: 1", ":1: unknown option '--seed'"),
        ("pipeline-parallel-size: 2", ":1: --pipeline-parallel-size is '2'; only 1 is supported yet"),
        ("- seed", ": options must be lines of the form `name: value`"),
        ("seed: [1", ":1: "),
        ("seed: 1\n  x: y: z", ":2: mapping values are not allowed here"),
    ],
)
def test_complaints_name_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "c.yaml"
    with pytest.raises(ConfigError) as caught:
        configs(path, text)
    assert caught.value.message.startswith(f"{path}{said}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(ConfigError, match=f"^--config: {path} cannot be read: No such file or directory$"):
        parse(["--config", str(path)])
