"""Faults that peers shipped around tokens: stop ids, re-tokenized answers, templates that add tokens."""

from __future__ import annotations

import pytest
import torch

from rise_engine.config import EngineConfig
from rise_engine.policy import PolicyEngine
from rise_engine.prompts import render_prompt
from rise_engine.rollout.base import RolloutRequest, Sampling
from rise_engine.rollout.transformers import TransformersRollout
from rise_engine.sequences import TrainSequence
from tests.tiny import make_tiny, tiny_tokenizer

MESSAGES = [{"role": "user", "content": "Hello, my name is Anna."}]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> PolicyEngine:
    return PolicyEngine(make_tiny(tmp_path_factory.mktemp("m") / "m", "qwen3-tied"), EngineConfig())


@pytest.mark.parametrize("stop_id", [0, 2])
def test_every_one_of_several_stop_ids_ends_an_answer(policy, monkeypatch, stop_id):
    """The generation config names two; a trainer that knows one counts answers ended by the other as truncated."""
    assert policy.stop_ids == (0, 2)
    rollouts = TransformersRollout(policy)
    rollouts.sync(policy.step)
    head = policy.model.get_output_embeddings()
    calls = []

    def favour_stop_after_three(hidden):
        calls.append(1)
        logits = torch.nn.functional.linear(hidden, head.weight)
        logits[:, [0, 2]] = -1e9
        if len(calls) == 4:
            logits[:, stop_id] = 1e9
        return logits

    monkeypatch.setattr(head, "forward", favour_stop_after_three)
    [stopped] = rollouts.generate([RolloutRequest("u", 0, (5, 6), 1)], Sampling(10))
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) == 4
    assert stopped.token_ids[-1] == stop_id  # part of the response: it is trained on
    calls.clear()
    [cut] = rollouts.generate([RolloutRequest("u", 0, (5, 6), 1)], Sampling(3))
    assert cut.finish_reason == "length"
    assert len(cut.token_ids) == 3


def test_a_stop_token_on_the_very_last_position_is_a_stop_not_a_truncation(policy, monkeypatch):
    rollouts = TransformersRollout(policy)
    rollouts.sync(policy.step)
    head = policy.model.get_output_embeddings()
    monkeypatch.setattr(
        head, "forward", lambda h: torch.nn.functional.linear(h, head.weight).index_fill(1, torch.tensor([2]), 1e9)
    )
    [r] = rollouts.generate([RolloutRequest("u", 0, (5, 6), 1)], Sampling(1))
    assert (r.finish_reason, r.token_ids) == ("stop", (2,))


def test_training_uses_the_sampled_ids_where_the_text_encodes_differently(policy):
    """ "the" sampled letter by letter: its text would come back as other, fewer tokens."""
    tokenizer = policy.tokenizer
    letters = tuple(i for c in "there" for i in tokenizer.encode(c))
    text = tokenizer.decode(letters)
    assert tuple(tokenizer.encode(text)) != letters
    [sampled] = policy.logprobs((5, 6), [letters], temperature=1.0)
    stats = policy.train_step(
        [TrainSequence("u", (5, 6), letters, 1.0, 1.0, behaviour_logprob=sampled.tolist())], temperature=1.0
    )
    assert stats.tokens == len(letters)
    assert stats.logprob_gap_max < 1e-5


def test_enable_thinking_false_gives_the_same_prompt_ids_everywhere():
    """The template adds an empty thinking block: the ids must come from one place and include it exactly once."""
    tokenizer = tiny_tokenizer()
    plain = render_prompt(tokenizer, MESSAGES)
    no_thinking = render_prompt(tokenizer, MESSAGES, {"enable_thinking": False})
    assert no_thinking[: len(plain)] == plain
    assert tokenizer.decode(no_thinking[len(plain) :]) == "<think>\n\n</think>\n\n"
    assert render_prompt(tokenizer, MESSAGES, {"enable_thinking": True}) == plain
    assert render_prompt(tokenizer, list(MESSAGES), {"enable_thinking": False}) == no_thinking


def test_prompts_are_rendered_ready_for_the_answer():
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(render_prompt(tokenizer, MESSAGES)) == (
        "<|im_start|>user\nHello, my name is Anna.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_conversations_that_cannot_be_rendered_are_refused():
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match="at least one message"):
        render_prompt(tokenizer, [])
    tokenizer.chat_template = "{# nothing #}"
    with pytest.raises(ValueError, match="no tokens at all"):
        render_prompt(tokenizer, MESSAGES)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        render_prompt(tokenizer, MESSAGES)


def test_a_prompt_longer_than_the_model_is_left_to_our_own_message():
    """transformers warns of "indexing errors", once, before anybody could say which prompt is too long."""
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 2
    assert len(render_prompt(tokenizer, MESSAGES)) > 2
    assert not tokenizer.deprecation_warnings.get("sequence-length-is-longer-than-the-specified-maximum")
