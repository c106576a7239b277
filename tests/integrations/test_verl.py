"""verl's own requirements (transformers below 5.11, Ray) keep it out of this environment, so its published signature is
written down here, from the file `verl/utils/kernel/linear_cross_entropy.py` of the wheel verl 0.9.1. The last test runs
verl's own model patch where verl can be imported."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.functional import log_softmax

from rise_rl.integrations import verl as integration
from rise_rl.integrations.verl import linear_cross_entropy
from tests.tiny import tiny_model

PUBLISHED = [
    ("hidden", inspect.Parameter.empty),
    ("weight", inspect.Parameter.empty),
    ("labels", inspect.Parameter.empty),
    ("temperature", 1.0),
    ("reduction", "none"),
    ("dist_process_group", None),
]


def test_the_signature_is_the_published_one():
    found = inspect.signature(linear_cross_entropy).parameters
    assert [(name, p.default) for name, p in found.items()] == PUBLISHED


@pytest.mark.parametrize("shape", [(1, 14), (2, 7), (14,)], ids=["packed", "padded", "flat"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropy_with_gradients(shape, temperature):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, 16, generator=generator, requires_grad=True)
    weight = torch.randn(131, 16, generator=generator, requires_grad=True)
    labels = torch.randint(0, 131, shape, generator=generator)
    upstream = torch.randn(2, 14, generator=generator)

    # as verl's models call it: by position
    logprob, entropy = linear_cross_entropy(hidden, weight, labels, temperature, "none")
    assert logprob.shape == entropy.shape == (14,)
    assert logprob.dtype == entropy.dtype == torch.float32
    (upstream[0] * logprob + upstream[1] * entropy).sum().backward()

    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    log_p = log_softmax(h.reshape(14, 16) @ w.T / temperature, -1)
    expected = log_p.gather(1, labels.reshape(14, 1))[:, 0]
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    (upstream[0] * expected + upstream[1] * expected_entropy).sum().backward()
    assert torch.allclose(logprob.double(), expected, atol=2e-6)
    assert torch.allclose(entropy.double(), expected_entropy, atol=2e-6)
    assert torch.allclose(hidden.grad.double(), h.grad, atol=1e-5)
    assert torch.allclose(weight.grad.double(), w.grad, atol=1e-5)


def test_what_it_cannot_do_is_refused(monkeypatch):
    arguments = torch.randn(3, 4), torch.randn(9, 4), torch.tensor([1, 2, 3])
    with pytest.raises(ValueError, match="reduction"):
        linear_cross_entropy(*arguments, 1.0, "mean")
    monkeypatch.setattr(integration, "get_world_size", lambda group: 2)
    with pytest.raises(ValueError, match="split over ranks"):
        linear_cross_entropy(*arguments, 1.0, "none", object())


def test_verls_own_switch(monkeypatch):
    kernel = pytest.importorskip("verl.utils.kernel.linear_cross_entropy")
    from verl.models.transformers.monkey_patch import patch_forward_with_backends

    model = tiny_model("qwen3", 131, scale=4.0)
    ids = torch.arange(20, 30)[None]
    logits = model(input_ids=ids).logits.detach().double() / 0.7
    # What is patched here is put back when the test ends.
    monkeypatch.setattr(type(model), "forward", type(model).forward)
    monkeypatch.setattr(kernel, "linear_cross_entropy", kernel.linear_cross_entropy)
    integration.install()
    patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="triton")
    output = model(input_ids=ids, temperature=0.7, return_dict=True)
    log_p = log_softmax(logits, -1)
    expected = log_p.gather(-1, torch.roll(ids, -1, -1)[..., None]).flatten()
    assert torch.allclose(output.log_probs.double(), expected, atol=1e-5)
    assert torch.allclose(output.entropy.double(), -(log_p.exp() * log_p).sum(-1).flatten(), atol=1e-5)
    output.log_probs.sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0
