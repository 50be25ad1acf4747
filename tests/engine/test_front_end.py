"""What a checkpoint's folder gives to the callers' side."""

from __future__ import annotations

import json

import pytest

from octavo.config import EngineConfig
from octavo.engine.front_end import default_sampling_params, eos_token_ids, load_front_end
from octavo.errors import CheckpointError, ConfigError
from support.checkpoints import tiny_llama, tiny_tokenizer


def test_end_tokens_are_the_union():
    assert eos_token_ids({}, {}, []) == []
    assert eos_token_ids({"eos_token_id": [5, 2]}, {"eos_token_id": 7}, [2, 3]) == [2, 3, 5, 7]
    assert eos_token_ids({"eos_token_id": None}, {"eos_token_id": [1]}, ()) == [1]


def test_defaults_of_the_model():
    given = {"temperature": 0.6, "top_k": 40, "top_p": None, "do_sample": True, "max_new_tokens": 9, "eos_token_id": 2}
    defaults = default_sampling_params(given, "auto")
    assert defaults.values == {"temperature": 0.6, "top_k": 40}
    assert defaults.origin == "the model's generation_config.json"


@pytest.mark.parametrize("mode", ["octavo", "vllm"])
def test_neutral_defaults(mode):
    defaults = default_sampling_params({"temperature": 0.6}, mode)
    assert (defaults.values, defaults.origin) == ({}, f"--generation-config {mode}")


def test_defaults_of_a_folder(tmp_path):
    with pytest.raises(ConfigError, match="must be auto, octavo, vllm or a folder with"):
        default_sampling_params({}, str(tmp_path))
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"top_p": 0.9}))
    defaults = default_sampling_params({"temperature": 0.6}, str(tmp_path))
    assert (defaults.values, defaults.origin) == ({"top_p": 0.9}, str(file))
    file.write_text("{")
    with pytest.raises(ConfigError, match="generation_config is"):
        default_sampling_params({}, str(tmp_path))


def test_defaults_out_of_range_stop_the_start():
    with pytest.raises(
        ConfigError, match=r"generation_config\.json: top_p is 3; .*--generation-config octavo ignores it"
    ):
        default_sampling_params({"top_p": 3}, "auto")


def test_a_folder(tmp_path):
    tiny_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2], "temperature": 0.5}))
    front_end = load_front_end(EngineConfig(model=str(tmp_path)))
    assert front_end.tokenizer.encode("Hello world") == tiny_tokenizer().encode("Hello world")
    assert front_end.eos_token_ids == [0, 2]
    assert front_end.model_config["architectures"] == ["LlamaForCausalLM"]
    assert front_end.sampling_defaults.values == {"temperature": 0.5}
    assert front_end.chat_template is not None
    text = front_end.chat_template.render([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_tokenizer_and_a_template_of_ones_own(tmp_path):
    tiny_llama(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError):
        load_front_end(EngineConfig(model=str(tmp_path / "model")))
    config = EngineConfig(
        model=str(tmp_path / "model"), tokenizer=str(tmp_path / "other"), chat_template="{{ messages[0]['content'] }}!"
    )
    front_end = load_front_end(config)
    assert front_end.chat_template is not None
    assert front_end.chat_template.render([{"role": "user", "content": "hi"}]) == "hi!"


def test_no_such_model():
    with pytest.raises(CheckpointError, match="no such folder or file"):
        load_front_end(EngineConfig(model="/no/such/folder"))
