"""From chat messages to a prompt's token ids, for all routes that take a conversation. Knows no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.errors import refuse
from octavo.server.generation import encode
from octavo.server.protocol import TemplateFields
from octavo.server.protocol_responses import ResponsesRequest
from octavo.text.chat_template import require_chat_template, template_variables

if TYPE_CHECKING:
    from octavo.server.front import Front


async def chat_prompt(front: Front, asked: TemplateFields, *, add_special_tokens: bool) -> list[int]:
    """Without `add_special_tokens` the template alone decides about BOS.

    Raises ChatTemplateError where there is no template, or where it refuses the messages.
    """
    check_tools(asked)
    return await template_prompt(
        front,
        asked.messages or [],
        add_special_tokens=add_special_tokens,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        **_template_variables(asked),
    )


async def template_prompt(
    front: Front, messages: list[dict[str, Any]], *, add_special_tokens: bool = False, **variables: Any
) -> list[int]:
    """The same for messages in OpenAI's shape and the arguments of `ChatTemplate.render`."""
    text = require_chat_template(front.llm.chat_template).render(messages, **variables)
    (token_ids,) = await encode(front, [text], add_special_tokens=add_special_tokens)
    return token_ids


def check_tools(asked: TemplateFields | ResponsesRequest) -> None:
    """Until octavo can call tools, only a call that asks for none passes."""
    choice = asked.tool_choice
    if choice not in (None, "none", "auto"):
        if not asked.tools and (choice == "required" or isinstance(choice, dict)):
            refuse("tool_choice", choice, "none, auto or null when tools is empty")
        refuse("tool_choice", choice, "none, auto or null (octavo does not support forced tool calls yet)")
    if asked.tools and choice != "none":
        refuse("tools", asked.tools, "empty unless tool_choice is 'none' (octavo does not support tool calls yet)")


def _template_variables(asked: TemplateFields) -> dict[str, Any]:
    variables = template_variables(asked.chat_template_kwargs)
    for name in ("documents", "reasoning_effort"):
        if getattr(asked, name) is not None:
            variables.setdefault(name, getattr(asked, name))
    return variables
