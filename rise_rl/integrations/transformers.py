"""Losses and log-probs of a transformers causal language model without its vocabulary logits.

    from rise_rl.integrations.transformers import apply_rise_head
    apply_rise_head(model)

Afterwards `model(input_ids)` still gives logits, so generation works, and
- `model(input_ids, labels=labels)` gives the model's own loss, `num_items_in_batch` included, and `log_probs`;
- `model(input_ids, labels=labels, rise=f)` calls f(hidden [N, D], weight, target [N], bias=, softcap=), a function of
  rise_kernels with its other arguments bound, on the N = B (T - 1) positions that `labels[:, 1:]` names, row by row.
  Its result is `output.rise`, its loss, if it has one, `output.loss`.

The weight is read where the head is called, as a module inside the model's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from rise_kernels import PolicyLoss, linear_policy_loss

IGNORE = -100
Head = Callable[..., Any]


@dataclass
class RiseOutput(ModelOutput):
    """`log_probs`: float32 [B, T - 1] of `labels[:, 1:]` ([B, T] with `shift_labels`), 0 where the label is ignored;
    detached where `rise` formed its gradients in the forward pass. `rise`: what the function returned, rows flattened.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    rise: Any = None


@dataclass
class _Applied:
    head: nn.Linear
    softcap: float | None
    previous: Callable[..., Any] | None  # a forward that someone else had set on the instance


def apply_rise_head(model: PreTrainedModel) -> PreTrainedModel:
    """Makes `model` (of a PEFT model, its base) compute losses as above, in place, and returns it.

    No parameter, module or name changes. Raises ValueError, before anything is changed, where losses would be wrong: a
    head that is not a plain nn.Linear (an adapter on it, quantised), a loss of the model's own, logits that are not
    the head's output under `final_logit_softcapping`. The last is seen by running the model on eight tokens, so its
    weights must be there: neither on the meta device nor partitioned by DeepSpeed's ZeRO-3.
    """
    model = _base(model)
    if hasattr(model, "_rise"):
        raise ValueError("model: apply_rise_head was called on it already; remove_rise_head undoes it")
    head = _plain_head(model)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if model.loss_function is not ForCausalLMLoss:
        name = getattr(model.loss_function, "__name__", model.loss_function)
        raise ValueError(f"model: expected the loss ForCausalLMLoss, found {name}, which needs the logits")
    _check_logits(model, head, softcap)
    model._rise = _Applied(head, softcap, vars(model).get("forward"))
    head.forward = MethodType(_head_forward, head)
    model.forward = MethodType(wraps(type(model).forward)(_forward), model)
    return model


def remove_rise_head(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes `apply_rise_head`. Raises ValueError if there is nothing to undo."""
    model = _base(model)
    if not hasattr(model, "_rise"):
        raise ValueError("model: apply_rise_head was not called on it")
    del model._rise.head.forward, model.forward
    if model._rise.previous is not None:
        model.forward = model._rise.previous
    del model._rise
    return model


def causal_lm_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, *, num_items_in_batch: Tensor | int | None = None, **head: Any
) -> PolicyLoss:
    """Cross-entropy: the sum of -log p over the targets that are not -100, divided by `num_items_in_batch` or their
    number (0 if there are none).

    An advantage of 1 at ratio 1 has the slope of -log p, so the gradients are formed in the forward pass.
    """
    kept = target != IGNORE
    items = kept.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    token_weight = kept / torch.as_tensor(items, device=target.device)
    result = linear_policy_loss(hidden, weight, target, token_weight, torch.ones_like(token_weight), **head)
    return result._replace(loss=with_value(result.loss, -(token_weight * result.logprob).sum()))


def with_value(loss: Tensor, value: Tensor) -> Tensor:
    """The gradients of `loss` and the value of `value`."""
    return value.detach() + (loss - loss.detach())


def _base(model: Any) -> PreTrainedModel:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _plain_head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(f"lm_head: expected a plain nn.Linear, found {type(head).__name__}")
    if "forward" in vars(head):
        raise ValueError("lm_head: its forward was replaced already (by hooks of device_map, say)")
    if head.weight.numel() == 0 or head.weight.is_meta:
        raise ValueError("lm_head: its weight is not here (partitioned by ZeRO-3, or on the meta device)")
    return head


@torch.no_grad()
def _check_logits(model: PreTrainedModel, head: nn.Linear, softcap: float | None) -> None:
    """Raises ValueError unless logits = softcap(head(last_hidden_state)), within a 16-bit format's rounding."""
    backbone = model.base_model
    if backbone is model:
        raise ValueError(f"model: expected a backbone below its head, found none in {type(model).__name__}")
    seen: dict[str, Tensor] = {}
    hooks = [
        backbone.register_forward_hook(lambda _m, _a, out: seen.update(backbone=out[0])),
        head.register_forward_hook(lambda _m, args, out: seen.update(head=args[0], logits=out)),
    ]
    training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        given = model(input_ids=torch.arange(8, device=head.weight.device)[None], use_cache=False).logits.float()
    finally:
        for module, mode in training:
            module.training = mode
        for hook in hooks:
            hook.remove()
    expected = seen["logits"].float()
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    for what, found, wanted in (
        ("the head's input", seen["head"].float(), seen["backbone"].float()),
        ("the logits", given, expected),
    ):
        if found.shape != wanted.shape or not (found - wanted).norm() <= 0.02 * wanted.norm():
            raise ValueError(
                f"model: {type(model).__name__} changes {what} (by a scale in its config?), which is not supported"
            )


def _head_forward(self: nn.Linear, hidden: Tensor, rise: Head | None = None, softcap: float | None = None) -> Any:
    if rise is None:
        return linear(hidden, self.weight, self.bias)
    return rise(hidden, self.weight, bias=self.bias, softcap=softcap)


def _forward(
    self: Any,
    *args: Any,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    rise: Head | None = None,
    **kwargs: Any,
) -> Any:
    """The model's forward pass; its docstring and signature are replaced by the model's own."""
    applied: _Applied = self._rise
    if labels is None and shift_labels is None:
        if rise is not None:
            raise ValueError("rise: expected labels (or shift_labels) too, which say what to score; found none")
        original = applied.previous or MethodType(type(self).forward, self)
        return original(*args, **kwargs)
    if self.get_output_embeddings() is not applied.head:
        raise ValueError(
            f"lm_head: replaced since apply_rise_head, by {type(self.get_output_embeddings()).__name__}; an adapter on "
            "the head is not supported, and a resized head needs apply_rise_head again"
        )
    hidden = _hidden_states(self, args, kwargs)
    if labels is not None and shift_labels is None:
        hidden, target = hidden[:, :-1], labels[:, 1:]
    else:
        target = shift_labels
    assert target is not None
    shape, target = target.shape, target.reshape(-1).to(hidden.device)

    def score(rows: Tensor, weight: Tensor, **head: Any) -> Any:
        if rise is not None:
            return rise(rows, weight, target, **head)
        return causal_lm_loss(rows, weight, target, num_items_in_batch=num_items_in_batch, **head)

    result = applied.head(hidden.reshape(-1, hidden.shape[-1]), score, applied.softcap)
    return RiseOutput(loss=getattr(result, "loss", None), log_probs=result.logprob.view(shape), rise=result)


def _hidden_states(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """last_hidden_state [B, T, D] of the backbone, given what the whole model was given."""
    names = list(signature(type(model).forward).parameters)[1:]
    named = dict(zip(names, args)) | kwargs
    config = model.config.get_text_config()
    if named.get("output_router_logits", getattr(config, "output_router_logits", False)):
        raise ValueError("output_router_logits: the load-balancing loss is not supported; expected False")
    logits_to_keep = named.pop("logits_to_keep", 0)
    if not isinstance(logits_to_keep, int) or logits_to_keep:
        raise ValueError("logits_to_keep: expected 0 beside labels, whose -100 say what not to score")
    named.pop("return_dict", None)
    return model.base_model(**{"use_cache": False} | named).last_hidden_state
