"""How much memory the engine will take, decided before a weight is loaded: weights, workspace, and what is left for the
KV cache. Refuses a context that cannot fit, with the numbers. Allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.models.config import ModelConfig
from octavo.ops import cgroup
from octavo.ops.api import CacheDType
from octavo.runtime.offload import MAX_QUEUED_BYTES
from octavo.runtime.program import MAX_LOGITS

GiB = 2**30
DEFAULT_UTILIZATION = 0.92
# What the KV cache gets at most where nothing was asked for: a server that starts beside other programs should not
# slowly fill their memory with cached prefixes.
DEFAULT_KV_LIMIT = 4 * GiB

# Of the inputs of products (native/kernels/linear.cpp): rows packed at once, those behind them that tiles read too, and
# bytes of a value, which takes the most as three of bfloat16 (native/tiles/narrow_tile.h).
MAX_PACKED_ROWS, ROWS_BEHIND, PACKED_BYTES = 256, 32, 6

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All sizes in bytes."""

    weights: int
    workspace: int
    tiers: int  # behind the KV cache: swap space, blocks on their way to disk
    num_blocks: int
    block_size: int  # tokens
    block_bytes: int  # K and V of all layers
    max_model_len: int  # tokens
    num_slots: int  # blocks that the swap space holds

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def __str__(self) -> str:
        tiers = f"tiers behind the KV cache {_size(self.tiers)}, " if self.tiers else ""
        return (
            f"memory: weights {_size(self.weights)}, workspace {_size(self.workspace)}, {tiers}"
            f"KV cache {_size(self.num_blocks * self.block_bytes)} = {self.num_blocks:,} blocks of {self.block_size}: "
            f"{self.num_tokens:,} tokens, {self.num_tokens / self.max_model_len:.1f} requests of {self.max_model_len:,}"
        )


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    kv_dtype: CacheDType,
    *,
    weights: int,
    workspace: int,
    available: int,
    total: int,
) -> MemoryPlan:
    """`weights`, `workspace`: bytes they will take; `available`, `total`: free memory and all memory, in bytes. Raises
    ConfigError where the context does not fit the KV cache, naming the size needed, the size available and the longest
    that fits, and for a KV cache larger than the machine."""
    block_bytes = kv_block_bytes(model, config.block_size, kv_dtype)
    tiers = (0 if config.swap_dir else int(config.swap_space * GiB)) + (
        MAX_QUEUED_BYTES if config.kv_offload_dir else 0
    )
    budget = _kv_budget(config, available - weights - workspace - tiers, available)
    num_slots = int(config.swap_space * GiB) // block_bytes
    if config.swap_space and num_slots == 0:
        raise ConfigError(
            f"swap_space is {config.swap_space} GiB; a KV block takes {_size(block_bytes)}, and at least one must fit",
            param="swap_space",
        )
    num_blocks = config.num_gpu_blocks_override or max(0, budget) // block_bytes
    wanted = _wanted_length(config, model)
    fits = num_blocks * config.block_size
    if config.max_model_len == "auto":
        wanted = min(wanted, fits)
    if num_blocks == 0 or (wanted > fits and config.num_gpu_blocks_override is None):
        needed = -(-wanted // config.block_size) * block_bytes
        raise ConfigError(
            f"max_model_len is {wanted}: its KV cache needs {_size(needed)}, but {_size(max(0, budget))} are available "
            f"for it; the longest that fits is {fits} tokens (--max-model-len {fits or 'auto'}, or give more with "
            "--kv-cache-memory-bytes or --gpu-memory-utilization)",
            param="max_model_len",
        )
    _check_total(config, num_blocks * block_bytes, total)
    return MemoryPlan(weights, workspace, tiers, num_blocks, config.block_size, block_bytes, wanted, num_slots)


def kv_block_bytes(model: ModelConfig, block_size: int, kv_dtype: CacheDType) -> int:
    """Values are padded to whole vectors of 16, keys to whole steps of a tile; codes have a scale for each token and
    head (native/include/octavo/attention.h)."""
    key_step = 16 if kv_dtype == "float32" else 32
    keys, values = -(-model.head_dim // key_step) * key_step, -(-model.head_dim // 16) * 16
    scales = 2 * 4 if kv_dtype == "int8" else 0
    token_head = (keys + values) * _ITEMSIZE[kv_dtype] + scales
    return model.num_layers * block_size * model.num_kv_heads * token_head


def workspace_bytes(model: ModelConfig, max_tokens: int) -> int:
    """The most that the program's buffers take: one for the residual stream and one for each kind of value that is live
    beside it, and the packed inputs of a product. Rows are an odd number of cache lines apart
    (native/kernels/program.cpp)."""
    qkv = model.q_size + 2 * model.kv_size
    gate_up = 2 * model.intermediate_size  # not there where its product with silu is fused
    token_row = [model.hidden_size, model.hidden_size, qkv, model.q_size, gate_up, model.intermediate_size]
    logit_row = [model.hidden_size, model.hidden_size, model.vocab_size]
    packed_row = PACKED_BYTES * max(model.hidden_size, model.q_size, model.intermediate_size)
    num_packed_rows = min(max_tokens, MAX_PACKED_ROWS) + ROWS_BEHIND

    def row_bytes(widths: list[int]) -> int:
        return 4 * sum(-(-width // 16) * 16 | 16 for width in widths)

    return max_tokens * row_bytes(token_row) + MAX_LOGITS * row_bytes(logit_row) + num_packed_rows * packed_row


def _kv_budget(config: EngineConfig, left: int, available: int) -> int:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if config.gpu_memory_utilization is not None:
        return left - int(available * (1 - config.gpu_memory_utilization))
    return min(left - int(available * (1 - DEFAULT_UTILIZATION)), DEFAULT_KV_LIMIT)


def _check_total(config: EngineConfig, kv_bytes: int, total: int) -> None:
    """A size that was given is taken as it is, whatever is free at the moment: others may end, and an engine that is
    started again gets as many blocks as the first one. But memory is taken as it fills, so one that can never be there
    would end the engine long after its start."""
    if kv_bytes <= total:
        return
    param = "kv_cache_memory_bytes" if config.num_gpu_blocks_override is None else "num_gpu_blocks_override"
    raise ConfigError(
        f"{param} is {getattr(config, param)}, a KV cache of {_size(kv_bytes)}; there are {_size(total)} of memory in "
        "all",
        param=param,
    )


def _wanted_length(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len in (None, "auto"):
        # Dynamic scaling is fixed at load for the chosen length, and at the original one it scales nothing.
        return model.max_position_embeddings if model.rope.type == "dynamic" else _longest(model)
    assert isinstance(config.max_model_len, int)
    if config.max_model_len > _longest(model):
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model's own limit is {_longest(model)}",
            param="max_model_len",
        )
    return config.max_model_len


def _longest(model: ModelConfig) -> int:
    """The longest context that the model is made for: scaling by a factor stretches what the config calls its limit
    (yarn: what it was trained with)."""
    limit, rope = model.max_position_embeddings, model.rope
    match rope.type:
        case "linear" | "dynamic":
            return int(limit * (rope.factor or 1))
        case "yarn":
            return max(limit, int(rope.original_max_position_embeddings * (rope.factor or 1)))
        case _:
            return limit


def available_memory() -> int:
    """Bytes that this process may still take: what the kernel calls available, within the limits of its cgroups."""
    return min([_meminfo("MemAvailable"), *(group.num_free for group in cgroup.memory_limits())])


def total_memory() -> int:
    """Bytes that this process could take if nothing else ran."""
    return min([_meminfo("MemTotal"), *(group.limit for group in cgroup.memory_limits())])


def _meminfo(name: str) -> int:
    info = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(info[name].split()[0]) * 1024


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GiB:.2f} GiB" if num_bytes >= GiB / 10 else f"{num_bytes / 2**20:.1f} MiB"
