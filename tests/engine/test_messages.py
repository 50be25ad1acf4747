"""What is accepted of a client reaches the engine: whatever a SamplingParams or a BeamSearchParams takes crosses the
wire and comes out as it went in. A record that the engine cannot read would end its process."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.errors import OctavoError
from octavo.request import BeamSearchParams, EngineRequest, SamplingParams

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 128, 0.0, 1.0, 0.5, 2.0, -0.0, 1e-300, 2**31 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(np.int64(1), np.float32(0.5), np.bool_(True), Fraction(1, 2), Decimal(1), 1 + 0j, float("nan"), float("inf")),
    *(
        "",
        "a",
        "never",
        "DELTA",
        "1",
        "\0",
        "😀",
        b"a",
        [],
        [1],
        [True],
        [1.0],
        ["a"],
        [np.int32(1)],
        (1, 2),
        {1},
        range(3),
    ),
    *({}, {1: 1}, {"1": 0.5}, {"1": True}, {1: np.float64(2)}, {True: 1}, [[1]], [["a"]], {"a": 1}, object()),
)
DECODER = msgspec.msgpack.Decoder(EngineRequest)


def crossed(params: SamplingParams, beams: BeamSearchParams | None = None) -> EngineRequest:
    request = EngineRequest(request_id="r", prompt_token_ids=[1], params=params, seed=0, beams=beams)
    return DECODER.decode(msgspec.msgpack.encode(request))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_what_sampling_params_take_crosses_the_wire(name):
    taken = 0
    for value in ODD:
        try:
            params = SamplingParams(**{name: value})
        except OctavoError:
            continue
        taken += 1
        assert crossed(params).params == params, value
    assert taken


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(BeamSearchParams)])
def test_what_beam_search_params_take_crosses_the_wire(name):
    taken = 0
    for value in ODD:
        try:
            beams = BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, name: value})
        except OctavoError:
            continue
        taken += 1
        assert crossed(SamplingParams(), beams).beams == beams, value
    assert taken
