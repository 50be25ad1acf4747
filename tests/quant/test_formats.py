"""Which format each matrix gets, and which options contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.quant.formats import MatrixFormat, WeightFormats, choose_formats

PLAIN: dict[str, Any] = {"quantization": None, "activation_dtype": "auto", "dtype": "bfloat16"}


def choose(has_blocks: bool = False, variant: str = "x86_v4_bf16", **options: Any) -> WeightFormats:
    return choose_formats(**{**PLAIN, **options}, has_blocks=has_blocks, variant=variant)


def test_plain_weights_keep_their_dtype() -> None:
    for dtype in ("float32", "bfloat16"):
        assert choose(dtype=dtype, variant="x86_v4") == WeightFormats.plain(dtype)
        assert choose(dtype=dtype) == WeightFormats.plain(dtype, compact=dtype == "bfloat16")
        assert choose(dtype=dtype, variant="amx") == WeightFormats.plain(dtype, compact=True)


def test_a_quantised_checkpoint_stays_packed_unless_float32_is_asked_for() -> None:
    assert choose(has_blocks=True).layers == MatrixFormat("int8", "blocks", compact=True)
    assert choose(has_blocks=True, dtype="float32") == WeightFormats.plain("float32")


def test_activations_follow_the_machine_and_then_the_option() -> None:
    amx = MatrixFormat("bfloat16", "blocks", in_halves=True, compact=True)
    assert choose(has_blocks=True, variant="amx").layers == amx
    assert choose(has_blocks=True, variant="x86_v3").layers.dtype == "int8"
    assert choose(has_blocks=True, variant="amx", activation_dtype="int8").layers.dtype == "int8"
    assert choose(has_blocks=True, activation_dtype="bfloat16").layers.dtype == "bfloat16"


def test_quantised_at_load() -> None:
    int8, int4 = choose(quantization="int8", variant="amx"), choose(quantization="int4")
    groups = choose(quantization="int8", activation_dtype="bfloat16")
    assert int8.layers == int8.rest == MatrixFormat("int16", "int8_row")
    assert choose(quantization="int8", activation_dtype="int16", variant="x86_v3") == int8
    assert choose(quantization="int8", variant="x86_v4_bf16").layers == MatrixFormat("int8", "int8", compact=True)
    assert groups.rest == MatrixFormat("bfloat16", "int8", compact=True)
    assert (int4.layers.storage, int4.rest.storage) == ("int4", "int8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8", "has_blocks": True}, "the checkpoint is quantised already"),
        ({"quantization": "int4", "dtype": "float32"}, "need dtype auto or bfloat16"),
        (
            {"activation_dtype": "int8"},
            "activation_dtype is 'int8', but the weights are bfloat16; allowed: auto, bfloat16",
        ),
        ({"activation_dtype": "bfloat16", "dtype": "float32"}, "the weights are float32; allowed: auto$"),
        ({"activation_dtype": "int16"}, "the weights are bfloat16; allowed: auto, bfloat16"),
        ({"activation_dtype": "int16", "has_blocks": True}, "'int16', which goes with quantization 'int8' alone"),
        ({"activation_dtype": "int16", "quantization": "int4"}, "allowed: auto, bfloat16, int8$"),
    ],
)
def test_contradictions(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(**options)


def test_bits() -> None:
    assert MatrixFormat("int8", "blocks").bits("Q4_1") == 5.0
    assert [MatrixFormat("bfloat16", "blocks", halves).bits("Q6_K") for halves in (False, True)] == [10.0, 9.0]
    assert MatrixFormat("int8", "blocks").bits("F16") == 16.0
    assert MatrixFormat("bfloat16", "plain").bits("Q4_1") == 16.0
    assert [MatrixFormat("float32", "plain").bits(type) for type in ("BF16", "F16", "Q4_1")] == [16.0, 32.0, 32.0]
    compact = [MatrixFormat(dtype, "plain", compact=True) for dtype in ("bfloat16", "float32")]
    assert [form.bits("BF16") for form in compact] == [12.2, 12.2]
    assert [form.bits("F16") for form in compact] == [12.2, 32.0]
    assert MatrixFormat("bfloat16", "blocks", True, True).bits("Q4_1") == 5.0
    assert MatrixFormat("int8", "int4").bits("F32") == 5.0
    assert MatrixFormat("bfloat16", "int8").bits("F32") == 8.5
    assert MatrixFormat("int16", "int8_row").bits("F32") == 8.0


def test_names() -> None:
    assert str(MatrixFormat("int16", "int8_row")) == "int8 weights, int16 activations"
    assert str(MatrixFormat("int8", "blocks")) == "packed blocks, int8 activations"
