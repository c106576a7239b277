"""top-p and top-k, asked for by name: sampling from a part of the distribution, log-probs of the whole."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from rise_engine.config import EngineConfig
from rise_engine.parity import parity_probe
from rise_engine.policy import PolicyEngine
from rise_engine.rollout.base import RolloutRequest, Sampling
from rise_engine.rollout.sampler import sample, within
from rise_engine.rollout.transformers import TransformersRollout

T = 0.7


@pytest.mark.parametrize("top_p, top_k", [(0.8, 0), (1.0, 20), (0.8, 20), (0.3, 5), (1e-6, 0), (1.0, 1), (0.9, 5000)])
def test_the_same_tokens_are_left_as_in_transformers(top_p, top_k):
    logits = torch.randn(64, 400, generator=torch.Generator().manual_seed(0)) * 3
    expected = logits / T
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(within(torch.softmax(logits / T, -1), top_p, top_k), expected > -torch.inf)


def test_samples_follow_the_renormalised_part_and_log_probs_the_whole():
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0, -3.0]])
    n = 4000
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    token, logprob = sample(logits.expand(n, -1), uniform, T, top_p=0.9, top_k=3)
    whole = torch.softmax(logits[0].double() / T, -1)
    part = whole[:2] / whole[:2].sum()  # of the three that top_k leaves, two reach 0.9
    counts = torch.bincount(token, minlength=5) / n
    torch.testing.assert_close(counts[:2].double(), part, atol=1e-3, rtol=0)
    assert counts[2:].sum() == 0
    torch.testing.assert_close(logprob.double(), whole.log()[token], atol=1e-6, rtol=1e-6)


def test_rollouts_are_sampled_from_the_part_with_the_policys_own_log_probs(tiny_folder):
    policy = PolicyEngine(tiny_folder("qwen3-tied"), EngineConfig())
    rollouts = TransformersRollout(policy)
    rollouts.sync(0)
    requests = [RolloutRequest("u", i, (5, 6, 7), seed=i) for i in range(8)]
    answers = rollouts.generate(requests, Sampling(6, temperature=T, top_k=3, subset=True))
    free = rollouts.generate(requests, Sampling(6, temperature=T))
    outside = {"limited": 0, "free": 0}
    for name, some in (("limited", answers), ("free", free)):
        for answer in some:
            ids = torch.tensor([[*answer.prompt_ids, *answer.token_ids]])
            with torch.no_grad():
                logits = policy.model(input_ids=ids).logits[0, len(answer.prompt_ids) - 1 : -1]
            likeliest = logits.topk(3).indices
            outside[name] += sum(t not in row for t, row in zip(answer.token_ids, likeliest.tolist()))
            [expected] = policy.logprobs(answer.prompt_ids, [answer.token_ids], temperature=T)
            assert list(answer.logprobs) == pytest.approx(expected.tolist(), abs=1e-4)
    assert outside["limited"] == 0 < outside["free"]
    assert parity_probe(rollouts, policy) < 1e-3
