"""From chat messages to the text of a prompt: a model's Jinja template in a sandbox.

Owns the checks and the plain shape of messages, and the environment that templates expect. It renders what
transformers' `apply_chat_template` renders, except where noted; it knows no HTTP and no engine.
"""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import ChatTemplateError, ConfigError, InvalidRequestError
from octavo.text.messages import plain_messages
from octavo.text.tokenizer import Tokenizer

# Marks the end of the text that the model is to go on with. No blanks in it: a template that trims a message then
# leaves the blanks before it alone.
_END_OF_PREFILL = "<octavo:end-of-prefill>"
_RESERVED = ("messages", "add_generation_prompt", "continue_final_message", "tools")


class ChatTemplate:
    """A compiled template. `name` says in messages where it came from; `special_tokens` (such as `bos_token`) are
    variables in it. Raises ConfigError for a syntax error."""

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "the chat template",
    ) -> None:
        given = {"bos_token": bos_token, "eos_token": eos_token, **(special_tokens or {})}
        self.source = source
        self._special_tokens = {role: token for role, token in given.items() if token is not None}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{name}, line {error.lineno}: {error.message}", param="chat_template") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. `kwargs` are further variables and beat the special tokens.

        With `continue_final_message` the text ends with the last message's content exactly as given, blanks at its end
        too (transformers drops those where the template trims). Raises InvalidRequestError for malformed or
        contradictory input, ChatTemplateError where the template refuses it or fails.
        """
        plain = plain_messages(messages)
        template_variables(kwargs)
        if continue_final_message:
            _check_continuation(plain, add_generation_prompt)
            plain[-1]["content"] += _END_OF_PREFILL
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": plain,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(variables)  # one argument: a variable may be called `self`
        except _Refusal as error:
            raise ChatTemplateError(str(error), param="messages") from None
        except Exception as error:  # a template is a program: it can fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise ChatTemplateError(f"the chat template failed: {reason}", param="messages") from None
        return _cut_at_prefill(text) if continue_final_message else text


def load_chat_template(override: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that `override` gives (a file's path, or the text itself), else the tokenizer's own, else None."""
    if override is None:
        source, name = tokenizer.chat_template, "the model's chat template"
    else:
        source, name = _read_override(override)
    return None if source is None else ChatTemplate(source, special_tokens=tokenizer.special_tokens, name=name)


def require_chat_template(template: ChatTemplate | None) -> ChatTemplate:
    """Raises ChatTemplateError, which says how to give a template, where there is none."""
    if template is None:
        raise ChatTemplateError(
            "this model has no chat template; give one with --chat-template FILE (or LLM's chat_template)"
        )
    return template


def template_variables(chat_template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """A caller's further variables. Raises InvalidRequestError for a name that has an argument of its own."""
    for name in _RESERVED:
        if name in (chat_template_kwargs or ()):
            raise InvalidRequestError(f"chat_template_kwargs must not contain {name!r}", param="chat_template_kwargs")
    return dict(chat_template_kwargs or {})


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a rendered chat. The template alone decides about BOS, as in transformers: none is added."""
    return tokenizer.encode(text, add_special_tokens=False)


def _read_override(override: str) -> tuple[str, str]:
    path = pathlib.Path(override)
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8"), str(path)
    except ValueError as error:  # not UTF-8; or a text that cannot be a path
        if not _looks_like_template(override):
            raise ConfigError(f"chat_template {override!r} cannot be read: {error}", param="chat_template") from None
    except OSError as error:  # a text too long for a path; or a file that may not be read
        if not _looks_like_template(override):
            reason = error.strerror or error
            raise ConfigError(f"chat_template {override!r} cannot be read: {reason}", param="chat_template") from None
    if not _looks_like_template(override):
        raise ConfigError(
            f"chat_template is {override!r}; that is neither a file nor a template's text", param="chat_template"
        )
    return override, "chat_template"


def _looks_like_template(text: str) -> bool:
    return any(mark in text for mark in ("{{", "{%", "{#", "\n"))


def _check_continuation(messages: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt are both true; only one may be",
            param="continue_final_message",
        )
    role = messages[-1]["role"]
    if role != "assistant":
        raise InvalidRequestError(
            f"continue_final_message is true, but the last message's role is {role!r}; it must be 'assistant'",
            param="continue_final_message",
        )


def _cut_at_prefill(text: str) -> str:
    before, mark, _ = text.rpartition(_END_OF_PREFILL)
    if not mark:
        raise ChatTemplateError(
            "the chat template leaves out the last message's content, so it cannot be continued",
            param="continue_final_message",
        )
    return before


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Refusal(jinja2.TemplateError):
    """A template's own `raise_exception`: its message is for the caller."""


class _GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} marks answers for training: here, its content and nothing else."""

    tags = {"generation"}  # noqa: RUF012 - the name and shape that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which no prompt wants."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
