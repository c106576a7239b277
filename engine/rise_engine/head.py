"""The model's output head, replaced: the same weight, but hidden states and targets in, losses or log-probs out."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from rise_kernels.api import linear_logprob, linear_rise_loss
from rise_kernels.backend import Options
from rise_kernels.results import RiseLoss, TokenStats
from rise_kernels.token_losses import LossSpec, TokenRows


class RiseHead(nn.Module):
    """Owns the Parameter of the `nn.Linear` it replaces, tied to the embedding or not.

    head(hidden [..., D]) gives logits, as the linear layer did: for sampling, and for any code that still expects them.
    head(hidden [n, D], target int64 [n], temperature=T) gives log-probs and entropy (one pass, full logits never held).
    head(hidden, target, rows, temperature=T) gives the weighted RISE loss.
    """

    def __init__(self, linear: nn.Linear, spec: LossSpec, budget_mib: int) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.spec = spec
        self.options = Options(budget=budget_mib << 20)

    def forward(
        self,
        hidden: Tensor,
        target: Tensor | None = None,
        rows: TokenRows | None = None,
        *,
        temperature: float = 1.0,
        with_entropy: bool = True,
    ) -> Tensor | TokenStats | RiseLoss:
        if target is None:
            return nn.functional.linear(hidden, self.weight, self.bias)
        shared = {
            "bias": self.bias,
            "temperature": temperature,
            "with_entropy": with_entropy,
            "options": self.options,
        }
        if rows is None:
            return linear_logprob(hidden, self.weight, target, **shared)
        spec = self.spec
        return linear_rise_loss(
            hidden,
            self.weight,
            target,
            rows.token_weight,
            rows.advantage,
            rows.is_guide,
            rows.old_logprob,
            gamma=spec.gamma,
            guide=spec.guide,
            clip_low=spec.clip_low,
            clip_high=spec.clip_high,
            dual_clip=spec.dual_clip,
            ref_logprob=rows.ref_logprob,
            kl_coef=spec.kl_coef,
            kl_estimator=spec.kl_estimator,
            behaviour_logprob=rows.behaviour_logprob,
            is_cap=spec.is_cap,
            **shared,
        )

    def extra_repr(self) -> str:
        return f"vocabulary={self.weight.shape[0]}, hidden={self.weight.shape[-1]}, bias={self.bias is not None}"


def install_head(model: PreTrainedModel, spec: LossSpec, budget_mib: int) -> RiseHead:
    """Replaces `model.lm_head` in place and returns the new one.

    Raises ValueError for a head that is not a plain linear layer (a LoRA-wrapped one, say), and for models whose logits
    are transformed afterwards (Gemma's softcap, Granite's and Cohere's scaling): their log-probs would be wrong.
    """
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear:
        raise ValueError(f"lm_head: expected a plain nn.Linear, found {type(linear).__name__}")
    for key in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(model.config, key, None) not in (None, 1, 1.0):
            raise ValueError(f"model: config.{key} changes the logits after the head, which is not supported")
    head = RiseHead(linear, spec, budget_mib)
    model.set_output_embeddings(head)
    return head
