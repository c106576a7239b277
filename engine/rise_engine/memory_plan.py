"""What a training run holds in memory at its worst moments: arithmetic on shapes, nothing is loaded.

A step is taken apart into the phases in which its peak can lie, and each phase into what is held then. The amounts
follow what the engine and DeepSpeed 0.19 allocate, read in their sources and checked against measured peaks
(docs/memory.md).
All amounts are bytes on one rank. E = vocabulary * hidden, P = all parameters, b = bytes of the training dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rise_kernels.chunked import CPU_WORKSPACE

from .deepspeed_config import REDUCE_BUCKET
from .rollout_memory import FLOAT32, kv_cache, vllm_asleep, vllm_share, weights_under_way

CAUSAL_LMS = ("qwen3", "qwen2", "llama", "mistral")
"""model_type of the dense decoders whose parameters and activations are known here."""


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder: RMSNorms, gated MLP, grouped-query attention. context: tokens (max_position_embeddings)."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    context: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the fields of a transformers config.json. Raises ValueError for a model that is not planned here."""
        kind = config.get("model_type")
        if kind not in CAUSAL_LMS:
            raise ValueError(f"model_type: expected one of {', '.join(CAUSAL_LMS)}, found {kind!r}")
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        needed = (*sizes, "max_position_embeddings")
        missing = [key for key in needed if not isinstance(config.get(key), int)]
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing in the model's configuration")
        heads = config["num_attention_heads"]
        return cls(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=kind == "qwen3",
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            context=config["max_position_embeddings"],
        )

    @property
    def embedding(self) -> int:
        """E, the elements of the embedding and of the head alike."""
        return self.vocabulary * self.hidden

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of a layer's seven linear maps: q, k, v, o, gate, up, down."""
        q, kv, d, i = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.intermediate
        return (q, d), (kv, d), (kv, d), (d, q), (i, d), (i, d), (d, i)

    def matrices(self) -> Iterator[int]:
        """Elements of every parameter of two dimensions, in the model's order."""
        yield self.embedding
        for _ in range(self.layers):
            for out, inner in self.linears:
                yield out * inner
        if not self.tied:
            yield self.embedding

    def vectors(self) -> Iterator[int]:
        """Elements of every norm and bias."""
        for _ in range(self.layers):
            if self.qkv_bias:
                yield from (out for out, _ in self.linears[:3])
            if self.qk_norm:
                yield from (self.head_dim, self.head_dim)
            yield from (self.hidden, self.hidden)
        yield self.hidden

    @property
    def parameters(self) -> int:
        return sum(self.matrices()) + sum(self.vectors())


@dataclass(frozen=True)
class Workload:
    """What passes through one rank. Lengths in tokens: prompt and response at their longest.

    hint: what guidance may add to a prompt (rollouts only). group: trained responses of a prompt. micro_batch: budget
    of one forward pass. packed: the group's prompt computed once, else one padded sequence a row. several: whether an
    update has more than one micro-batch. rows: answers decoded together.
    """

    prompt: int
    response: int
    group: int
    micro_batch: int
    packed: bool
    several: bool
    rows: int
    hint: int = 0

    @property
    def responses(self) -> int:
        """Responses in it; of one prompt's group where it is packed. A sequence longer than the budget is alone."""
        if not self.packed:
            return self.tokens // (self.prompt + self.response)
        return max(1, min(self.group, (self.micro_batch - self.prompt) // self.response))

    @property
    def tokens(self) -> int:
        """Positions of the largest micro-batch: its budget filled by shorter sequences, or the longest one."""
        longest = self.prompt + self.response
        most = self.prompt + self.group * self.response if self.packed else self.group * longest
        return max(longest, self.micro_batch if self.several else min(self.micro_batch, most))

    @property
    def scored(self) -> int:
        """Response tokens of it: the rows of the head."""
        return self.tokens - self.prompt * (1 if self.packed else self.responses)

    @property
    def keys(self) -> int:
        """Key rows that attention gathers: the packed layout repeats the prompt's for every response."""
        alone = not self.packed or self.responses == 1
        return self.tokens if alone else self.tokens + self.responses * self.prompt

    @property
    def square(self) -> bool:
        """Packed responses longer than their prompt attend with its queries again, without a mask (attention.py)."""
        return self.packed and self.responses > 1 and self.response > self.prompt

    @property
    def queries(self) -> int:
        """Query rows that attention gathers."""
        return self.keys if self.square else self.tokens

    @property
    def mask(self) -> int:
        """Elements of its attention mask, one for all responses and layers; plain causal rows have none."""
        if not self.packed or self.responses == 1 or self.square:
            return 0
        return self.response * (self.prompt + self.response)


@dataclass(frozen=True)
class Setting:
    """How the policy is held. dtype_bytes: 4 or 2. bucket: DeepSpeed's reduce_bucket_size in elements; overlap: its
    overlap_comm, from stage 2 on; live: stage3_max_live_parameters. head_budget: bytes. lora_rank: None trains every
    weight. on_cpu: device and host are one memory. vllm: share of a GPU that vLLM takes while it samples, None for
    transformers rollouts; vllm_ranks: how many hold one copy of its model; vllm_sleep: what it gives back in between
    (rollout/vllm_config.py).
    """

    ranks: int
    stage: int
    dtype_bytes: int
    checkpointing: bool
    head_budget: int
    bucket: int = REDUCE_BUCKET
    overlap: bool = False
    live: int = 1_000_000_000
    offload_optimizer: bool = False
    offload_parameters: bool = False
    lora_rank: int | None = None
    reference: bool = False
    on_cpu: bool = False
    vllm: float | None = None
    vllm_ranks: int = 1
    vllm_sleep: int = 2


def saved_per_token(shape: ModelShape, work: Workload, setting: Setting) -> float:
    """Bytes that one layer keeps for its backward pass, per token, without attention masks.

    transformers' RMSNorm keeps its input in float32, the normalized rows (for its weight's gradient) and, by the linear
    map behind it, the result; attention keeps q, k, v, its output and logsumexp, gathered copies of them where rows are
    packed; the MLP keeps gate, silu(gate), up and their product. Each adapter keeps its narrow rows, and frozen norms
    no normalized ones.
    """
    b, lora = setting.dtype_bytes, setting.lora_rank
    d, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    normalized = b if lora is None else 0
    norms = 2 * (FLOAT32 + normalized + b) * d
    qk_norms = (FLOAT32 + normalized) * (q + kv) if shape.qk_norm else 0
    queries, keys = work.queries / work.tokens, work.keys / work.tokens
    attention = b * ((1 + 2 * queries if work.packed else 2) * q + 2 * kv * keys) + FLOAT32 * shape.heads * queries
    rms = FLOAT32 * (2 + (shape.heads + shape.kv_heads if shape.qk_norm else 0))
    adapters = 0 if lora is None else b * lora * len(shape.linears)
    return norms + qk_norms + attention + rms + 4 * b * shape.intermediate + adapters


def activations(shape: ModelShape, work: Workload, setting: Setting) -> tuple[float, float]:
    """(when the forward pass ends, at most during the backward pass): what all layers hold, masks included."""
    b, t = setting.dtype_bytes, work.tokens
    layer = t * saved_per_token(shape, work, setting)
    kept = t * b * shape.hidden if setting.checkpointing else layer
    final = t * (FLOAT32 + (b if setting.lora_rank is None else 0)) * shape.hidden + b * work.mask
    forward = shape.layers * kept + final + t * b * shape.hidden
    moving = 2 * t * b * shape.intermediate  # gradients inside the MLP
    return forward, shape.layers * kept + final + (layer if setting.checkpointing else 0) + moving


def head_workspace(shape: ModelShape, work: Workload, setting: Setting) -> int:
    """Temporary memory of the fused head: its budget, or less where all rows fit. On a CPU bfloat16 weights are cast
    slab by slab, a quarter of the budget at most.
    """
    budget = min(setting.head_budget, CPU_WORKSPACE) if setting.on_cpu else setting.head_budget
    slab = min(budget // 4, 6 * shape.embedding) if setting.on_cpu and setting.dtype_bytes < FLOAT32 else 0
    return min(budget, work.scored * (4 * shape.vocabulary + 12 * shape.hidden) + slab)


def full_logits(shape: ModelShape, work: Workload) -> int:
    """What float32 logits of the same rows and their gradient would take."""
    return 2 * FLOAT32 * work.scored * shape.vocabulary


def trained(shape: ModelShape, setting: Setting) -> int:
    """Elements with gradients: all, or the adapters of every linear map."""
    if setting.lora_rank is None:
        return shape.parameters
    return shape.layers * sum(setting.lora_rank * (out + inner) for out, inner in shape.linears)


def kept_gradients(shape: ModelShape, setting: Setting) -> int:
    """Elements of the gradients that a rank under ZeRO-2 keeps in the parameters' own dtype: all of every tensor that
    has a part in its share, for the rank with most. (In bfloat16 it keeps exactly its share, in float32.)
    """
    if setting.lora_rank is not None or setting.ranks == 1:
        return trained(shape, setting)
    sizes = list(shape.matrices())
    share = -(-sum(sizes) // setting.ranks)
    most = [0] * setting.ranks
    start = 0
    for size in sizes:
        for rank in range(start // share, (start + size - 1) // share + 1):
            most[rank] += size
        start += size
    return max(most)


Amounts = dict[str, float]
PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer", "gradients"
GATHERED, REFERENCE = "gathered", "reference policy"
ACTIVATIONS, WORKSPACE, HEAD = "activations", "head workspace", "head dW and casts"
DEEPSPEED, CACHE, DECODING = "DeepSpeed buffers", "KV cache", "logits of decoding"
VLLM, UNDER_WAY = "vLLM", "weights under way"
ROWS = (
    PARAMETERS, GATHERED, REFERENCE, OPTIMIZER, GRADIENTS, ACTIVATIONS, WORKSPACE, HEAD, DEEPSPEED, CACHE, DECODING,
    VLLM, UNDER_WAY,
)  # fmt: skip


@dataclass(frozen=True)
class MemoryPlan:
    """phases: {phase: {what: bytes}} on the device. host: {what: bytes} that offloading puts into host memory."""

    phases: dict[str, Amounts]
    host: Amounts

    def total(self, phase: str) -> float:
        return sum(self.phases[phase].values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> float:
        return self.total(self.peak_phase)


def plan_memory(shape: ModelShape, work: Workload, setting: Setting, device_bytes: int = 0) -> MemoryPlan:
    """device_bytes: the device's memory, of which vLLM takes its share."""
    s, w, b = setting, setting.ranks, setting.dtype_bytes
    p, e, n = shape.parameters, shape.embedding, trained(shape, setting)
    head = 0 if s.lora_rank is not None else e
    share = n / w
    split = s.stage == 3
    host: Amounts = {}

    held: Amounts = {PARAMETERS: b * p / w if split else b * p}
    if split:
        held[GATHERED] = b * min(p, s.live)
    if s.reference and s.lora_rank is None:
        held[REFERENCE] = b * (p / w if split else p)
    moments = 2.0 * FLOAT32 * (n if s.stage == 0 else share)
    state = moments + (FLOAT32 * share if s.stage else 0.0)  # and float32 master weights
    if s.offload_optimizer:
        host |= {OPTIMIZER: state, GRADIENTS: 2 * FLOAT32 * share, PARAMETERS: b * share}
        held[DEEPSPEED] = b * e
    else:
        held[OPTIMIZER] = state
    if s.vllm is not None and (s.on_cpu or s.vllm_sleep == 0):
        held[VLLM] = vllm_share(shape, work, s, device_bytes)
    elif s.vllm is not None:
        held[VLLM] = vllm_asleep(s)
        if OPTIMIZER in held:
            host[OPTIMIZER] = moments
    if s.offload_parameters:
        host[PARAMETERS] = host.get(PARAMETERS, 0.0) + held.pop(PARAMETERS)

    own = FLOAT32 * (kept_gradients(shape, s) if s.stage == 2 and b == FLOAT32 else n if s.stage < 2 else share)
    if s.offload_optimizer and s.stage < 3:
        own = 0.0
    before = own if work.several or s.stage == 3 else 0.0  # gradients of earlier micro-batches
    bucket = s.bucket * b * (1 + (s.overlap and s.stage == 2)) if s.stage else 0.0
    filled = b * min(n, s.bucket)
    reducing = {
        0: 0.0,
        1: FLOAT32 * share,
        2: own if b == FLOAT32 and w == 1 else filled + FLOAT32 * min(e, share),
        3: 2 * filled,
    }[s.stage]
    from_start = bucket if s.stage == 3 or (s.stage == 1 and work.several) else 0.0
    forward, backward = activations(shape, work, s)
    if_full = reducing if n > s.bucket else 0.0  # a bucket that is full is reduced during the backward pass
    rows = work.scored * b * shape.hidden  # dH
    pending = b * head if shape.tied else 0.0  # the head's gradient waits for the embedding's

    def phase(gradients: float, buffers: float, **more: float) -> Amounts:
        names = {"acts": ACTIVATIONS, "work": WORKSPACE, "dw": HEAD}
        found = held | {GRADIENTS: gradients} | {names[k]: v for k, v in more.items()}
        found[DEEPSPEED] = found.get(DEEPSPEED, 0.0) + buffers
        return {k: v for k, v in found.items() if v}

    flat = 0.0 if s.stage == 2 and b < FLOAT32 else FLOAT32 * share
    norm = 8 * min(e / w if split else e, share)
    updating = {0: FLOAT32 * min(n, 500_000_000)}.get(s.stage, 0.0 if s.offload_optimizer else max(norm, flat))
    ended = before if work.several or s.stage == 3 else own
    after_backward = own if s.stage in (1, 2, 3) else FLOAT32 * n
    phases = {
        "head": phase(before, from_start, acts=forward + rows, work=head_workspace(shape, work, s), dw=4.0 * head),
        "dW": phase(before, from_start, acts=forward + 2 * rows, dw=(4.0 + b) * head),
        "layers": phase(before, max(from_start, bucket) + if_full, acts=backward, dw=pending),
        "embed": phase(max(ended, before), max(from_start, bucket), dw=pending + b * head),
        "reduce": phase(max(after_backward, before), max(from_start, bucket) + reducing),
        "update": phase(after_backward, (bucket if split else 0.0) + updating),
    }
    if split:
        held[DEEPSPEED] = held.get(DEEPSPEED, 0.0) + bucket  # kept for good
    phases |= _sampling(shape, work, s, held, host, device_bytes)
    if s.on_cpu:  # one memory
        phases = {name: {k: had.get(k, 0.0) + host.get(k, 0.0) for k in had | host} for name, had in phases.items()}
        host = {}
    return MemoryPlan(phases, host)


def _sampling(
    shape: ModelShape, work: Workload, s: Setting, held: Amounts, host: Amounts, device_bytes: int
) -> dict[str, Amounts]:
    """The phases in which answers are sampled, and weights handed to vLLM to sample with."""
    found = {k: v for k, v in held.items() if k != GATHERED}  # a step ends with every parameter split again
    if s.vllm is None:
        if work.rows:
            found[CACHE] = kv_cache(shape, work, s)
            # Logits, their float32 probabilities and the sampler's padded copy.
            found[DECODING] = work.rows * shape.vocabulary * (s.dtype_bytes + 3.0 * FLOAT32)
        return {"rollout": held | found}
    found[VLLM] = vllm_share(shape, work, s, device_bytes)
    if not s.on_cpu and s.vllm_sleep and OPTIMIZER in found:
        found[OPTIMIZER] -= host[OPTIMIZER]  # the moments wait there; the master weights stay
    found = {k: v for k, v in found.items() if v}
    # The first of all syncs finds vLLM awake, cache and all; later ones wake the cache when the weights are there.
    return {"sync": found | {UNDER_WAY: weights_under_way(shape, s)}, "rollout": found}
