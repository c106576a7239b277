"""From the engine's configuration to the memory plan's terms."""

from __future__ import annotations

from .config import EngineConfig
from .deepspeed_config import deepspeed_config
from .memory_plan import Setting
from .rollout.vllm_config import VllmConfig


def setting_of(
    config: EngineConfig, *, ranks: int, on_cpu: bool, reference: bool = False, vllm: VllmConfig | None = None
) -> Setting:
    """Stage and bucket sizes are those of the DeepSpeed configuration that would be built, raw settings included.

    on_cpu: plan for a CPU, else for a GPU, whatever this machine is; dtype auto and overlap_comm follow it.
    """
    if config.dtype == "auto":
        config = config.model_copy(update={"dtype": "float32" if on_cpu else "bfloat16"})
    zero = deepspeed_config(config, ranks)["zero_optimization"]
    raw = config.deepspeed.get("zero_optimization", {})
    return Setting(
        ranks=ranks,
        stage=zero["stage"],
        dtype_bytes=config.torch_dtype.itemsize,
        checkpointing=config.activation_checkpointing,
        head_budget=config.head_budget_mib << 20,
        bucket=int(zero.get("reduce_bucket_size", Setting.bucket)),
        overlap=bool(raw.get("overlap_comm", not on_cpu)),
        live=int(zero.get("stage3_max_live_parameters", Setting.live)),
        offload_optimizer="offload_optimizer" in zero,
        offload_parameters="offload_param" in zero,
        lora_rank=None if config.lora is None else config.lora.rank,
        reference=reference,
        on_cpu=on_cpu,
        vllm=None if vllm is None else vllm.memory_fraction,
        vllm_ranks=1 if vllm is None else vllm.tensor_parallel_size,
        vllm_sleep=Setting.vllm_sleep if vllm is None else vllm.sleep,
    )
