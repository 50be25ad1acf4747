"""The bodies that the routes take: every field of OpenAI's and vLLM's that octavo knows, by what it does with it.

A field stands in one of four places: as a dataclass field (read by the route), in SAMPLING (passed on to
SamplingParams, which checks it), in NO_OPS (accepted, no meaning here), in LATER (refused unless its value asks
nothing). All else is unknown. Anthropic's routes and the Responses API have files of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from octavo.server.fields import (
    Record,
    anything,
    boolean,
    integer,
    list_of,
    mapping,
    short_string,
    string,
    wire,
)
from octavo.server.protocol_tools import tool_list

MAX_ID_LENGTH = 128  # characters
MAX_COUNT = 2**31 - 1  # of tokens: SamplingParams' limit
PROMPT_FORMS = "a string, a list of token ids, a list of strings, or a list of lists of token ids"
MESSAGES = "message objects"
A_MESSAGE = "a list of at least one message"

_SAMPLING = frozenset(
    {
        "n",
        "min_tokens",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "bad_words",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "prompt_logprobs",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "truncate_prompt_tokens",
    }
)

COMMON_NO_OPS = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)

COMMON_LATER: Mapping[str, tuple[Any, ...]] = {
    "structured_outputs": (),
    "truncation_side": ("left",),
    "logprob_token_ids": ([],),
    "return_token_offsets": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "stream_interval": (1,),
    "watermarking": (),
    "mm_payload": (),
}

# Of the sampling fields, those that mean something where there is one answer and one field of its own for ends.
ANSWER_SAMPLING = _SAMPLING - {"n", "stop", "prompt_logprobs"}


@dataclass(kw_only=True)
class StreamOptions(Record):
    NO_OPS: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = wire(boolean, False)
    continuous_usage_stats: bool = wire(boolean, False)

    @property
    def continuous(self) -> bool:
        """Usage on every chunk, on top of the one at the end."""
        return self.include_usage and self.continuous_usage_stats


@dataclass(kw_only=True)
class EngineFields(Record):
    """What all routes have in common whose prompts go to the engine."""

    model: str | None = wire(string)
    request_id: str | None = wire(short_string(MAX_ID_LENGTH))
    priority: int = wire(integer(-(2**31), 2**31 - 1), 0)
    cache_salt: str | None = wire(string)


@dataclass(kw_only=True)
class CallFields(EngineFields):
    """What all routes that generate have in common.

    `timings` is octavo's own: how long the phases of the call took. `return_progress` is llama.cpp's: a stream tells
    how far the prompt is (`prompt_progress`), whenever more of it has been computed.
    """

    stream: bool = wire(boolean, False)
    timings: bool = wire(boolean, False)
    return_progress: bool = wire(boolean, False)
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class GenerationFields(CallFields):
    """What completions and chat have in common."""

    stream_options: StreamOptions | None = wire(StreamOptions)
    user: str | None = wire(string)
    return_token_ids: bool = wire(boolean, False)
    return_tokens_as_token_ids: bool = wire(boolean, False)
    use_beam_search: bool = wire(boolean, False)
    beam_width: Any = wire(anything)  # this and the next two: BeamSearchParams checks them
    length_penalty: Any = wire(anything)
    early_stopping: Any = wire(anything)


@dataclass(kw_only=True)
class CompletionRequest(GenerationFields):
    """POST /v1/completions. `logprobs` counts the alternatives, as in SamplingParams."""

    SAMPLING: ClassVar[frozenset[str]] = _SAMPLING | {"max_tokens", "logprobs"}
    NO_OPS: ClassVar[frozenset[str]] = COMMON_NO_OPS
    LATER: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **COMMON_LATER,
        "response_format": ({"type": "text"},),
        "suffix": ("",),
        "prompt_embeds": (),
    }

    prompt: str | list[int] | list[str] | list[list[int]] = wire(anything, required=PROMPT_FORMS)
    echo: bool = wire(boolean, False)
    best_of: int | None = wire(integer(1))
    add_special_tokens: bool = wire(boolean, True)


@dataclass(kw_only=True)
class TemplateFields(Record):
    """How messages become a prompt: of chat, and of /tokenize."""

    messages: list[dict[str, Any]] | None = wire(list_of(dict, MESSAGES, min_length=1))
    add_generation_prompt: bool = wire(boolean, True)
    continue_final_message: bool = wire(boolean, False)
    chat_template_kwargs: dict[str, Any] | None = wire(mapping)
    documents: list[dict[str, Any]] | None = wire(list_of(dict, "document objects"))
    reasoning_effort: str | None = wire(string)
    tools: list[dict[str, Any]] | None = wire(tool_list)
    tool_choice: str | dict[str, Any] | None = wire(anything)


@dataclass(kw_only=True)
class ChatRequest(TemplateFields, GenerationFields):
    """POST /v1/chat/completions. `logprobs` says whether, `top_logprobs` how many alternatives."""

    SAMPLING: ClassVar[frozenset[str]] = _SAMPLING
    NO_OPS: ClassVar[frozenset[str]] = COMMON_NO_OPS | {"verbosity", "include_reasoning"}
    LATER: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **COMMON_LATER,
        "response_format": ({"type": "text"},),
        "echo": (False,),
        "chat_template": (),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "moderation": (),
        "web_search_options": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "return_prompt_text": (False,),
    }

    messages: list[dict[str, Any]] | None = wire(list_of(dict, MESSAGES, min_length=1), required=A_MESSAGE)
    max_tokens: int | None = wire(integer(1, MAX_COUNT))
    max_completion_tokens: int | None = wire(integer(1, MAX_COUNT))
    parallel_tool_calls: bool = wire(boolean, True)
    logprobs: bool = wire(boolean, False)
    top_logprobs: int | None = wire(integer(0))
    add_special_tokens: bool = wire(boolean, False)


@dataclass(kw_only=True)
class TokenizeRequest(TemplateFields):
    """POST /tokenize: a `prompt`, or `messages`. `add_special_tokens` is on for a prompt, off for messages."""

    LATER: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }

    model: str | None = wire(string)
    prompt: str | None = wire(string)
    add_special_tokens: bool | None = wire(boolean)
    return_token_strs: bool = wire(boolean, False)


@dataclass(kw_only=True)
class DetokenizeRequest(Record):
    model: str | None = wire(string)
    tokens: list[int] = wire(list_of(int, "token ids"), required="a list of token ids")


@dataclass(kw_only=True)
class AbortRequest(Record):
    """POST /abort_requests. An id is that of an answer, or the one that its call asked for."""

    request_ids: list[str] = wire(list_of(str, "request ids"), required="a list of request ids")
