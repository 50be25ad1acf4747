"""Tools that tests offer, models that call them, and what clients put together from streams."""

from __future__ import annotations

import json
from typing import Any

from octavo.text.chat_template import load_chat_template

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
TIME: dict[str, Any] = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOLS = [{"type": "function", "function": each} for each in (WEATHER, TIME)]
RESPONSE_TOOLS = [{"type": "function", "strict": False, **each} for each in (WEATHER, TIME)]
ANTHROPIC_TOOLS = [
    {"name": each["name"], "description": each.get("description"), "input_schema": each["parameters"]}
    for each in (WEATHER, TIME)
]
FLAGS: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}

BERLIN = '{"city": "Berlin", "days": 2}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {BERLIN}}}\n</tool_call>'
CALLS = f'{CALL}\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>'
TEXT_AND_CALLS = f"I will look.\n{CALLS}"

# Writes all that a template can see of tools.
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "[{{ call.id }} {{ call.function.name }} {% for key, value in call.function.arguments.items() %}"
    "{{ key }}={{ value }} {% endfor %}]"
    "{% endfor %}"
    "{% if m.tool_call_id is defined %}({{ m.tool_call_id }}){% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def use_template(server: Any, template: str = TEMPLATE) -> None:
    server.llm.chat_template = load_chat_template(template, server.tokenizer)


def say(server: Any, text: str) -> None:
    """The model says it, and ends."""
    server.engine.script = lambda request: [*server.tokenizer.encode(text), 2]


def last_prompt(server: Any) -> str:
    return str(server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False))


def joined_choices(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that chunks of a chat are, with their finish reasons; checks what clients rely on."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"content": "", "calls": [], "finish_reason": None})
            assert choice["finish_reason"] is None
            choice["finish_reason"] = piece["finish_reason"]
            choice["content"] += piece["delta"].get("content") or ""
            for call in piece["delta"].get("tool_calls", ()):
                _add_call(choice["calls"], call)
    return [choices[index] for index in sorted(choices)]


def _add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    if delta["index"] == len(calls):
        assert delta["id"] and delta["type"] == "function" and delta["function"]["name"]
        calls.append({"id": delta["id"], "name": delta["function"]["name"], "arguments": ""})
    else:
        assert delta["index"] == len(calls) - 1 and "id" not in delta and "name" not in delta["function"]
    calls[-1]["arguments"] += delta["function"].get("arguments", "")


def whole_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """The same of a whole answer's choice."""
    calls = choice["message"].get("tool_calls", [])
    return {
        "content": choice["message"]["content"] or "",
        "calls": [{"id": call["id"], **call["function"]} for call in calls],
        "finish_reason": choice["finish_reason"],
    }


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    return {**choice, "calls": [(call["name"], call["arguments"]) for call in choice["calls"]]}


def tools_of_size(num_tools: int, num_bytes: int) -> list[dict[str, Any]]:
    """Each about as long as that in JSON."""
    base = {"type": "function", "function": {**WEATHER, "description": ""}}
    filler = "x" * (num_bytes - len(json.dumps(base)) - 4)
    return [
        {"type": "function", "function": {**WEATHER, "name": f"f_{i}", "description": filler}} for i in range(num_tools)
    ]
