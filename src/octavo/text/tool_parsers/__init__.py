"""The formats in which models call tools, by the names that --tool-call-parser has for them."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.config import TOOL_CALL_PARSERS
from octavo.errors import ConfigError
from octavo.text.tool_parsers.base import ToolParser
from octavo.text.tool_parsers.granite import GraniteParser
from octavo.text.tool_parsers.hermes import HermesParser
from octavo.text.tool_parsers.llama3_json import Llama3JsonParser
from octavo.text.tool_parsers.mistral import MistralParser
from octavo.text.tool_parsers.pythonic import PythonicParser
from octavo.text.tool_parsers.qwen3_xml import Qwen3XmlParser

# In the order in which a template is asked: the more special ones first.
PARSERS: Mapping[str, type[ToolParser]] = {
    "qwen3_xml": Qwen3XmlParser,
    "qwen3_coder": Qwen3XmlParser,
    "mistral": MistralParser,
    "granite": GraniteParser,
    "llama3_json": Llama3JsonParser,
    "hermes": HermesParser,
    "pythonic": PythonicParser,
}


def choose_parser(name: str | None, template: str | None) -> str:
    """`name`, or that of the format which the chat template speaks of. Raises ConfigError where it speaks of none."""
    if name is not None:
        return name
    for found, parser in PARSERS.items():
        if template is not None and parser.fits(template):
            return found
    raise ConfigError(
        "enable_auto_tool_choice needs a tool_call_parser: the model's chat template shows no format of calls that is "
        f"known; allowed: {', '.join(TOOL_CALL_PARSERS)}",
        param="tool_call_parser",
    )
