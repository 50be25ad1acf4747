"""What a command made for `vllm serve` comes to with octavo: the model by either name, options that octavo accepts
without effect, those it refuses by name, and the module that vLLM's older commands name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octavo.cli.flags import config_from_args, flag_name
from octavo.cli.serve import parse
from octavo.cli.vllm_options import NO_OPS, NOT_YET
from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError

VLLM = """
    --host 0.0.0.0 --port 80 --api-key k --served-model-name a b --dtype bfloat16 --max-model-len 4096
    --gpu-memory-utilization 0.9 --enable-prefix-caching --no-enable-prefix-caching --enforce-eager
    --tensor-parallel-size 1 --seed 3 --chat-template t.jinja --generation-config vllm --max-num-seqs 64
    --max-num-batched-tokens 1024 --kv-cache-dtype auto --swap-space 4 --max-logprobs 5 --block-size 32
    --trust-remote-code --disable-log-requests --enable-chunked-prefill -O3 -pp 1 --device cpu
    --limit-mm-per-prompt {"image":0} --compilation-config {"level":3} --uvicorn-log-level warning
"""


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_args(parse(list(words)), EngineConfig)
    return caught.value.message


def test_a_long_command_of_vllm_is_taken_as_it_is() -> None:
    args = parse(["org/model", *VLLM.split()])
    engine, server = config_from_args(args, EngineConfig), config_from_args(args, ServerConfig)
    assert (engine.model, engine.max_model_len, engine.swap_space, engine.block_size) == ("org/model", 4096, 4.0, 32)
    assert (engine.enable_prefix_caching, engine.enforce_eager, engine.seed) == (False, True, 3)
    assert (server.host, server.port, server.api_key, server.served_model_name) == ("0.0.0.0", 80, ["k"], ["a", "b"])


@pytest.mark.parametrize("words", [["m"], ["--model", "m"], ["--model=m"], ["m", "--model", "m"]])
def test_the_model_goes_by_either_name(words: list[str]) -> None:
    assert config_from_args(parse(words), EngineConfig).model == "m"


def test_without_a_model_there_is_a_default() -> None:
    assert config_from_args(parse([]), EngineConfig).model == EngineConfig.model


def test_two_models_are_refused() -> None:
    assert refusal("a", "--model", "b") == "MODEL is 'a', but --model is 'b'; one of them is enough"


def test_a_list_does_not_swallow_the_model_in_silence() -> None:
    assert refusal("--api-key", "k", "org/model") == (
        "there is no MODEL; is it a word of `--api-key k org/model`? (MODEL goes first)"
    )


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_what_is_not_there_yet_is_refused_by_name(name: str) -> None:
    for word in (name, name.replace("-", "_").replace("__", "--", 1), f"{name}=x", f"{name}.part"):
        said = refusal("m", word)
        assert said == f"{word.partition('=')[0]} is not supported yet (see `octavo serve --help`)"


def test_no_option_is_both_there_and_not() -> None:
    have = {flag_name(name) for config in (EngineConfig, ServerConfig) for name in config.__dataclass_fields__}
    ignored = [flag for no_op in NO_OPS for flag in no_op.flags]
    assert len(ignored) == len(set(ignored))
    assert not have & NOT_YET and not have & set(ignored) and not NOT_YET & set(ignored)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size is '2'; only 1 is supported yet"),
        (["-dp", "4"], "-dp is '4'; only 1 is supported yet"),
        (["--device", "cuda"], "--device is 'cuda'; only auto, cpu is supported yet"),
        (["-tp", "2"], "--tensor-parallel-size: tensor_parallel_size is 2; only 1 is supported"),
        (["--trust-remote-cod"], "unknown option --trust-remote-cod; did you mean --trust-remote-code? {help}"),
    ],
)
def test_an_effect_that_is_not_there_is_refused(words: list[str], said: str) -> None:
    assert refusal("m", *words) == said.replace("{help}", "(see `octavo serve --help`)")


def test_vllms_module_is_the_same_program() -> None:
    command = [sys.executable, "-m", "octavo.entrypoints.openai.api_server", "--model", "m", "--enable-lora"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "octavo: error: --enable-lora is not supported yet (see `octavo serve --help`)\n"
