"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import octavo

HEAVY = {"jinja2", "msgspec", "numpy", "prometheus_client", "rich", "starlette", "tokenizers", "torch", "uvicorn"}


def modules_after(code: str) -> set[str]:
    script = f"import sys; {code}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_importing_octavo_loads_nothing_heavy():
    loaded = modules_after("import octavo")
    assert not loaded & HEAVY
    assert {name for name in loaded if name.startswith("octavo")} == {"octavo"}


def test_making_params_loads_nothing_heavy():
    assert not modules_after("from octavo import SamplingParams; SamplingParams(temperature=0)") & HEAVY
    assert not modules_after("from octavo import EngineConfig, InvalidRequestError; EngineConfig()") & HEAVY


@pytest.mark.parametrize("name", octavo.__all__)
def test_every_name_is_there(name):
    assert getattr(octavo, name) is not None
    assert name in dir(octavo)


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="module 'octavo' has no attribute 'Llm'"):
        octavo.Llm  # noqa: B018


def test_the_version_is_the_projects():
    project = Path(__file__).parents[1] / "pyproject.toml"
    assert octavo.__version__ == tomllib.loads(project.read_text())["project"]["version"]
