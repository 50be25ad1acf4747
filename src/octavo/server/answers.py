"""What the routes answer, as types: for the description at /openapi.json, and for who makes these records.

Optional keys stand in a base class of their own: they are there where a request asks for them. Knows no route.
"""

# No `from __future__ import annotations`: TypedDict tells which keys are required only where it sees them itself.

from typing import Any, TypedDict

from octavo.server.answers_tools import ChatCall, ChatCallDelta, FunctionCall, ToolUseBlock


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Every 4xx and 5xx, and the last event of a stream that fails."""

    error: ErrorDetail


class AnthropicErrorDetail(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    """The same on Anthropic's routes."""

    type: str
    error: AnthropicErrorDetail
    request_id: str | None


# ── What several routes answer ───────────────────────────────────────────────────────────────────────────────────────


class Timings(TypedDict):
    """With `timings: true`: seconds, and tokens for each of them."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    total_seconds: float
    cached_tokens: int
    prefill_tokens_per_second: float
    tokens_per_second: float


class _PromptIndex(TypedDict, total=False):
    prompt_index: int  # where there are several


class PromptProgress(_PromptIndex):
    """With `return_progress: true`, in a stream before the first token: tokens, and milliseconds since the first
    step."""

    total: int
    cache: int
    processed: int
    time_ms: float


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


# ── /v1/completions ──────────────────────────────────────────────────────────────────────────────────────────────────


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _CompletionChoiceExtras(TypedDict, total=False):
    token_ids: list[int]
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[str, Any] | None]
    seed: int | None  # where there are several prompts


class CompletionChoice(_CompletionChoiceExtras):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class _CallExtras(TypedDict, total=False):
    seed: int | None
    usage: Usage
    timings: Timings
    prompt_progress: PromptProgress


class Completion(_CallExtras):
    """An answer, or a chunk of one: its choices hold what is new."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]


# ── /v1/chat/completions ─────────────────────────────────────────────────────────────────────────────────────────────


class ChatLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(ChatLogprob):
    top_logprobs: list[ChatLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprobs]
    refusal: None


class _ChatMessageExtras(TypedDict, total=False):
    tool_calls: list[ChatCall]


class ChatMessage(_ChatMessageExtras):
    role: str
    content: str | None  # null: there are tool calls alone


class _ChatChoiceExtras(TypedDict, total=False):
    stop_reason: str | int | None
    token_ids: list[int]


class _AnyChatChoice(_ChatChoiceExtras):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChoice(_AnyChatChoice):
    message: ChatMessage


class _ChatExtras(_CallExtras, total=False):
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[str, Any] | None]


class _AnyChat(_ChatExtras):
    id: str
    object: str
    created: int
    model: str


class ChatCompletion(_AnyChat):
    choices: list[ChatChoice]


class ChatDelta(TypedDict, total=False):
    role: str  # in the first chunk of a choice
    content: str
    tool_calls: list[ChatCallDelta]


class ChatChunkChoice(_AnyChatChoice):
    delta: ChatDelta


class ChatChunk(_AnyChat):
    choices: list[ChatChunkChoice]


# ── /v1/responses ────────────────────────────────────────────────────────────────────────────────────────────────────


class OutputText(TypedDict):
    type: str
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(TypedDict):
    id: str
    type: str
    role: str
    status: str
    content: list[OutputText]


OutputItem = OutputMessage | FunctionCall


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class _ResponseExtras(TypedDict, total=False):
    completed_at: int
    timings: Timings


class ResponseRecord(_ResponseExtras):
    id: str
    object: str
    created_at: int
    status: str
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, Any]
    seed: int | None


class _ResponseEventParts(TypedDict, total=False):
    response: ResponseRecord
    delta: str
    prompt_progress: PromptProgress


class ResponseEvent(_ResponseEventParts):
    """`type` says which other keys there are."""

    type: str
    sequence_number: int


class DeletedResponse(TypedDict):
    id: str
    object: str
    deleted: bool


# ── /v1/messages ─────────────────────────────────────────────────────────────────────────────────────────────────────


class TextBlock(TypedDict):
    type: str
    text: str
    citations: None


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class _MessageExtras(TypedDict, total=False):
    timings: Timings


class Message(_MessageExtras):
    id: str
    type: str
    role: str
    model: str
    content: list[TextBlock | ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    seed: int | None


class _MessageEventParts(TypedDict, total=False):
    message: Message
    index: int
    delta: dict[str, Any]
    usage: MessageUsage
    timings: Timings
    prompt_progress: PromptProgress


class MessageEvent(_MessageEventParts):
    """`type` says which other keys there are."""

    type: str


class TokenCount(TypedDict):
    input_tokens: int


# ── All others ───────────────────────────────────────────────────────────────────────────────────────────────────────


class DefaultSamplingParams(TypedDict):
    values: dict[str, Any]
    origin: str


class ModelCard(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    default_sampling_params: DefaultSamplingParams


class ModelList(TypedDict):
    object: str
    data: list[ModelCard]


class Embedding(TypedDict):
    object: str
    index: int
    embedding: list[float] | str  # the bytes of float32, in base64, where that is asked for


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    object: str
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class _TokenStrings(TypedDict, total=False):
    token_strs: list[str]


class Tokens(_TokenStrings):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(TypedDict):
    prompt: str


class Aborted(TypedDict):
    aborted: list[str]


class Version(TypedDict):
    version: str
