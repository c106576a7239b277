"""Sampled tokens and their log-probs are what the seed and the policy say, whoever else is in the batch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from transformers.cache_utils import DynamicCache

from rise_engine.config import EngineConfig
from rise_engine.parity import LARGEST, TOLERANCE, ParityError, parity_probe
from rise_engine.policy import PolicyEngine
from rise_engine.rollout.base import RolloutRequest, Sampling
from rise_engine.rollout.kv_cache import DecodeCache
from rise_engine.rollout.sampler import sample, uniforms
from rise_engine.rollout.transformers import TransformersRollout
from tests.engine.helpers import a_step, plain_logprobs, plain_model
from tests.tiny import KINDS


def make(folder, **keys) -> TransformersRollout:
    rollouts = TransformersRollout(PolicyEngine(folder, EngineConfig()), **keys)
    rollouts.sync(0)
    return rollouts


def some_requests() -> list[RolloutRequest]:
    prompts = {"a": (5, 6, 7), "b": (9, 10, 11, 12, 13, 14, 15, 16, 17), "c": (40,)}
    return [RolloutRequest(u, i, p, seed=100 * len(p) + i) for i in range(4) for u, p in prompts.items()]


# --- the sampler -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [7, 256, 1000])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_samples_follow_the_distribution(vocab, temperature):
    """Evenly spaced uniforms turn the inverse CDF into exact counts, within one per token."""
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)) * 2
    n = 20_000
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    token, logprob = sample(logits.expand(n, -1), uniform, temperature)
    expected = torch.softmax(logits[0].double() / temperature, -1)
    counts = torch.bincount(token, minlength=vocab).double()
    assert (counts - n * expected).abs().max() <= 1.01
    torch.testing.assert_close(logprob.double(), expected.log()[token], atol=1e-5, rtol=1e-5)


def test_a_token_of_probability_zero_is_never_sampled():
    """Not at either end of the unit interval, nor where float32 block sums and their parts disagree."""
    logits = torch.full((4, 600), float("-inf"))
    logits[:, 255] = 0.0  # the last token of a block
    logits[:, 300] = 0.1
    edges = torch.tensor([0.0, 0.475, 0.4750209, 1 - 2**-53], dtype=torch.float64)
    token, logprob = sample(logits, edges, 1.0)
    assert set(token.tolist()) <= {255, 300}
    assert token[0] == 255
    assert token[-1] == 300
    assert logprob.isfinite().all()


def test_uniforms_depend_on_their_own_seed_and_longer_rows_extend_shorter_ones():
    long, short = uniforms([1, 2, 3], 50), uniforms([3], 20)
    assert torch.equal(long[2, :20], short[0])
    assert len({tuple(row.tolist()) for row in long}) == 3
    assert long.min() >= 0
    assert long.max() < 1


def test_temperature_zero_is_greedy():
    token, logprob = sample(torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([0.01], dtype=torch.float64), 0.0)
    assert token.item() == 1
    assert logprob.item() == pytest.approx(torch.log_softmax(torch.tensor([0.0, 3.0, 1.0]), -1)[1].item())


# --- the cache -------------------------------------------------------------------------------------------------------


def test_dropping_rows_keeps_every_other_row_with_its_keys():
    prompts = DynamicCache()
    prompts.update(torch.arange(3.0).view(3, 1, 1, 1), -torch.arange(3.0).view(3, 1, 1, 1), 0)
    cache = DecodeCache(prompts, torch.tensor([0, 1, 2, 2, 1, 0]), columns=4)
    cache.update(torch.arange(6.0).view(6, 1, 1, 1) * 10, torch.zeros(6, 1, 1, 1), 0)
    order = cache.drop([0, 3, 5], 6)
    assert sorted(order) == [1, 2, 4]
    keys, values = cache.update(torch.full((3, 1, 1, 1), 7.0), torch.zeros(3, 1, 1, 1), 0)
    owner = [0, 1, 2, 2, 1, 0]
    assert keys.flatten(1).tolist() == [[owner[row], 10.0 * row, 7.0] for row in order]
    assert values.flatten(1)[:, 0].tolist() == [-float(owner[row]) for row in order]


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_behaviour_logprobs_are_the_policys_own_at_the_sampling_temperature(tiny_folder, kind, temperature):
    plain = plain_model(tiny_folder(kind)).eval()
    for r in make(tiny_folder(kind)).generate(some_requests(), Sampling(12, temperature)):
        with torch.no_grad():
            expected = plain_logprobs(plain, r.prompt_ids, r.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(r.logprobs), expected, atol=2e-5, rtol=1e-5)


def test_answers_do_not_depend_on_company_order_or_batch_size(tiny_folder):
    """Rows end at different steps (many stop ids), so rows are dropped and moved all the time."""
    together = make(tiny_folder("qwen3-tied"))
    together.policy.stop_ids = tuple(range(0, 384, 12))
    requests, sampling = some_requests(), Sampling(30, 0.9)
    expected = together.generate(requests, sampling)
    lengths = [len(r.token_ids) for r in expected]
    assert len(set(lengths)) > 3
    assert [(r.uid, r.index) for r in expected] == [(r.uid, r.index) for r in requests]
    small = TransformersRollout(together.policy, max_rows=5)
    small.sync(0)
    alone = [together.generate([r], sampling)[0] for r in requests]
    for other in (small.generate(requests, sampling), together.generate(requests[::-1], sampling)[::-1], alone):
        assert [r.token_ids for r in other] == [r.token_ids for r in expected]
        assert [r.finish_reason for r in other] == [r.finish_reason for r in expected]


def test_greedy_answers_equal_transformers_generate(tiny_folder):
    rollouts = make(tiny_folder("llama"))
    plain = plain_model(tiny_folder("llama")).eval()
    for r in rollouts.generate(some_requests()[:3], Sampling(15, temperature=0)):
        full = plain.generate(torch.tensor([r.prompt_ids]), do_sample=False, max_new_tokens=15)
        assert list(r.token_ids) == full[0, len(r.prompt_ids) :].tolist()


def test_progress_counts_up_to_the_number_of_requests(tiny_folder):
    rollouts = make(tiny_folder("qwen3-tied"), max_rows=5)
    rollouts.policy.stop_ids = tuple(range(0, 384, 20))
    told: list[int] = []
    rollouts.generate(some_requests(), Sampling(30), told.append)
    assert told == sorted(told)
    assert told[-1] == len(some_requests())
    assert len(told) > 3


def test_many_prompts_are_prefilled_in_parts(tiny_folder, monkeypatch):
    rollouts = make(tiny_folder("qwen3"))
    expected = rollouts.generate(some_requests(), Sampling(5))
    monkeypatch.setattr("rise_engine.rollout.decode.PREFILL_TOKENS", 10)
    assert [r.token_ids for r in rollouts.generate(some_requests(), Sampling(5))] == [r.token_ids for r in expected]


def test_no_requests_no_rollouts(tiny_folder):
    assert make(tiny_folder("qwen3-tied")).generate([], Sampling(5)) == []


def test_generating_does_not_disturb_training(tiny_folder):
    """The same step before and after a rollout: no gradient, no mode, no random state is left behind."""
    rollouts = make(tiny_folder("qwen3-tied"))
    state = torch.get_rng_state()
    rollouts.generate(some_requests(), Sampling(5))
    assert torch.equal(torch.get_rng_state(), state)
    other = PolicyEngine(tiny_folder("qwen3-tied"), EngineConfig())
    first = rollouts.policy.train_step(a_step(), temperature=1.0)
    assert first.grad_norm == other.train_step(a_step(), temperature=1.0).grad_norm


@pytest.mark.parametrize(
    "sampling, message",
    [
        (Sampling(5, top_p=0.9), "top_p 0.9.*renormalised over a subset"),
        (Sampling(5, top_k=20), "top_k 20.*renormalised over a subset"),
        (Sampling(5, temperature=-1.0), "temperature must be 0 .greedy. or at least 0.01, found -1.0"),
        (Sampling(5, temperature=0.004), "temperature must be 0 .greedy. or at least 0.01, found 0.004"),
        (Sampling(0), "max_new_tokens must be >= 1"),
        (Sampling(510), "prompt of 3 tokens and max_new_tokens 510 need 513 tokens; the context is 512"),
    ],
)
def test_sampling_that_cannot_be_served_is_refused(tiny_folder, sampling, message):
    with pytest.raises(ValueError, match=message):
        make(tiny_folder("qwen3-tied")).generate(some_requests()[:1], sampling)


def test_an_empty_prompt_is_refused(tiny_folder):
    with pytest.raises(ValueError, match="'u': the prompt is empty"):
        make(tiny_folder("qwen3-tied")).generate([RolloutRequest("u", 0, (), 0)], Sampling(5))


# --- the parity probe ------------------------------------------------------------------------------------------------


def test_parity_holds_before_and_after_training(tiny_folder):
    rollouts = make(tiny_folder("qwen3-tied"))
    assert parity_probe(rollouts, rollouts.policy, tolerance=1e-4) < 1e-4
    rollouts.policy.train_step(a_step(), temperature=1.0)
    rollouts.sync(1)
    assert parity_probe(rollouts, rollouts.policy, tolerance=1e-4) < 1e-4


def test_parity_fails_for_an_engine_with_other_weights(tiny_folder):
    policy = PolicyEngine(tiny_folder("qwen3-tied"), EngineConfig(lr=1e-2, warmup_steps=0))
    stale = make(tiny_folder("qwen3-tied"))
    policy.train_step(a_step(), temperature=1.0)
    stale.policy.step = 1  # claims to be up to date
    stale.sync(1)
    with pytest.raises(ParityError, match="weight sync that did not reach every tensor"):
        parity_probe(stale, policy)


@pytest.fixture
def bfloat16(tiny_folder) -> TransformersRollout:
    policy = PolicyEngine(tiny_folder("qwen3-tied"), EngineConfig(dtype="bfloat16", zero_stage=2))
    rollouts = TransformersRollout(policy)
    rollouts.sync(0)
    return rollouts


def test_parity_in_bfloat16_passes_over_rounding(bfloat16):
    """The engine makes logits of its own, rounded to bfloat16; the trainer's come out of its head in float32."""
    gap = parity_probe(bfloat16, bfloat16.policy)
    assert TOLERANCE[torch.float32] * LARGEST < gap  # the float32 tolerance would stop every run here
    assert gap < TOLERANCE[torch.bfloat16] * LARGEST


@pytest.mark.parametrize(
    "errors, allowed",
    [
        ([0.0] * 31 + [9.0], True),  # one token, far down the tail
        ([0.0] * 31 + [11.0], False),
        ([0.9, -0.9], True),
        ([1.1, -1.1], False),  # every token, as stale or missing weights do; far below what one token may differ by
    ],
)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_parity_bounds_the_average_and_the_largest_difference(tiny_folder, monkeypatch, dtype, errors, allowed):
    """errors: what the log-probs of an engine are off by, token by token over and over, in units of the tolerance."""
    rollouts = make(tiny_folder("qwen3-tied"))
    rollouts.policy.stop_ids = (10**6,)  # so that there are 32 tokens
    generate, unit = rollouts.generate, TOLERANCE[dtype]

    def off(*arguments):
        answers, error = generate(*arguments), cycle(errors)
        return [replace(r, logprobs=tuple(p + unit * next(error) for p in r.logprobs)) for r in answers]

    monkeypatch.setattr(rollouts, "generate", off)
    with nullcontext() if allowed else pytest.raises(ParityError, match="nats on average and up to"):
        parity_probe(rollouts, rollouts.policy, tolerance=unit)


def test_no_log_prob_tells_one_small_update_so_the_stamp_does(bfloat16, tiny_folder):
    """Weights of the step before, at the paper's learning rate, are within rounding; their version is not."""
    config = EngineConfig(dtype="bfloat16", zero_stage=2, lr=1e-6, warmup_steps=0)
    policy = PolicyEngine(tiny_folder("qwen3-tied"), config)
    policy.train_step(a_step(), temperature=1.0)
    with pytest.raises(ParityError, match="answers with weights of step 0, the policy is at 1"):
        parity_probe(bfloat16, policy)
    bfloat16.policy.step = 1  # a stamp that lies
    bfloat16.sync(1)
    assert parity_probe(bfloat16, policy) < TOLERANCE[torch.bfloat16] * LARGEST
