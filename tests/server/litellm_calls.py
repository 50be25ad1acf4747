"""What litellm makes of a server, as JSON on stdout. A program of its own: litellm takes seconds and 200 MB to import,
and warns a great deal.

python litellm_calls.py URL KEY
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

import litellm

litellm.suppress_debug_info = True

HELLO = [{"role": "user", "content": "Name three colours."}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def error_of(call: Callable[[], Any]) -> list[str]:
    """The names of the exception's classes, and its words."""
    try:
        call()
    except Exception as error:
        return [*(each.__name__ for each in type(error).__mro__), str(error)]
    return []


def main(url: str, key: str) -> dict[str, Any]:
    server: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": key, "num_retries": 0, "max_retries": 0}
    chat: dict[str, Any] = {"model": "openai/smollm2", "messages": HELLO, "max_tokens": 8, "temperature": 0, **server}
    whole = litellm.completion(**chat)
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    choices = litellm.completion(**chat, n=2, logprobs=True, top_logprobs=2).choices
    stopped = litellm.completion(**chat, stop=["e"]).choices[0]
    by_vllm = litellm.completion(**{**chat, "model": "hosted_vllm/smollm2"}, top_k=1, min_p=0.1)
    anthropic = {**chat, "model": "anthropic/smollm2", "api_base": url}
    text = {"prompt": "The sky is", "max_tokens": 4, "temperature": 0, **server}
    responses = litellm.responses(
        model="openai/smollm2", input=HELLO, max_output_tokens=16, temperature=0, api_base=f"{url}/v1", api_key=key
    )
    return {
        "whole": whole.choices[0].message.content,
        "usage": whole.usage.completion_tokens,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "streamed_usage": chunks[-1].usage.completion_tokens,
        "choices": [choice.message.content for choice in choices],
        "top_logprobs": [len(each.top_logprobs) for each in choices[0].logprobs.content],
        "stopped": [stopped.message.content, stopped.finish_reason],
        "by_vllm": by_vllm.choices[0].message.content,
        "by_anthropic": litellm.completion(**anthropic).choices[0].message.content,
        "by_responses": responses.output[0].content[0].text,
        "text": litellm.text_completion(model="text-completion-openai/smollm2", **text).choices[0].text,
        "wrong value": error_of(lambda: litellm.completion(**{**chat, "temperature": -1})),
        "wrong model": error_of(lambda: litellm.completion(**{**chat, "model": "openai/nope"})),
        "wrong key": error_of(lambda: litellm.completion(**{**chat, "api_key": "wrong"})),
        "too long": error_of(lambda: litellm.completion(**{**chat, "max_tokens": 10_000})),
        "tools": error_of(lambda: litellm.completion(**chat, tools=[TOOL])),
        "response_format": error_of(lambda: litellm.completion(**chat, response_format={"type": "json_object"})),
    }


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:]), sys.stdout)
