"""From an EngineConfig to an Engine: find the checkpoint, plan the memory, load, put the parts together.

The one place that knows all of them. Nothing is loaded before the plan has been found to fit.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

from octavo.checkpoint.base import Checkpoint, open_checkpoint
from octavo.checkpoint.loader import load_model, matrix_sources, weight_bytes
from octavo.checkpoint.packed_cache import MatrixStore, NoStore, PackedCache
from octavo.checkpoint.packed_key import packed_key
from octavo.checkpoint.resolve import resolve
from octavo.config import EngineConfig, packed_cache_folder
from octavo.core.block_pool import BlockPool
from octavo.core.kv_manager import KVManager
from octavo.core.policy import make_policy
from octavo.core.preemption import make_preemption
from octavo.core.scheduler import Scheduler
from octavo.core.swap import SwapSpace
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineInfo
from octavo.models.config import ModelConfig
from octavo.models.registry import Model, model_class
from octavo.ops import isa
from octavo.ops.api import CacheDType, DType
from octavo.ops.cpu import CpuBackend
from octavo.quant.formats import WeightFormats, choose_formats
from octavo.runtime.fingerprint import fingerprint
from octavo.runtime.kv_cache import KVStorage
from octavo.runtime.memory import (
    GiB,
    MemoryPlan,
    available_memory,
    plan_memory,
    total_memory,
    workspace_bytes,
)
from octavo.runtime.offload import DiskStore
from octavo.runtime.program import EagerExecutor, ProgramExecutor
from octavo.runtime.runner import Executor, Runner
from octavo.sampling.sampler import Sampler


def build_engine(config: EngineConfig) -> Engine:
    """Raises CheckpointError for a checkpoint that cannot be used, ConfigError for options that cannot be met."""
    checkpoint = open_checkpoint(resolve(config.model, config.revision), config.load_format)
    model_config = ModelConfig.from_hf(checkpoint.config)
    model_class(model_config.architecture)  # an unknown architecture is the first thing to say
    dtype = _compute_dtype(config, checkpoint)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else cast(CacheDType, config.kv_cache_dtype)
    variant = isa.choose(config.isa)
    formats = choose_formats(
        config.quantization, config.activation_dtype, dtype, has_blocks=checkpoint.has_blocks, variant=variant
    )
    plan = plan_memory(
        config,
        model_config,
        kv_dtype,
        weights=weight_bytes(checkpoint, model_config, formats),
        workspace=workspace_bytes(model_config, config.max_num_batched_tokens),
        available=available_memory(),
        total=total_memory(),
    )
    model_config.check_max_model_len(plan.max_model_len)
    backend = CpuBackend(variant=variant, num_threads=config.num_threads)
    start = time.perf_counter()
    weights = _packed_weights(config, checkpoint, model_config, formats, backend)
    model = load_model(checkpoint, model_config, backend, formats, plan.max_model_len, config.seed, weights)
    loading = f"{weights.origin} in {time.perf_counter() - start:.2f} s"
    blocks = backend.kv_blocks(
        model_config.num_layers,
        plan.num_blocks,
        plan.block_size,
        model_config.num_kv_heads,
        model_config.head_dim,
        kv_dtype,
    )
    kv_caches = [blocks.layer(i) for i in range(model_config.num_layers)]
    sampler = Sampler(backend.native, backend.pool, logprobs_mode=config.logprobs_mode)
    store = _store(config, checkpoint, model_config, dtype, kv_dtype, formats, variant, plan)
    storage = KVStorage(blocks, num_slots=plan.num_slots, swap_dir=config.swap_dir, sink=store)
    runner = Runner(_executor(config, model, backend, kv_caches, plan.block_size), sampler, storage, weights)
    info = _info(config, model_config, dtype, formats, backend, plan, loading)
    engine = Engine(_scheduler(config, plan, store), runner, info)
    weights.keep()
    return engine


def _compute_dtype(config: EngineConfig, checkpoint: Checkpoint) -> DType:
    if config.dtype == "auto":
        return "bfloat16" if config.quantization else checkpoint.dtype
    return "float32" if config.dtype in ("float", "float32") else "bfloat16"


def _packed_weights(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig, formats: WeightFormats, backend: CpuBackend
) -> MatrixStore:
    folder = packed_cache_folder(config)
    if folder is None or checkpoint.format == "config":
        return NoStore()

    def identify() -> bytes:
        return packed_key(checkpoint, matrix_sources(checkpoint, model, formats), backend.variant)

    return PackedCache(folder, int(config.packed_cache_size * GiB), identify, backend)


def _executor(
    config: EngineConfig, model: Model, backend: CpuBackend, kv_caches: list[Any], block_size: int
) -> Executor:
    if config.enforce_eager:
        return EagerExecutor(model, backend, kv_caches, block_size)
    return ProgramExecutor(model, backend, kv_caches, block_size, config.max_num_batched_tokens)


def _store(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: ModelConfig,
    dtype: DType,
    kv_dtype: CacheDType,
    formats: WeightFormats,
    variant: str,
    plan: MemoryPlan,
) -> DiskStore | None:
    if config.kv_offload_dir is None:
        return None
    identity = fingerprint(
        checkpoint,
        model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        formats=formats,
        block_size=plan.block_size,
        max_model_len=plan.max_model_len,
        variant=variant,
        seed=config.seed,
    )
    return DiskStore(Path(config.kv_offload_dir), int(config.kv_offload_size * GiB), identity, plan.block_bytes)


def _scheduler(config: EngineConfig, plan: MemoryPlan, store: DiskStore | None) -> Scheduler:
    pool = BlockPool(plan.num_blocks, config.enable_prefix_caching)
    return Scheduler(
        KVManager(pool, plan.block_size, swap=SwapSpace(plan.num_slots), store=store),
        make_policy(config.scheduling_policy),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        preemption=make_preemption(config.preemption_mode if plan.num_slots else "recompute"),
    )


def _info(
    config: EngineConfig,
    model: ModelConfig,
    dtype: DType,
    formats: WeightFormats,
    backend: CpuBackend,
    plan: MemoryPlan,
    loading: str,
) -> EngineInfo:
    return EngineInfo(
        max_model_len=plan.max_model_len,
        vocab_size=model.vocab_size,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        dtype=dtype,
        isa=backend.variant,
        num_threads=backend.num_threads,
        memory_plan=str(plan),
        max_num_seqs=config.max_num_seqs,
        loading=loading,
        hidden_size=model.hidden_size,
        arithmetic=str(formats.layers),
        cache_config={
            "block_size": str(plan.block_size),
            "num_gpu_blocks": str(plan.num_blocks),
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "gpu_memory_utilization": str(config.gpu_memory_utilization),
            "kv_cache_memory_bytes": str(config.kv_cache_memory_bytes),
        },
    )
