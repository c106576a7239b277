"""The losses as nn.Modules: numbers and switches in the constructor, tensors in the call. They own no parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .api import linear_guide_loss, linear_policy_loss, linear_rise_loss
from .results import GuideLoss, PolicyLoss, RiseLoss

_TENSOR_KEYWORDS = {"bias", "ref_logprob", "behaviour_logprob"}


class _LinearLoss(nn.Module):
    """Takes the keyword arguments of `function` that are not tensors; unknown ones raise TypeError."""

    function: Callable[..., Any]

    def __init__(self, **options: Any):
        super().__init__()
        parameters = inspect.signature(type(self).function).parameters.values()
        allowed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in _TENSOR_KEYWORDS]
        unknown = sorted(options.keys() - set(allowed))
        if unknown:
            raise TypeError(
                f"{type(self).__name__}: unknown option {', '.join(unknown)}; expected {', '.join(allowed)}"
            )
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LinearGuideLoss(_LinearLoss):
    """Module form of linear_guide_loss: LinearGuideLoss(gamma=0.1)(hidden, weight, target, token_weight)."""

    function = staticmethod(linear_guide_loss)

    def forward(
        self, hidden: Tensor, weight: Tensor, target: Tensor, token_weight: Tensor, **tensors: Any
    ) -> GuideLoss:
        return linear_guide_loss(hidden, weight, target, token_weight, **tensors, **self.options)


class LinearPolicyLoss(_LinearLoss):
    """Module form of linear_policy_loss; ref_logprob, behaviour_logprob and bias are keywords of the call."""

    function = staticmethod(linear_policy_loss)

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        token_weight: Tensor,
        advantage: Tensor,
        old_logprob: Tensor | None = None,
        **tensors: Any,
    ) -> PolicyLoss:
        return linear_policy_loss(
            hidden, weight, target, token_weight, advantage, old_logprob, **tensors, **self.options
        )


class LinearRiseLoss(_LinearLoss):
    """Module form of linear_rise_loss; ref_logprob, behaviour_logprob and bias are keywords of the call."""

    function = staticmethod(linear_rise_loss)

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        token_weight: Tensor,
        advantage: Tensor,
        is_guide: Tensor,
        old_logprob: Tensor | None = None,
        **tensors: Any,
    ) -> RiseLoss:
        return linear_rise_loss(
            hidden, weight, target, token_weight, advantage, is_guide, old_logprob, **tensors, **self.options
        )
