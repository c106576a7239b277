"""How vLLM shares a GPU with the trainer. Every key is explained here; unknown keys are refused."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class VllmConfig(BaseModel):
    """On a CPU there is no memory to hand back and forth: the cache is as large as `max_rows` answers need."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    memory_fraction: float = Field(
        0.5, gt=0, lt=1, description="Share of a GPU's memory for vLLM's weights and cache while it is awake."
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="Ranks that hold one copy of the model together; must divide the number of ranks. rollout.max_rows "
        "then holds for their answers together.",
    )
    sleep: Literal[0, 1, 2] = Field(
        2,
        description="What vLLM gives back while the policy trains (GPU): 0 nothing; 1 its cache, while weights "
        "wait in host memory; 2 cache and weights, which the sync sends again anyway. At 1 and 2 Adam's moments "
        "wait in host memory while answers are sampled.",
    )
