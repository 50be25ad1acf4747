"""What /openapi.json says is what the server does: schemathesis makes calls from the description, right ones and wrong
ones, and compares the answers with it.

More of them: OCTAVO_SCHEMATHESIS=200 pytest tests/server/test_schemathesis.py. A right value may still be refused (the
description does not know the model, nor what one field asks of another); a wrong one may not be taken.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from octavo.server.app import ROUTES
from support.served import ServerProcess

NUM = int(os.environ.get("OCTAVO_SCHEMATHESIS", 4))  # calls of each kind for each operation
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
OPERATIONS = [f"{each.method} {each.path.replace(':path', '')}" for each in ROUTES if each.path != "/live"]  # no end


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    script = str(Path(__file__).with_name("scripted_server.py"))
    flags = ("--enable-responses-store", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    server = ServerProcess("--max-model-len", "64", *flags, program=(sys.executable, script, "0", "0"))
    server.wait_until_ready()
    yield server
    assert "Traceback" not in server.log and "ERROR" not in server.log
    server.close()


@pytest.fixture(scope="module")
def operations(server: ServerProcess) -> dict[str, Any]:
    schema = schemathesis.openapi.from_dict(httpx.get(f"{server.url}/openapi.json").json())
    found = [each.ok() for each in schema.get_all_operations()]
    return {f"{each.method.upper()} {each.path}": each for each in found}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_description_holds(server, operations, name):
    operation = operations[name]
    modes = [GenerationMode.POSITIVE]
    if operation.body:  # an id is any string
        modes.append(GenerationMode.NEGATIVE)
    strategies = [operation.as_strategy(generation_mode=mode) for mode in modes]

    @settings(
        max_examples=NUM * len(modes), derandomize=True, database=None, deadline=None, suppress_health_check=HealthCheck
    )
    @given(case=st.one_of(strategies))
    def call(case: Any) -> None:
        case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=20)

    call()
