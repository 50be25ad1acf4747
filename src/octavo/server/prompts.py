"""Prompts as the routes of completions and embeddings take them: text or token ids, one or many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.errors import refuse
from octavo.server.generation import encode
from octavo.server.protocol import PROMPT_FORMS

if TYPE_CHECKING:
    from octavo.server.front import Front

MAX_PROMPTS = 2048


@dataclass(slots=True)
class GivenPrompt:
    text: str | None  # None: it came as token ids
    token_ids: list[int]


async def read_prompts(front: Front, name: str, given: Any, *, add_special_tokens: bool) -> list[GivenPrompt]:
    """The prompts in any of the four forms, of the field `name`; which ids are valid is the engine's to say."""
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(each) is int for each in given)):
        given = [given]
    if not isinstance(given, list) or not given:
        refuse(name, given, PROMPT_FORMS + ", not empty")
    if len(given) > MAX_PROMPTS:
        refuse(name, given, f"at most {MAX_PROMPTS} prompts")
    if all(isinstance(each, str) for each in given):
        token_ids = await encode(front, given, add_special_tokens=add_special_tokens)
        return list(map(GivenPrompt, given, token_ids))
    if all(isinstance(each, list) and all(type(token_id) is int for token_id in each) for each in given):
        return [GivenPrompt(None, each) for each in given]
    refuse(name, given, PROMPT_FORMS)
