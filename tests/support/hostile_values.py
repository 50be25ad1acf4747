"""What hostile requests are made of: calls of every route that are in order, and values, names, headers and paths that
are not."""

from __future__ import annotations

from typing import Any

ANY_ID = 5  # a token of every tokenizer
HELLO = [{"role": "user", "content": "Hello"}]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "description": "a", "parameters": {"type": "object"}}}
FLAT_TOOL = {"type": "function", "name": "add", "strict": True, "parameters": {"type": "object"}}
ANTHROPIC_TOOL = {"name": "add", "description": "a", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "2"}], "is_error": False}


class Raw(str):
    """A piece of JSON, or of what is none, that goes into a body as it is."""


# Small answers: what a mutation does not touch is not to cost time.
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 3, "temperature": 0}),
    ("/v1/completions", {"prompt": [ANY_ID, 6, 7], "max_tokens": 2, "seed": 1, "n": 2, "best_of": 2}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "stream": True, "echo": True, "logprobs": 2}),
    (
        "/v1/completions",
        {
            "prompt": [[ANY_ID], [6, 7]],
            "max_tokens": 4,
            "stop": ["e", "zz"],
            "stop_token_ids": [9],
            "min_tokens": 1,
            "logit_bias": {"5": 1.5},
            "bad_words": ["one"],
            "top_p": 0.9,
            "top_k": 8,
            "min_p": 0.1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.1,
            "prompt_logprobs": 1,
            "truncate_prompt_tokens": 2,
            "ignore_eos": True,
            "cache_salt": "s",
            "user": "u",
            "priority": 0,
            "return_token_ids": True,
            "timings": True,
        },
    ),
    (
        "/v1/completions",
        {"prompt": "b", "use_beam_search": True, "n": 2, "beam_width": 3, "max_tokens": 3, "early_stopping": "never"},
    ),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 3, "temperature": 0.5, "seed": 3}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "system", "content": "Be kind."}, *HELLO],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 3,
            "logprobs": True,
            "top_logprobs": 3,
            "stop": "x",
            "n": 2,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "2"},
            ],
            "tools": [TOOL],
            "tool_choice": "none",
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "low",
            "response_format": {"type": "text"},
            "max_tokens": 2,
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": HELLO, "tools": [TOOL, TOOL], "tool_choice": "auto", "parallel_tool_calls": False, "n": 2},
    ),
    ("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL], "stream": True, "max_tokens": 60}),
    (
        "/v1/chat/completions",
        {"messages": HELLO, "use_beam_search": True, "beam_width": 2, "length_penalty": 0.5, "max_tokens": 2},
    ),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 3, "metadata": {"a": "b"}, "instructions": "Be kind."}),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "developer", "content": "a"},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
                {"role": "user", "content": "d"},
            ],
            "max_output_tokens": 2,
            "stream": True,
            "text": {"format": {"type": "text"}},
            "tools": [],
            "tool_choice": "auto",
            "store": False,
            "include": [],
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "a"},
                {"type": "reasoning", "summary": []},
                {"type": "function_call", "call_id": "c", "name": "add", "namespace": "n", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "b"}]},
            ],
            "tools": [FLAT_TOOL, {"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [FLAT_TOOL]}],
            "parallel_tool_calls": True,
            "stream": True,
            "max_output_tokens": 40,
        },
    ),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 3, "system": "Be kind.", "temperature": 0.5}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 1, "store": True, "previous_response_id": "resp_1"}),
    ("/v1/responses/resp_1/cancel", {}),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": None}]}],
            "system": [{"type": "text", "text": "b"}],
            "max_tokens": 2,
            "stream": True,
            "stop_sequences": ["x"],
            "metadata": {"user_id": "u"},
            "top_k": 5,
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [*HELLO, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}],
            "tools": [ANTHROPIC_TOOL],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "max_tokens": 40,
            "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"messages": HELLO, "tools": [ANTHROPIC_TOOL]}),
    ("/v1/messages/count_tokens", {"messages": HELLO, "system": "a", "tool_choice": {"type": "none"}}),
    ("/tokenize", {"prompt": "Hello", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": HELLO, "add_generation_prompt": False, "continue_final_message": False}),
    ("/detokenize", {"tokens": [ANY_ID, 6, 7]}),
    ("/abort_requests", {"request_ids": ["cmpl-1", "x"]}),
    ("/reset_prefix_cache", {}),
)
READS = (
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/",
    "/docs",
    "/openapi.json",
    "/v1/models",
    "/v1/models/tiny",
    "/v1/responses/resp_1",
)

DEPTH = 200
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 128, 129, 0.5, -0.5, 1.5, 1e-38, 5e-324, 1e308, -1e308),
    *(2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**30),
    *(Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("-0"), Raw("-0.0"), Raw("1e-999"), Raw("01")),
    *(Raw("9" * 310), Raw("-" + "9" * 400), Raw("1" * 5000), Raw("0." + "1" * 5000), Raw("+1"), Raw("0x1"), Raw("1_0")),
    *("", "a", "7", "0.5", "true", "null", "x" * 129, "x" * 2000, "\0", "a\0b", "\n", "\u2028", "\ufeff", "\uffff"),
    *("😀👩‍👩‍👧‍👦🇨🇭日本語歪✅ď", "א\u0301\u202e", "<|im_end|>", "{{ 7*7 }}", "{% raw %}", "../../etc/passwd", "$ref"),
    *("user", "assistant", "system", "tool", "refused", "text", "none", "auto", "required", "json_object", "message"),
    *(Raw('"\\ud83d"'), Raw('"\\udc00\\ud83d"'), Raw('"\\x41"'), Raw("'a'"), Raw('"a\tb"'), Raw('"\\u0000"'), Raw('"')),
    *([], {}, [[]], [{}], [None], [""], {"": None}, {"a": {"a": {}}}, ["a", 1], [1, "a"], [True], [[1], "a"], [0.5]),
    *([-1], [ANY_ID], [2**31], [2**63], [10**30], [[-1]], [ANY_ID] * 5000, ["a"] * 100, ["a"] * 3000, [HELLO[0]] * 200),
    *({"type": "text"}, {"type": "json_object"}, {"type": "function", "function": {"name": "add"}}, {"type": []}),
    *({str(i): 1 for i in range(400)}, {"5": 100}, {"-1": 1}, {"5": 101}, {"5": None}, {"١": 1}, {"5e0": 1}),
    *(Raw("[" * DEPTH + "]" * DEPTH), Raw('{"a":' * DEPTH + "1" + "}" * DEPTH), Raw("[" * 3000), Raw("")),
    *([{"type": "text", "text": "a"}], [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]),
    *(
        [{"type": "text", "text": 7}],
        [{"role": "user"}],
        [{"role": 7, "content": "a"}],
        [{"role": "user", "content": {}}],
    ),
)
ODD_NAMES = (
    *("", "x", "X" * 3000, "\0", "temprature", "__class__", "__proto__", "self", "front", "messages ", "Prompt"),
    *("model", "stream", "n", "user", "add_special_tokens", "documents", "scope", "body", "params", "a.b", "sampling"),
)
CONTENT_TYPES = (
    b"",
    b"text/plain",
    b"application/json; charset=utf-16",
    b"APPLICATION/JSON;",
    b"application/jsonp",
    b"multipart/form-data; boundary=x",
    b"application/x-www-form-urlencoded",
    b"\xff\xfe",
    b"a" * 5000,
)
WEBSOCKET = b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: eA==\r\nsec-websocket-version: 13\r\n"
HEADERS = (
    b"x-request-id: " + b"r" * 200 + b"\r\n",
    b"x-request-id: \xff\xe9 \t;\r\n",
    b"x-request-id: \r\n",
    b"authorization: Bearer \xff\r\n",
    b"content-encoding: gzip\r\n",
    b"content-encoding: deflate, br\r\n",
    b"accept: text/html\r\naccept-encoding: \xff\r\n",
    b"expect: 100-continue\r\n",
    b"a: b\r\n" * 240,
    b"host: \r\n",
    b"host: a\r\nhost: b\r\n",
    b"cookie: " + b"c" * 30_000 + b"\r\n",
    WEBSOCKET,
    b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: \r\n",
    b"origin: http://evil\r\naccess-control-request-method: POST\r\n",
    b"x-forwarded-for: 1.1.1.1\r\nx-forwarded-proto: gopher\r\nforwarded: for=x\r\n",
    b"range: bytes=0-1\r\nif-none-match: *\r\n",
    b"traceparent: 00-zz-zz-01\r\ntracestate: \xff\r\n",
    b"x-http-method-override: DELETE\r\n",
)
PATHS = (
    "/v1/models/%ff%fe",
    "/v1/models/%ed%a0%bd",
    "/v1/models/" + "x" * 5000,
    "/v1/models/..%2f",
    "/v1/models/%0d%0aa:b",
    "/%2e%2e/health",
    "/metrics?x=" + "y" * 1000,
    "/v1//models",
    "http://other/v1/completions",
    *(f"{{path}}{end}" for end in ("/", "?a=b&a", "%00", "/..", "#x", "%zz")),
    "/{path}",
)

# Of fields that have a range: what is at its ends or beside them.
PLAUSIBLE: dict[str, tuple[Any, ...]] = {
    "prompt": ("Hello", "", "😀", [5], [0, 1, 2], ["a", "b"], [[5], [5]], ["a"] * 9, [[5] * 40], "a " * 60, [[5], []]),
    "input": ("Hello", "", HELLO, [*HELLO, *HELLO], [{"role": "assistant", "content": []}]),
    "messages": (HELLO, [*HELLO, *HELLO], [*HELLO, {"role": "assistant", "content": "My guess "}], HELLO * 9),
    "content": ("", "a", "😀" * 9, "a" * 5000, [], [{"type": "text", "text": ""}], None),
    "tools": (
        *([], [TOOL], [{}], [FLAT_TOOL], [ANTHROPIC_TOOL]),
        *([TOOL] * 60, [TOOL] * 1025, [{"type": "local_shell"}]),
    ),
    "tool_choice": ("none", "auto", None, {"type": "none"}, {"type": "auto"}, {"type": "any"}),
    "tool_calls": ([CALL], [CALL] * 9, [{**CALL, "function": {"name": "add", "arguments": "["}}]),
    "arguments": ("{}", "", "[]", '{"a": 1e999}', "{" * 500, {}, '{"\\ud83d": 1}'),
    "name": ("add", "f" * 128, "f" * 129, "a b", "n__add"),
    "parameters": ({"type": "object"}, {"properties": {"a": {"type": ["string", 7]}}}, {"properties": []}),
    "parallel_tool_calls": (True, False),
    "role": ("user", "assistant", "system", "tool", "developer"),
    "n": (1, 2, 3, 8, 128),
    "best_of": (1, 2, 3),
    "max_tokens": (0, 1, 2, 5, 40, 63, 64, 10_000, None),
    "max_completion_tokens": (1, 2, 5, 64, None),
    "max_output_tokens": (1, 2, 5, 64, None),
    "min_tokens": (0, 1, 2, 3, 40),
    "temperature": (0, 1e-6, 1e-3, 0.7, 1, 2, 100),
    "top_p": (0, 1e-9, 0.5, 1),
    "top_k": (-1, 0, 1, 2, 10**6, 2**31 - 1),
    "min_p": (0, 0.5, 1),
    "seed": (-1, 0, 2**64 - 1, -(2**63)),
    "stop": ("e", ["e", "o"], ["a" * 1024] * 64, " ", ["\n"], [], "😀", "\0"),
    "stop_sequences": (["e"], ["e", "o"], [" "], []),
    "stop_token_ids": ([5], list(range(13)), []),
    "bad_words": (["a"], ["one two", " one"], ["a"] * 1024, ["a" * 1024], [" "]),
    "logit_bias": ({"5": -100, "6": 100}, {str(i): -100 for i in range(12)}, {}, {"000005": 1}),
    "allowed_token_ids": ([5], [2], list(range(13)), [5, 5]),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-3, 0.5, 2, 100),
    "logprobs": (0, 1, 20, True, False),
    "top_logprobs": (0, 1, 20),
    "prompt_logprobs": (0, 1, 20, -1),
    "truncate_prompt_tokens": (-1, 1, 2, 63, 64),
    "beam_width": (1, 2, 5, 128, 129),
    "length_penalty": (0, -1, 2, 1000),
    "early_stopping": (True, False, "never", 1, 0.0),
    "use_beam_search": (True,),
    "ignore_eos": (True,),
    "echo": (True,),
    "stream": (True, False),
    "stream_options": ({}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}),
    "skip_special_tokens": (False,),
    "spaces_between_special_tokens": (False,),
    "include_stop_str_in_output": (True,),
    "add_special_tokens": (True, False),
    "return_token_ids": (True,),
    "return_tokens_as_token_ids": (True,),
    "timings": (True,),
    "cache_salt": ("a", "b", "😀"),
    "request_id": ("r", "r" * 128, "\n", "😀"),
    "user": ("u", "", "u" * 5000),
    "continue_final_message": (True,),
    "add_generation_prompt": (False,),
    "chat_template_kwargs": ({}, {"a": 1}, {"bos_token": 7}, {"front": 1, "self": 2, "add_special_tokens": True}),
    "documents": ([], [{"title": "a", "text": "b"}]),
    "reasoning_effort": ("low", ""),
    "tokens": ([], [5], [0, 1, 2], [12] * 999),
    "request_ids": ([], ["r"], ["r"] * 999),
    "metadata": ({}, {"a": "b"}, {"a": 10**30}, {"user_id": "u"}, {"a": {"a": [1e308]}}),
}
