"""Where the keys of a server come from, and that none of the ways opens it by mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config import ServerConfig
from octavo.errors import ConfigError
from octavo.server.keys import load_keys


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_without_any_the_server_is_open() -> None:
    assert load_keys(ServerConfig()) == []


def test_options_and_file_add_up(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\n  a  \n\nschlüssel\nb")
    assert load_keys(ServerConfig(api_key=["b", "c"], api_key_file=str(path))) == ["b", "c", "a", "schlüssel"]


def test_the_environment_counts_where_no_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "v")
    assert load_keys(ServerConfig()) == ["v"]
    monkeypatch.setenv("OCTAVO_API_KEY", "o")
    assert load_keys(ServerConfig()) == ["o"]
    assert load_keys(ServerConfig(api_key=["k"])) == ["k"]


@pytest.mark.parametrize(("content", "why"), [(b"", "holds no key"), (b"#a\n \n", "holds no key"), (b"\xff", "UTF-8")])
def test_a_file_without_a_key_opens_no_server(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{path} .*{why}"):
        load_keys(ServerConfig(api_key_file=str(path)))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match=f"^{path} cannot be read: No such file or directory"):
        load_keys(ServerConfig(api_key_file=str(path)))
