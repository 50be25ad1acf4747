"""Where the API keys come from: options and a file, or else the environment. How they are compared: middleware.py."""

from __future__ import annotations

from octavo.config import ServerConfig, api_key_of_environment
from octavo.errors import ConfigError


def load_keys(config: ServerConfig) -> list[str]:
    """All keys, without repetitions; none: the server is open. Raises ConfigError."""
    keys = [*config.api_key, *(_read(config.api_key_file) if config.api_key_file is not None else [])]
    if not keys and (key := api_key_of_environment()):
        keys = [key]
    return list(dict.fromkeys(keys))


def _read(path: str) -> list[str]:
    """One key a line; blank lines and those that begin with # are none. A file without a key opens no server."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path} cannot be read: {why} (--api-key-file)", param="api_key_file") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path} holds no key (--api-key-file)", param="api_key_file")
    return keys
