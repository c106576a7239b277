"""Low-rank adapters through peft: the base is frozen, and whoever needs plain weights gets the adapters merged in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .config import LoraSettings
from .errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"


def add_adapters(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Wraps the chosen linear layers in place and freezes everything else. Before the head is replaced.

    Raises ValueError, naming engine.lora.target_modules, if a name matches nothing, or the head, the embedding or
    something else that is not an nn.Linear; EngineError without peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise EngineError(f"engine.lora needs the package peft, which cannot be imported: {error}") from error

    ours = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=_targets(model, settings.target_modules),
    )
    inject_adapter_in_model(ours, model)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what its frozen base does."""
    layers = [layer for _, layer in _adapted(model)]
    if not layers:
        raise ValueError("without_adapters: the model has no adapters (engine.lora is null)")
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merged(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`weights`, (name, whole tensor) in the order of `model.named_parameters()`, as the base model names them.

    W + (alpha / rank) B A, worked out in float32 and rounded once to W's type; the model itself stays as it is. Without
    adapters, everything is passed on.
    """
    layers = dict(_adapted(model))
    held: dict[str, Tensor] = {}
    for name, tensor in weights:
        layer, _, part = name.rpartition(".base_layer.")
        if layer in layers:
            if part == "weight":
                held["base"] = tensor
            else:
                yield f"{layer}.{part}", tensor
            continue
        layer, _, part = name.rpartition(f".{ADAPTER}.weight")[0].rpartition(".")
        if layer not in layers:
            yield name, tensor
            continue
        held[part] = tensor
        if len(held) == 3:
            base, a, b = held.pop("base"), held.pop("lora_A"), held.pop("lora_B")
            change = b.float() @ a.float()
            yield f"{layer}.weight", (base.float() + layers[layer].scaling[ADAPTER] * change).to(base.dtype)


def _adapted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, m) for name, m in model.named_modules() if hasattr(m, "base_layer") and hasattr(m, "lora_A"))


def _targets(model: PreTrainedModel, wanted: str | tuple[str, ...]) -> list[str]:
    """Full names of the layers to adapt (peft itself passes over a name that matches nothing if another matches)."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    modules = dict(model.named_modules())
    linear = [name for name, m in modules.items() if isinstance(m, nn.Linear) and m is not head]
    found = linear if isinstance(wanted, str) else []
    for target in () if isinstance(wanted, str) else wanted:
        matches = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not matches:
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise _refused(f"no layer is named {target!r}; linear layers: {', '.join(known)}")
        for name in matches:
            if modules[name] in (head, embedding):
                role = "output head" if modules[name] is head else "token embedding"
                raise _refused(
                    f"{name} is the model's {role}, whose weight must stay as it is (the fused losses read it, and a "
                    "tied embedding shares it): name layers of attention and MLP"
                )
            if not isinstance(modules[name], nn.Linear):
                raise _refused(f"{name} is a {type(modules[name]).__name__}, expected an nn.Linear")
        found += matches
    if not found:
        raise _refused(f"{type(model).__name__} has no nn.Linear to adapt")
    return found


def _refused(why: str) -> ValueError:
    return ValueError(f"engine.lora.target_modules: {why}")
