"""TRL's GRPOTrainer with its log-probs and its policy loss from rise_kernels. Written for, and tested with, TRL 1.16.

    from rise_rl.integrations.trl import RiseGRPOTrainer as GRPOTrainer

or, for a subclass of one's own, `class MyTrainer(RiseGRPOMixin, MyGRPOTrainer)`. Data, generation, rewards,
advantages, metrics and the loss's value stay TRL's: its own code runs on the log-probs. The gradients are formed in the
head's forward pass, in 6 N V D FLOPs instead of the 8 of a log-prob function with a loss around it. In every training
micro-batch they are compared with the derivative of TRL's own loss by each log-prob, so that a difference (another
version of TRL, a subclass with another loss) is an error and not a quietly different training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer.utils import FusedCausalLMOutput

from rise_kernels import PolicyLoss, linear_logprob, linear_policy_loss
from rise_kernels.token_losses import LOG_RATIO_BOUND, LossSpec, TokenRows, token_losses

from .transformers import apply_rise_head, with_value

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo")
"""At `importance_sampling_level="token"`: sums over tokens of a function of the token's own log-prob."""


class RiseGRPOMixin:
    """Goes before GRPOTrainer, or a subclass of it, among the bases. Raises ValueError, once TRL has accepted the
    arguments, for options that need more than a token's own log-prob (see `unsupported`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refused = unsupported(self)
        if refused:
            raise ValueError("\n".join(["GRPOConfig: the RISE backend cannot compute", *(f"  {r}" for r in refused)]))
        for model in (self.model, self.ref_model):  # type: ignore[attr-defined]
            if model is not None:
                _answer_with_rise(self.accelerator.unwrap_model(model), self.temperature)  # type: ignore[attr-defined]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        head = _PolicyHead(self, model, inputs)
        value = super()._compute_loss(head, head.inputs)  # type: ignore[misc]
        if torch.is_grad_enabled():
            head.check(*torch.autograd.grad(value, head.log_probs))
        return with_value(head.result.loss, value)


class RiseGRPOTrainer(RiseGRPOMixin, GRPOTrainer):
    """GRPOTrainer whose log-probs and policy loss come from rise_kernels."""


def unsupported(trainer: Any) -> list[str]:
    """What of a GRPOTrainer's options this backend cannot honour, each with its reason."""
    args = trainer.args
    high = 1 + trainer.epsilon_high
    refusals = {
        f"loss_type={trainer.loss_type!r}: expected one of {', '.join(LOSS_TYPES)}": trainer.loss_type
        not in LOSS_TYPES,
        f"importance_sampling_level={trainer.importance_sampling_level!r}: a sequence's ratio needs all of its tokens "
        "before the loss of any; expected 'token'": trainer.importance_sampling_level != "token",
        "off_policy_mask_threshold: it needs all tokens of a sequence before the loss of any; expected None": (
            trainer.off_policy_mask_threshold is not None
        ),
        "entropy_coef, use_adaptive_entropy: the entropy has no gradient here; expected 0 and False": (
            trainer._entropy_bonus_enabled
        ),
        "use_bias_correction_kl with loss_type='cispo', where answers train more than once or under vLLM's correction: "
        "CISPO's own ratio is held constant, so that none is left whose derivative the KL term could take; expected "
        "False, or beta=0": (
            trainer.loss_type == "cispo"
            and trainer.beta != 0
            and args.use_bias_correction_kl
            and _ratios_differ(trainer)
        ),
        f"delta={args.delta}: expected None, or more than 1 + epsilon_high ({high:g})": (
            args.delta is not None and trainer.loss_type in CLIPPED and args.delta <= high
        ),
        "cast_lm_head_to_fp32: logits are accumulated in float32 whatever the head's type; expected False": (
            args.cast_lm_head_to_fp32
        ),
        "router_aux_loss_coef: the load-balancing loss is not supported; expected 0": trainer.aux_loss_enabled,
    }
    return [reason for reason, refused in refusals.items() if refused]


def _ratios_differ(trainer: Any) -> bool:
    """Whether TRL keeps the log-probs of before the first update; without them the ratio is 1."""
    reused = trainer.args.steps_per_generation * trainer.num_iterations
    vllm = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    return bool(vllm or trainer.args.gradient_accumulation_steps % reused)


def loss_spec(trainer: Any) -> LossSpec:
    """The scalars of TRL's loss, for its slope.

    CISPO's capped, detached ratio is an importance factor on the slope of -A log p.
    """
    kl = {"kl_coef": trainer.beta, "kl_estimator": "k3_ratio" if trainer.args.use_bias_correction_kl else "k3"}
    if trainer.loss_type == "cispo":
        return LossSpec(is_cap=trainer.epsilon_high, **kl)
    clip = {"clip_low": trainer.epsilon_low, "clip_high": trainer.epsilon_high, "dual_clip": trainer.args.delta}
    return LossSpec(**clip, **kl)


def token_weights(trainer: Any, mask: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """float32 [B, C]: what each completion token counts in the micro-batch's loss, accumulation included.

    mask [B, C]; num_items_in_batch: tokens of the whole generation batch, on all processes.
    """
    training = trainer.model.training
    windows = trainer.current_gradient_accumulation_steps if training else 1.0
    kept, kind = mask.float(), trainer.loss_type
    if kind == "grpo":
        items = kept.sum(-1, keepdim=True).clamp(min=1.0) * len(kept) * windows
    elif kind == "bnpo":
        items = kept.sum().clamp(min=1.0) * windows
    elif kind == "dr_grpo":
        items = len(kept) * trainer.max_completion_length * windows
    elif kind == "luspo":
        items = len(kept) * windows
    else:  # dapo, cispo
        items = num_items_in_batch.clamp(min=1.0) / trainer.accelerator.num_processes
        if training:
            items = items * windows / trainer.args.steps_per_generation
    return kept / items


class _PolicyHead:
    """Stands where TRL's loss calls its model: forms the policy loss in that call and returns detached log-probs."""

    result: PolicyLoss
    log_probs: Tensor

    def __init__(self, trainer: Any, model: Any, inputs: Mapping[str, Any]) -> None:
        self.trainer, self.model = trainer, model
        mask = inputs["completion_mask"]
        self.mask = mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]
        # Rows outside the mask are not computed: their log-prob is 0, whose ratio to another value could overflow.
        given = {name: inputs.get(name) for name in ("old_per_token_logps", "ref_per_token_logps")}
        given = {name: torch.where(self.mask.bool(), x, 0.0) for name, x in given.items() if x is not None}
        self.inputs = {**inputs, **given}
        self.spec = loss_spec(trainer)
        if "old_per_token_logps" not in given:
            self.spec = replace(self.spec, is_cap=None)  # nothing to cap: the ratio is 1

    def __call__(self, **kwargs: Any) -> FusedCausalLMOutput:
        output = self.model(**kwargs, rise=self._loss)
        self.log_probs = output.log_probs.detach().requires_grad_(torch.is_grad_enabled())
        return FusedCausalLMOutput(log_probs=self.log_probs, entropy=output.entropy)

    def _loss(self, hidden: Tensor, weight: Tensor, target: Tensor, **head: Any) -> PolicyLoss:
        trainer, spec = self.trainer, self.spec
        entropy: Tensor | None = None
        entropy_mask: Tensor | None = None
        if trainer.top_entropy_quantile < 1.0:
            with torch.no_grad():
                stats = linear_logprob(
                    hidden, weight, target, temperature=trainer.temperature, with_entropy=True, **head
                )
            entropy = stats.entropy
            assert entropy is not None
            tail = entropy.view(len(self.mask), -1)[:, -self.mask.shape[1] :]
            entropy_mask = trainer.get_high_entropy_mask(tail, self.mask, 1 - trainer.top_entropy_quantile)
        self.rows = self._rows(target, entropy_mask)
        self.result = linear_policy_loss(
            hidden,
            weight,
            target,
            self.rows.token_weight,
            self.rows.advantage,
            self.rows.old_logprob,
            clip_low=spec.clip_low,
            clip_high=spec.clip_high,
            dual_clip=spec.dual_clip,
            ref_logprob=self.rows.ref_logprob,
            kl_coef=spec.kl_coef,
            kl_estimator=spec.kl_estimator,
            behaviour_logprob=self.rows.behaviour_logprob,
            is_cap=spec.is_cap,
            temperature=trainer.temperature,
            with_entropy=entropy is None,
            **head,
        )
        return self.result if entropy is None else self.result._replace(entropy=entropy)

    def _rows(self, target: Tensor, entropy_mask: Tensor | None) -> TokenRows:
        """The per-token vectors on all positions of the micro-batch, prompts included (weight 0), flattened."""
        trainer, inputs = self.trainer, self.inputs
        advantage = inputs["advantages"]
        advantage = (advantage if advantage.dim() == 2 else advantage[:, None]).expand(self.mask.shape)
        # What multiplies the policy term and not the KL is not negative, so it may go into the advantage.
        if entropy_mask is not None:
            advantage = advantage * entropy_mask
        if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
            advantage = advantage * inputs["importance_sampling_ratio"]
        old, behaviour = inputs.get("old_per_token_logps"), None
        if trainer.loss_type == "cispo":
            old, behaviour = None, old
            if behaviour is None:  # a ratio of 1, capped
                advantage = advantage * min(1.0, trainer.epsilon_high)

        def spread(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            whole = x.new_zeros(len(x), target.numel() // len(x))
            whole[:, -x.shape[1] :] = x
            return whole.flatten()

        weight = spread(token_weights(trainer, self.mask, inputs["num_items_in_batch"]))
        assert weight is not None
        return TokenRows(
            token_weight=weight,
            is_guide=torch.zeros_like(target, dtype=torch.bool),
            advantage=spread(advantage),
            old_logprob=spread(old),
            ref_logprob=spread(inputs.get("ref_per_token_logps")),
            behaviour_logprob=spread(behaviour),
        )

    @torch.no_grad()
    def check(self, theirs: Tensor) -> None:
        """RuntimeError unless `theirs` [B, T - 1], the derivative of TRL's loss by each log-prob, is this loss's."""
        logprob, rows = self.log_probs.flatten(), self.rows
        ours = rows.token_weight * token_losses(logprob, rows, self.spec).dloss
        # Beyond e^20 the kernels hold a ratio, as verl does and TRL does not.
        others = [x for x in (rows.old_logprob, rows.ref_logprob) if x is not None]
        held = sum(((logprob - x).abs() > LOG_RATIO_BOUND).int() for x in others) if others else 0
        gap = torch.where(torch.as_tensor(held, device=ours.device) > 0, 0.0, theirs.flatten() - ours).abs().max()
        largest = theirs.abs().max()
        if not gap <= 1e-4 * largest:
            raise RuntimeError(
                f"the derivative of TRL's loss by a log-prob (largest {float(largest):.3g}) differs from the RISE "
                f"backend's by {float(gap):.3g}: another TRL than 1.16, a subclass with another loss, or a value that "
                "is not finite"
            )


def _answer_with_rise(model: Any, temperature: float) -> None:
    """What TRL's own head does on `fused_lm_head=True`, with rise_kernels; `rise` replaces the plain log-probs."""
    model = apply_rise_head(model.get_base_model() if is_peft_model(model) else model)
    inner = model.forward.__func__

    def forward(self: Any, *args: Any, fused_lm_head: bool = False, rise: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return inner(self, *args, rise=rise, **kwargs)
        rise = rise or partial(linear_logprob, temperature=temperature, with_entropy=True)
        output = inner(self, *args, rise=rise, **kwargs)
        entropy = output.rise.entropy.view_as(output.log_probs)
        return FusedCausalLMOutput(loss=output.loss, log_probs=output.log_probs, entropy=entropy)

    model.forward = MethodType(wraps(inner)(forward), model)
