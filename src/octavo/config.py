"""Every option of octavo: frozen, documented dataclasses. The command line's flags are generated from them
(`max_model_len` becomes `--max-model-len`), `LLM(...)` takes the same names, and only this file reads environment
variables.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal
from urllib.parse import urlsplit

from octavo.errors import ConfigError
from octavo.pooling import read_pooler_config

MAX_THREADS = 256  # of the kernels; far more could not be started, and the error would come from the system
MAX_TIMEOUT_SECONDS = 7 * 24 * 3600  # a longer one is 0, which means never
# The formats of tool calls; what reads them is in text/tool_parsers.
TOOL_CALL_PARSERS = ("granite", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder", "qwen3_xml")
MAX_TIER_GIB = 2**20  # a pebibyte: a larger number is a slip, as infinity is

# The types of options, in words.
_KINDS: Mapping[Any, str] = MappingProxyType(
    {
        bool: "true or false",
        int: "an integer of at most 64 bits",
        float: "a number",
        str: "a text",
        list: "a list of texts",
        dict: "an object",
        Literal: "a known word",
    }
)


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    unit: str | None = None,
    short: str | None = None,
) -> Any:
    """A documented field. `choices` are checked at construction; `unit` is shown in --help; `short` is a second name of
    its flag."""
    metadata = {"help": help, "choices": choices, "unit": unit, "short": short}
    if isinstance(default, (list, dict)):
        kind = type(default)
        return field(default_factory=lambda: kind(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def environment(name: str, default: str | None = None) -> str | None:
    """The one door to environment variables: OCTAVO_<name>."""
    return os.environ.get(f"OCTAVO_{name}", default)


def api_key_of_environment() -> str | None:
    """OCTAVO_API_KEY, or the name that commands made for vLLM set."""
    return environment("API_KEY") or os.environ.get("VLLM_API_KEY")


def responses_store_of_environment() -> bool:
    """Whether vLLM's name for `enable_responses_store` asks for it."""
    return os.environ.get("VLLM_ENABLE_RESPONSES_API_STORE", "0").lower() in ("1", "true")


def packed_cache_folder(config: EngineConfig) -> Path | None:
    """Where copies of packed weights are kept, whether it is there or not; None: nowhere."""
    if not config.enable_packed_cache:
        return None
    if config.packed_cache_dir is not None:
        return Path(config.packed_cache_dir).expanduser().absolute()
    if (environment("PACKED_CACHE") or "1").strip().lower() in ("0", "false", "no", "off"):
        return None
    folder = environment("CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "octavo"
    )
    return Path(folder).expanduser().absolute() / "packed"


def union_members(hint: Any) -> tuple[Any, ...]:
    """The types that an option's hint allows."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)


def _check_types(config: Any) -> None:
    """Paths become texts. What the command line reads has its type already; keywords may have any."""
    hints = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
            object.__setattr__(config, f.name, value)
        allowed_types = union_members(hints[f.name])
        if not any(_is_a(value, each) for each in allowed_types):
            allowed = " or ".join(_KINDS[typing.get_origin(each) or each] for each in allowed_types if each != NoneType)
            raise ConfigError(f"{f.name} is {value!r}; it must be {allowed}", param=f.name)


def _is_a(value: Any, kind: Any) -> bool:
    """`kind`: a member of an option's type."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        return value in typing.get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if kind is int:  # as it goes to the engine's process
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, origin or kind)


def _check_choices(config: Any) -> None:
    for f in dataclasses.fields(config):
        choices, value = f.metadata.get("choices"), getattr(config, f.name)
        if choices and value is not None and value not in choices:
            raise ConfigError(f"{f.name} is {value!r}; allowed: {', '.join(choices)}", param=f.name)


def _check_range(config: Any, name: str, low: float, high: float = float("inf")) -> None:
    value = getattr(config, name)
    if value is None:
        return
    if not low <= value <= high:  # nor is NaN
        bound = f"at least {low}" if high == float("inf") else f"in [{low}, {high}]"
        raise ConfigError(f"{name} is {value!r}; it must be {bound}", param=name)


def _is_http_url(text: str) -> bool:
    parts = urlsplit(text)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is made of. Names, meanings and defaults are vLLM's where it has the option."""

    # The model
    model: str = option("smollm2", "model: a folder, a .gguf file, a hub id, or an alias such as smollm2")
    tokenizer: str | None = option(None, "tokenizer folder or file; default: the model's own")
    revision: str | None = option(None, "branch, tag or commit of a hub model")
    dtype: str = option(
        "auto",
        "compute type; auto: float32 for a float32 checkpoint that is not quantised at load, else bfloat16",
        choices=("auto", "float32", "float", "bfloat16"),
    )
    load_format: str = option(
        "auto",
        "auto reads the checkpoint; dummy makes random weights",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    quantization: str | None = option(
        None,
        "quantise the weights at load: int8 (a scale for each row), or int4 in groups of 32 (embedding and head: int8)",
        choices=("int8", "int4"),
        short="-q",
    )
    activation_dtype: str = option(
        "auto",
        "what the inputs of products with quantised weights are rounded to; auto: with AMX int16 for quantization int8 "
        "(whose weights any other type takes in groups of 32) and else bfloat16, without it int8",
        choices=("auto", "bfloat16", "int8", "int16"),
    )
    max_model_len: int | Literal["auto"] | None = option(
        None, "longest prompt + output; default: the checkpoint's; auto (or -1): what fits memory", unit="tokens"
    )
    seed: int = option(0, "seed of the random weights of --load-format dummy and of seedless requests of LLM")
    # Memory
    gpu_memory_utilization: float | None = option(
        None,
        "share of the free memory that octavo may use; default: 0.92, and then at most 4 GiB of it for the KV cache",
    )
    kv_cache_memory_bytes: int | None = option(None, "size of the KV cache; beats the share", unit="bytes")
    num_gpu_blocks_override: int | None = option(None, "number of KV blocks; beats all other sizes", unit="blocks")
    block_size: int = option(16, "tokens in a KV block, a multiple of 16", unit="tokens")
    kv_cache_dtype: str = option(
        "auto",
        "type of K and V; auto: the compute type; int8: codes with scales, about half of bfloat16's memory",
        choices=("auto", "float32", "bfloat16", "int8"),
    )
    enable_prefix_caching: bool = option(True, "reuse the KV of equal prompt prefixes")
    swap_space: float = option(
        0.0, "room for the KV of preempted requests, beside the KV cache; 0: none, they are computed again", unit="GiB"
    )
    swap_dir: str | None = option(None, "folder for the swap space, as a memory-mapped file; default: in memory")
    kv_offload_dir: str | None = option(
        None, "folder that keeps KV blocks for which memory has no room, also across restarts; default: none are kept"
    )
    # Twice what the KV cache in memory takes at most by default, so that it adds to that; and no burden to a disk.
    kv_offload_size: float = option(
        8.0, "most that kv_offload_dir holds; the blocks used longest ago go first", unit="GiB"
    )
    enable_packed_cache: bool = option(
        True,
        "keep a copy of the weights as the kernels read them, which makes the next start faster "
        "($OCTAVO_PACKED_CACHE=0: keep none where no folder is named)",
    )
    packed_cache_dir: str | None = option(
        None, "folder of these copies; default: packed in $OCTAVO_CACHE_DIR, else in octavo in the user's cache folder"
    )
    # A model of 8 billion weights fits when it is quantised. Its bfloat16 does not: as large as the checkpoint, a copy
    # would be one more model on the disk.
    packed_cache_size: float = option(
        8.0, "most that packed_cache_dir holds; the copies used longest ago go first", unit="GiB"
    )
    # Scheduling
    max_num_seqs: int = option(128, "most requests that run at once", unit="requests")
    max_num_batched_tokens: int = option(2048, "token budget of a step", unit="tokens")
    long_prefill_token_threshold: int = option(
        0, "most tokens of one prompt in a step while others wait; 0: half of the budget", unit="tokens"
    )
    preemption_mode: str = option(
        "auto",
        "when KV blocks run out: recompute or swap the request that gives way; auto: what takes less time",
        choices=("auto", "recompute", "swap"),
    )
    scheduling_policy: str = option(
        "fcfs",
        "who goes first: who came first, the lowest `priority`, or users in fair shares (`user`, else the API key)",
        choices=("fcfs", "priority", "fair"),
    )
    # Execution
    enforce_eager: bool = option(False, "run op by op instead of the traced program (for debugging; same bytes)")
    num_threads: int | None = option(None, "threads of the kernels; default: from affinity and cgroup quota")
    isa: str | None = option(None, "force an instruction set", choices=("x86_v3", "x86_v4", "x86_v4_bf16", "amx"))
    # The longest steps are those of large models on few cores: 2048 prompt tokens of 8 billion weights take about a
    # minute on two.
    engine_timeout: float = option(
        120.0,
        "an engine that has requests and computes nothing for so long is killed and started again (one that gives no "
        "sign of life, after 20 s at most); 0: never",
        unit="seconds",
    )
    tensor_parallel_size: int = option(1, "devices that share the model (only 1 so far)", short="-tp")
    # Text and sampling
    chat_template: str | None = option(None, "file (or the text itself) of a chat template that replaces the model's")
    generation_config: str = option(
        "auto", "where sampling defaults come from: auto (the model's folder), octavo or vllm (neutral), or a folder"
    )
    max_logprobs: int = option(20, "most logprobs that a request may ask for; -1: no limit")
    logprobs_mode: str = option(
        "raw_logprobs",
        "what logprobs are of",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    pooler_config: str | dict[str, Any] | None = option(
        None,
        "how embeddings are made, as JSON: pooling_type (LAST, MEAN) and normalize (true, false); default: what a "
        "sentence-transformers folder says, else the last token, normalised",
    )

    def __post_init__(self) -> None:
        _check_types(self)
        _check_choices(self)
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"):
            _check_range(self, name, 1)
        _check_range(self, "num_threads", 1, MAX_THREADS)
        _check_range(self, "kv_cache_memory_bytes", 1)
        _check_range(self, "gpu_memory_utilization", 0.01, 1.0)
        _check_range(self, "kv_offload_size", 0.001, MAX_TIER_GIB)
        _check_range(self, "packed_cache_size", 0.001, MAX_TIER_GIB)
        _check_range(self, "long_prefill_token_threshold", 0)
        _check_range(self, "swap_space", 0, MAX_TIER_GIB)
        _check_range(self, "engine_timeout", 0, MAX_TIMEOUT_SECONDS)
        _check_range(self, "max_logprobs", -1)
        if self.block_size < 16 or self.block_size % 16:
            raise ConfigError(f"block_size is {self.block_size!r}; it must be a multiple of 16", param="block_size")
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ConfigError("preemption_mode is 'swap', but swap_space is 0; give it some GiB", param="swap_space")
        if self.packed_cache_dir is not None and not self.packed_cache_dir:
            raise ConfigError("packed_cache_dir is ''; it must name a folder", param="packed_cache_dir")
        if self.kv_offload_dir is not None and not self.kv_offload_dir:
            raise ConfigError("kv_offload_dir is ''; it must name a folder", param="kv_offload_dir")
        if self.kv_offload_dir is not None and not self.enable_prefix_caching:
            raise ConfigError(
                f"kv_offload_dir is {self.kv_offload_dir!r}, but without enable_prefix_caching no block is looked for",
                param="kv_offload_dir",
            )
        if self.pooler_config is not None:
            object.__setattr__(self, "pooler_config", read_pooler_config(self.pooler_config))
        if self.max_model_len == -1:  # vLLM's other word for it
            object.__setattr__(self, "max_model_len", "auto")
        if self.max_model_len not in (None, "auto"):
            _check_range(self, "max_model_len", 1)
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size!r}; only 1 is supported",
                param="tensor_parallel_size",
            )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP front."""

    host: str = option("127.0.0.1", "address to bind")
    port: int = option(8000, "port to bind; 0: any free one")
    uds: str | None = option(None, "path of a Unix socket to listen at instead of host and port")
    root_path: str = option(
        "", "prefix under which a proxy shows the routes, whether it takes it off or not; default: none"
    )
    ssl_certfile: str | None = option(None, "certificate (chain) in PEM; the server then speaks TLS alone")
    ssl_keyfile: str | None = option(None, "its key in PEM; default: in the certificate's file")
    api_key: list[str] = option(
        [], "keys that clients must send as `Authorization: Bearer`; default: $OCTAVO_API_KEY or $VLLM_API_KEY, if set"
    )
    api_key_file: str | None = option(None, "file with more such keys, one a line")
    served_model_name: list[str] = option([], "names the model answers to; the first is reported; default: as given")
    allow_unknown_fields: bool = option(False, "ignore request fields that octavo does not know instead of a 400")
    allowed_origins: list[str] = option([], "origins allowed by CORS; default: none")
    max_num_queued_reqs: int | None = option(
        None, "waiting requests beyond which a new one gets 503; default: no limit"
    )
    max_num_queued_tokens: int | None = option(
        None,
        "prompt tokens of unanswered requests beyond which a new one gets 503, unless it is alone; default: no limit",
        unit="tokens",
    )
    max_body_bytes: int = option(32 * 1024 * 1024, "largest request body; a larger one gets 413", unit="bytes")
    client_timeout: float = option(
        60.0, "how long a client may stop in the middle of a request, or of reading its answer", unit="seconds"
    )
    metrics_auth: bool = option(False, "guard /metrics with the API key too")
    shutdown_timeout: float = option(30.0, "grace for running requests after SIGTERM", unit="seconds")
    log_level: str = option("info", "least severe message shown", choices=("debug", "info", "warning", "error"))
    enable_log_requests: bool = option(
        False,
        "log each request's id, counts and parameters, and at --log-level debug its prompt; without it, "
        "nothing of a prompt is in the log",
    )
    max_log_len: int | None = option(
        None, "most characters of a prompt in the log; default: all, where prompts are logged", unit="characters"
    )
    log_format: str = option("text", "lines of text, or one JSON object a line", choices=("text", "json"))
    otlp_traces_endpoint: str | None = option(
        None,
        "URL of an OpenTelemetry collector (OTLP over HTTP), which gets a span for each request; needs octavo[otel]",
    )
    response_role: str = option("assistant", "role of chat answers")
    enable_auto_tool_choice: bool = option(False, "let the model call the tools of a request as it sees fit")
    tool_call_parser: str | None = option(
        None,
        "format of the model's tool calls; default: the one that its chat template shows",
        choices=TOOL_CALL_PARSERS,
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False, "leave a request's tools out of the prompt where its tool_choice is none"
    )
    enable_responses_store: bool = option(
        False,
        "keep responses of /v1/responses in memory, for `previous_response_id` (or $VLLM_ENABLE_RESPONSES_API_STORE=1)",
    )
    responses_store_size: int = option(1000, "most responses kept; those used longest ago go first", unit="responses")
    responses_store_bytes: int = option(64 * 1024 * 1024, "most text kept with them", unit="bytes")

    def __post_init__(self) -> None:
        _check_types(self)
        _check_choices(self)
        if not all(key.strip() for key in self.api_key):
            raise ConfigError("api_key has an empty key; it would open the server to all", param="api_key")
        _check_range(self, "port", 0, 65535)
        _check_range(self, "shutdown_timeout", 0, MAX_TIMEOUT_SECONDS)
        _check_range(self, "client_timeout", 0.001, MAX_TIMEOUT_SECONDS)
        _check_range(self, "max_body_bytes", 1)
        _check_range(self, "responses_store_size", 1)
        _check_range(self, "responses_store_bytes", 1)
        _check_range(self, "max_log_len", 0)
        _check_range(self, "max_num_queued_reqs", 1)
        _check_range(self, "max_num_queued_tokens", 1)
        if self.otlp_traces_endpoint is not None and not _is_http_url(self.otlp_traces_endpoint):
            message = (
                f"otlp_traces_endpoint is {self.otlp_traces_endpoint!r}; it must be a URL such as "
                "http://127.0.0.1:4318/v1/traces (OTLP over HTTP, whose port is 4318; gRPC's 4317 is not spoken)"
            )
            raise ConfigError(message, param="otlp_traces_endpoint")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            message = f"ssl_keyfile is {self.ssl_keyfile!r}, but there is no ssl_certfile"
            raise ConfigError(message, param="ssl_keyfile")
        if self.root_path and not (self.root_path.startswith("/") and not self.root_path.endswith("/")):
            message = f"root_path is {self.root_path!r}; it must begin, and not end, with a slash"
            raise ConfigError(message, param="root_path")
