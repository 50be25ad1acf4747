"""From chat messages to a prompt's token ids, for all routes that take a conversation. Knows no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.errors import ContextLengthError
from octavo.server.generation import beside, encode
from octavo.server.protocol import TemplateFields
from octavo.server.tools import NO_TOOLS, Tools
from octavo.text.chat_template import require_chat_template, template_variables

if TYPE_CHECKING:
    from octavo.server.front import Front


MANY_PARTS = 256  # messages and parts: from here on, a template takes milliseconds and leaves the event loop
MIN_MAX_PARTS = 4096  # as many are always allowed; more, where the context has a token for each


async def chat_prompt(front: Front, asked: TemplateFields, tools: Tools, *, add_special_tokens: bool) -> list[int]:
    """Without `add_special_tokens` the template alone decides about BOS.

    Raises ChatTemplateError where there is no template, or where it refuses the messages.
    """
    return await template_prompt(
        front,
        asked.messages or [],
        _template_variables(asked),
        tools=tools,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        add_special_tokens=add_special_tokens,
    )


async def template_prompt(
    front: Front,
    messages: list[dict[str, Any]],
    variables: Mapping[str, Any],
    *,
    tools: Tools = NO_TOOLS,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
) -> list[int]:
    """The same for messages in OpenAI's shape. `variables` are the template's further ones: a client names them, so
    that none of them may become an argument of ours."""
    template = require_chat_template(front.llm.chat_template)
    render = partial(
        template.render,
        messages,
        tools=tools.shown or None,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **variables,
    )
    text = await beside(render, is_long=is_long(front, messages) or tools.are_many)
    (token_ids,) = await encode(front, [text], add_special_tokens=add_special_tokens)
    return token_ids


def is_long(front: Front, messages: Sequence[Any], param: str = "messages") -> bool:
    """Whether so many messages and parts are better read beside the event loop. Raises ContextLengthError where the
    context has no room for as many, before anything is done with them."""
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    count = len(messages) + sum(len(content) for content in contents if isinstance(content, list))
    limit = max(MIN_MAX_PARTS, front.llm.info.max_model_len)
    if count > limit:
        raise ContextLengthError(f"{param} has {count} messages and parts; at most {limit} are allowed", param=param)
    return count >= MANY_PARTS


def _template_variables(asked: TemplateFields) -> dict[str, Any]:
    variables = template_variables(asked.chat_template_kwargs)
    for name in ("documents", "reasoning_effort"):
        if getattr(asked, name) is not None:
            variables.setdefault(name, getattr(asked, name))
    return variables
