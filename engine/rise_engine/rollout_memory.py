"""What sampling holds: a key-value cache, vLLM's share of a GPU, and the weights on their way to it. Bytes on one rank.

vLLM's part follows its source (0.32) and weight_sync.py; what no source gives is an allowance, and says so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .weights_stream import BUCKET_BYTES

if TYPE_CHECKING:
    from .memory_plan import ModelShape, Setting, Workload

FLOAT32 = 4
CUDA_GRAPHS = 1536 << 20
"""An allowance. vLLM captures about 20 to 50 batch sizes; reports of what that took range from 0.4 GiB to 1.5 GiB, most
of it the driver's. They are reserved inside memory_fraction (since vLLM 0.21) and stay on the GPU while vLLM sleeps,
since `sleep_mode_offload_cudagraph` is off.
"""
BLOCK = 16
"""Tokens of a cache block of vLLM on a GPU; it keeps one block back."""


def kv_cache(shape: ModelShape, work: Workload, setting: Setting, rows: float | None = None) -> float:
    """Keys and values of `rows` answers (work.rows) at their longest."""
    columns = work.prompt + work.hint + work.response
    features = shape.layers * shape.kv_heads * shape.head_dim
    return 2.0 * (work.rows if rows is None else rows) * columns * features * setting.dtype_bytes


def vllm_share(shape: ModelShape, work: Workload, s: Setting, device_bytes: int) -> float:
    """What vLLM holds while it samples: on a CPU its weights and the cache; on a GPU memory_fraction of all of it, out
    of which come its weights, activations, CUDA graphs and NCCL buffers, before the cache gets what is left.
    """
    if s.on_cpu:
        return (s.dtype_bytes * shape.parameters + kv_cache(shape, work, s, work.rows + 1)) / s.vllm_ranks
    return (s.vllm or 0.0) * device_bytes


def vllm_asleep(s: Setting) -> float:
    """What of it stays on a GPU between two rollouts. The rest was allocated in pools that sleeping unmaps."""
    return CUDA_GRAPHS if s.vllm is not None and s.vllm_sleep and not s.on_cpu else 0.0


def vllm_needs(shape: ModelShape, work: Workload, s: Setting, device_bytes: int, rows: int = 1) -> float:
    """Bytes of a GPU that hold vLLM with room for `rows` answers of full length; with none it does not start.

    Weights, CUDA graphs, the cache, and the larger of two moments that vLLM measures before it sizes its cache: a
    prefill of max_num_batched_tokens (residual, its norm, gate and up, their product) and the sampling of all rows
    (in float32 logits, again, their log-probs, probabilities and noise: so the model runner V1, which may be asked for;
    V2, the default, keeps two of the five).
    """
    b, columns = s.dtype_bytes, work.prompt + work.hint + work.response
    tokens = 16_384 if device_bytes >= 70 << 30 else 8192  # what vLLM.LLM chooses (on an A100 always the smaller)
    prefill = tokens * b * (2 * shape.hidden + 3 * shape.intermediate / s.vllm_ranks)
    sampling = work.rows * shape.vocabulary * 5 * FLOAT32
    block = kv_cache(shape, work, s, 1) / columns * BLOCK / s.vllm_ranks
    cache = (rows * -(-columns // BLOCK) + 1) * block
    return b * shape.parameters / s.vllm_ranks + CUDA_GRAPHS + max(prefill, sampling) + cache


def vllm_rows(shape: ModelShape, work: Workload, s: Setting, device_bytes: int) -> int:
    """Answers of full length, none shared, that vLLM's cache on a GPU has room for; below 0 if not even for itself."""
    none, one = (vllm_needs(shape, work, s, device_bytes, rows) for rows in (0, 1))
    return math.floor((vllm_share(shape, work, s, device_bytes) - none) / (one - none))


def weights_under_way(shape: ModelShape, s: Setting) -> float:
    """The most that handing the weights to vLLM holds beside the trainer's and vLLM's own.

    vLLM builds each of its layers (query, key and value are one, gate and up are one) anew before it copies it into the
    place that its CUDA graphs know. Under ZeRO-3 a bucket of parameters is gathered: twice, as DeepSpeed's flat buffer
    and its pieces, then as the pieces and their copies, of which the copies are still there while vLLM loads them. The
    embedding fills a bucket of its own, and so does a tied head. A LoRA weight is merged in four float32 terms.
    """
    b = s.dtype_bytes
    linears = [out * inner for out, inner in shape.linears]
    built = b * max(shape.embedding, sum(linears[:3]), sum(linears[4:6])) / s.vllm_ranks
    merging = 0.0 if s.lora_rank is None else 4.0 * FLOAT32 * max(linears)
    if s.stage < 3:
        return max(built, merging)
    bucket = max(b * shape.embedding, min(BUCKET_BYTES, b * shape.parameters))
    return bucket + max(bucket, built, merging)
