"""What callers and servers may ask of an embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import EngineConfig, PoolingParams
from octavo.engine.pooling import PoolingDefaults, decided, pooling_defaults
from octavo.errors import ConfigError, InvalidRequestError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling_type": "cls"}, "pooling_type is 'cls'; it must be one of last, mean"),
        ({"pooling_type": 3}, "pooling_type is 3; it must be one of last, mean"),
        ({"normalize": 1}, "normalize is 1; it must be true or false"),
        ({"use_activation": "yes"}, "use_activation is 'yes'; it must be true or false"),
        ({"normalize": True, "use_activation": False}, "use_activation is False; it must be what normalize is"),
        ({"dimensions": 0}, "dimensions is 0; it must be an integer in [1, 2147483647]"),
        ({"dimensions": True}, "dimensions is True; it must be an integer in [1, 2147483647]"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2; it must be an integer in [-1, 2147483647]"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; it must be -1, or at least 1"),
        ({"task": "score"}, "task is 'score'; it must be 'embed'"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        PoolingParams(**fields)
    assert caught.value.message == message
    assert caught.value.param in fields


def test_normal_forms() -> None:
    params = PoolingParams(pooling_type="MEAN", use_activation=False, task="embed")  # type: ignore[arg-type]
    assert (params.pooling_type, params.normalize) == ("mean", False)


def test_what_is_open_is_decided_by_the_defaults() -> None:
    defaults = PoolingDefaults("mean", normalize=False)
    chosen = decided(None, defaults, 8)
    assert (chosen.pooling_type, chosen.normalize) == ("mean", False)
    chosen = decided(PoolingParams(pooling_type="last", normalize=True, dimensions=8), defaults, 8)
    assert (chosen.pooling_type, chosen.normalize) == ("last", True)
    with pytest.raises(InvalidRequestError, match="dimensions is 4; it must be absent, or 8: this model's"):
        decided(PoolingParams(dimensions=4), defaults, 8)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"pooling_type": "MEAN"}', {"pooling_type": "mean"}),
        ({"seq_pooling_type": "LAST", "normalize": False}, {"pooling_type": "last", "normalize": False}),
        ({"task": "embed", "use_activation": True, "pooling_type": None}, {"normalize": True}),
        ("{}", {}),
    ],
)
def test_a_pooler_config(given: Any, expected: dict[str, Any]) -> None:
    config = EngineConfig(pooler_config=given)
    assert config.pooler_config == expected
    assert EngineConfig(pooler_config=config.pooler_config) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("MEAN", "pooler_config is 'MEAN'; it must be an object such as"),
        ("[1]", "pooler_config is '\\[1\\]'; it must be an object"),
        ('{"pooling_type": "CLS"}', "pooler_config.pooling_type is 'CLS'; it must be one of last, mean"),
        ({"normalize": "no"}, "pooler_config.normalize is 'no'; it must be true or false"),
        ({"dimensions": 3}, "pooler_config has 'dimensions': 3; allowed: pooling_type, normalize"),
        ({"task": "score"}, "pooler_config has 'task': 'score'"),
    ],
)
def test_a_wrong_pooler_config(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig(pooler_config=given)
    assert caught.value.param == "pooler_config"


def sentence_transformers(folder: Path, modules: list[str] | None, **modes: bool) -> Path:
    (folder / "1_Pooling").mkdir()
    config = {"word_embedding_dimension": 64, **{f"pooling_mode_{name}": value for name, value in modes.items()}}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if modules is not None:
        kinds = [{"idx": i, "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(kinds))
    return folder


@pytest.mark.parametrize(
    ("modules", "modes", "expected"),
    [
        (["Transformer", "Pooling", "Normalize"], {"mean_tokens": True, "cls_token": False}, ("mean", True)),
        (["Transformer", "Pooling"], {"lasttoken": True}, ("last", False)),
        (None, {"lasttoken": False, "mean_tokens": True}, ("mean", True)),
    ],
)
def test_a_folder_says_how_it_is_pooled(tmp_path: Path, modules: Any, modes: Any, expected: Any) -> None:
    folder = sentence_transformers(tmp_path, modules, **modes)
    assert pooling_defaults(EngineConfig(), folder) == PoolingDefaults(*expected)
    half = pooling_defaults(EngineConfig(pooler_config={"normalize": not expected[1]}), folder)
    assert half == PoolingDefaults(expected[0], not expected[1])
    whole = pooling_defaults(EngineConfig(pooler_config={"pooling_type": "LAST"}), folder)
    assert whole == PoolingDefaults("last", True)


def test_a_folder_whose_pooling_octavo_does_not_have(tmp_path: Path) -> None:
    folder = sentence_transformers(tmp_path, None, cls_token=True)
    with pytest.raises(ConfigError, match=r"1_Pooling/config.json asks for pooling_mode_cls_token; octavo pools"):
        pooling_defaults(EngineConfig(), folder)
    assert pooling_defaults(EngineConfig(pooler_config={"pooling_type": "MEAN"}), folder) == PoolingDefaults("mean")
    (folder / "1_Pooling" / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no JSON dict"):
        pooling_defaults(EngineConfig(), folder)
    (folder / "1_Pooling" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        pooling_defaults(EngineConfig(), folder)


def test_others_have_the_last_token_normalised(tmp_path: Path) -> None:
    assert pooling_defaults(EngineConfig(), tmp_path) == PoolingDefaults("last", True)
    assert pooling_defaults(EngineConfig(), tmp_path / "model.gguf") == PoolingDefaults("last", True)
