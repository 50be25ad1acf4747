"""`--config FILE.yaml`: options from a file, one key for each, named as on the command line but for the dashes.

model: smollm2
max-model-len: 8192
enable-prefix-caching: false
served-model-name: [small, smollm2]

Every entry goes through the parser of the command line, so that names, values and complaints are the same; a complaint
names the file and the line.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from octavo.cli.flags import JSON
from octavo.cli.parser import Parser
from octavo.cli.vllm_options import ANY_VALUE
from octavo.errors import ConfigError

_TRUE = ("true", "yes", "on")


def read_config_file(path: str, parser: Parser) -> argparse.Namespace:
    """The options that the file gives. Raises ConfigError."""
    options, lines = argparse.Namespace(), dict[str, int]()
    for key, value in _entries(path):
        name, line = key.value.replace("_", "-"), key.start_mark.line + 1
        try:
            if name == "config":
                raise ConfigError("a config file names no other")
            if name in lines:
                raise ConfigError(f"{name} stands in line {lines[name]} already")
            lines[name] = line
            parser.parse_args(_words(name, value, parser), options)
        except ConfigError as error:
            raise ConfigError(f"{path}:{line}: {error.message}", param=error.param) from None
    return options


def _entries(path: str) -> list[tuple[Any, Any]]:
    """The keys and values as YAML nodes, which know their text as written and their place."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror}", param="config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = path if mark is None else f"{path}:{mark.line + 1}"
        raise ConfigError(f"{place}: {getattr(error, 'problem', None) or error}", param="config") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode) or not all(isinstance(key, yaml.ScalarNode) for key, _ in root.value):
        raise ConfigError(f"{path}: options must be lines of the form `name: value`", param="config")
    return list(root.value)


def _words(name: str, value: Any, parser: Parser) -> list[str]:
    """An entry as words of a command line; null is as if it were not there."""
    flag = f"--{name}"
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9.-]*", name):
        raise ConfigError(f"unknown option {name!r}")
    action = parser.option(flag)
    if value.tag.endswith(":null"):
        return []
    if action.nargs == 0:
        if not value.tag.endswith(":bool"):
            raise ConfigError(f"{flag}: {_shown(value)}; it must be true or false")
        if value.value.lower() in _TRUE:
            return [flag]
        return [no] if (no := f"--no-{name}") in action.option_strings else []
    if value.id == "sequence" and action.nargs == "+" and all(item.id == "scalar" for item in value.value):
        return [f"{flag}={item.value}" for item in value.value] or [f"{flag}="]
    if value.id == "mapping" and action.metavar in (JSON, ANY_VALUE):
        return [f"{flag}={json.dumps(_object(value))}"]
    if value.id != "scalar":
        raise ConfigError(f"{flag}: {_shown(value)}; it must be one value{' or a list' * (action.nargs == '+')}")
    return [f"{flag}={value.value}"]


def _object(node: Any) -> Any:
    """Of an option that is JSON on the command line, what the file says in its own way."""
    from yaml.constructor import SafeConstructor

    return SafeConstructor().construct_document(node)


def _shown(node: Any) -> str:
    return repr(node.value) if node.id == "scalar" else f"a {node.id}"
