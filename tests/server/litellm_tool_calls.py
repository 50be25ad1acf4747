"""What litellm makes of tool calls, as JSON on stdout: by each way of its own, the text, the calls and why it ended.

python litellm_tool_calls.py URL
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

import litellm

from support.tools import CHAT_TOOLS

litellm.suppress_debug_info = True


def told(answer: Any) -> list[Any]:
    (choice,) = answer.choices
    calls = [[call.function.name, json.loads(call.function.arguments)] for call in choice.message.tool_calls]
    return [choice.message.content, calls, choice.finish_reason]


def main(url: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    chat: dict[str, Any] = {"messages": messages, "tools": CHAT_TOOLS, "api_key": "k", "num_retries": 0}
    ways = {
        "openai": {"model": "openai/tiny", "api_base": f"{url}/v1"},
        "hosted_vllm": {"model": "hosted_vllm/tiny", "api_base": f"{url}/v1"},
        "anthropic": {"model": "anthropic/tiny", "api_base": url, "max_tokens": 999},
    }
    answers = {}
    for name, way in ways.items():
        answers[name] = told(litellm.completion(**chat, **way))
        chunks = list(litellm.completion(**chat, **way, stream=True))
        answers[f"{name}, streamed"] = told(litellm.stream_chunk_builder(chunks, messages=messages))
    return answers


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:]), sys.stdout)
