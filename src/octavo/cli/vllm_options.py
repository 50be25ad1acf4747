"""The options of vLLM's server that octavo does not have: those that it accepts without effect, and those that it
refuses by name. A refusal beats silence: accepted is only what could not change any answer here, and what commands made
for vLLM often carry. What octavo does have stands in config.py.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from octavo.errors import ConfigError

ANY = None
ANY_VALUE = "VALUE"  # metavar of options whose value nobody looks at


class NoOp(NamedTuple):
    """`values`: none for a switch; those that ask for what octavo does anyway; or ANY."""

    flags: tuple[str, ...]
    why: str
    values: tuple[str, ...] | None = ()


NO_OPS = (
    # What octavo does anyway, or never does
    NoOp(("--trust-remote-code",), "code of a checkpoint is never run"),
    NoOp(("--enable-chunked-prefill",), "prompts are always computed in chunks"),
    NoOp(("--async-scheduling", "--no-async-scheduling"), "the bytes are the same"),
    NoOp(("--disable-log-stats",), "no figures are logged; they are at /metrics"),
    NoOp(("--disable-log-requests",), "requests are not logged, unless --enable-log-requests is given"),
    NoOp(("--disable-uvicorn-access-log",), "there is no access log"),
    NoOp(("--uvicorn-log-level",), "see --log-level", ANY),
    NoOp(("--enable-prompt-tokens-details",), "the details are always there"),
    NoOp(("--enable-request-id-headers",), "the header is always there"),
    NoOp(("--disable-frontend-multiprocessing",), "there is one front end"),
    NoOp(("--disable-custom-all-reduce",), "there is one device"),
    # About compilers, and about media that no model here takes
    NoOp(("--compilation-config", "-cc", "--optimization-level", "-O"), "nothing is compiled at start", ANY),
    NoOp(("-O0", "-O1", "-O2", "-O3"), "the same"),
    NoOp(("--max-seq-len-to-capture",), "the same", ANY),
    NoOp(("--limit-mm-per-prompt", "--mm-processor-cache-gb"), "models read text alone", ANY),
    # One value of several
    NoOp(("--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp", "--api-server-count"), "only 1", ("1",)),
    NoOp(("--distributed-executor-backend",), "there is one device", ("mp", "uni")),
    NoOp(("--device",), "it runs there", ("auto", "cpu")),
    NoOp(("--tokenizer-mode",), "it is chosen so", ("auto", "hf")),
    NoOp(("--chat-template-content-format",), "it is chosen so", ("auto",)),
    NoOp(("--attention-backend",), "it is chosen so", ("auto",)),
    NoOp(("--performance-mode",), "there is one mode", ("balanced",)),
    NoOp(("--stream-interval",), "every token is an event", ("1",)),
    NoOp(("--cpu-offload-gb", "--watermark"), "none", ("0", "0.0")),
    NoOp(("--runner", "--task"), "models generate and embed", ("auto", "generate", "pooling", "embed")),
    NoOp(("--convert",), "the same", ("auto", "none", "embed")),
)

_NOT_YET = """
--allow-credentials --allowed-headers --allowed-local-media-path --allowed-media-domains --allowed-methods
--code-revision --config-format --custom-histogram-buckets --data-parallel-address
--data-parallel-backend --data-parallel-hybrid-lb --data-parallel-rank --data-parallel-rpc-port
--data-parallel-size-local --data-parallel-start-rank --decode-context-parallel-size
--default-chat-template-kwargs --disable-fastapi-docs --disable-hybrid-kv-cache-manager --download-dir
--enable-dbo --enable-elastic-ep --enable-eplb --enable-expert-parallel
--enable-fault-tolerance --enable-force-include-usage --enable-log-outputs --enable-lora
--enable-mfu-metrics --enable-per-request-metrics --enable-prompt-embeds --enable-server-load-tracking
--enable-sleep-mode --enable-ssl-refresh --enable-tokenizer-info-endpoint --fully-sharded-loras
--h11-max-header-count --h11-max-incomplete-event-size --headless --hf-config-path --hf-overrides --hf-token
--ignore-patterns --io-processor-plugin --kv-cache-metrics --kv-events-config --kv-offloading-backend
--kv-offloading-size --kv-transfer-config --language-model-only --log-config-file --logits-processors
--lora-modules --master-addr --master-port --max-cpu-loras --max-lora-rank --max-loras
--max-num-partial-prefills --max-parallel-loading-workers --middleware --mm-encoder-tp-mode
--mm-processor-kwargs --model-impl --model-loader-extra-config --nnodes
--no-enable-chunked-prefill --node-rank --override-generation-config
--prefill-context-parallel-size --prefix-caching-hash-algo --prefill-schedule-interval --profiler-config
--quantization-config --ray-workers-use-nsight --reasoning-parser --reasoning-parser-plugin
--return-tokens-as-token-ids --safetensors-load-strategy --scheduler-cls --scheduler-reserve-full-isl
--show-hidden-metrics-for-version --skip-tokenizer-init --spec-method --spec-model --spec-tokens
--speculative-config --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --structured-outputs-config
--tokenizer-revision --tokens-only --tool-parser-plugin --tool-server
--trust-request-chat-template --worker-cls --worker-extension-cls
"""
NOT_YET = frozenset(_NOT_YET.split())


def add_no_ops(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options of vLLM, accepted without effect")
    for no_op in NO_OPS:
        group.add_argument(*no_op.flags, action=_Ignore, values=no_op.values, help=no_op.why)


class _Ignore(argparse.Action):
    """Nothing, unless the value asks for something."""

    def __init__(self, option_strings: list[str], values: tuple[str, ...] | None, **options: Any) -> None:
        self._values = values
        metavar = ANY_VALUE if values is ANY else "{" + ",".join(values) + "}"
        options |= {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        super().__init__(option_strings, nargs=0 if values == () else None, metavar=metavar, **options)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self._values and values not in self._values:
            raise ConfigError(f"{option_string} is {values!r}; only {', '.join(self._values)} is supported yet")
