"""A real vLLM engine on the CPU answers with the trainer's weights, or not at all."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rise_engine.config import LoraSettings
from rise_engine.errors import EngineError
from rise_engine.parity import ParityError, parity_probe
from rise_engine.rollout.base import RolloutRequest, Sampling
from rise_engine.rollout.checks import RequestError, RolloutError
from rise_engine.rollout.vllm import VllmRollout, VllmStream
from rise_engine.rollout.vllm_config import VllmConfig
from rise_engine.rollout.vllm_start import CPU_HEAD_DIMS, why_not
from rise_engine.seeds import derive_seed
from rise_engine.sequences import TrainSequence
from rise_engine.weights_stream import buckets, named_weights
from tests.engine.helpers import a_step
from tests.engine.vllm_helpers import (
    BESIDE_OTHERS,
    CONTEXT,
    a_policy,
    assert_close,
    attach,
    gaps,
    process_state,
    some_requests,
)
from tests.tiny import make_tiny

KINDS = ("llama-tied", "qwen3")


def test_importing_the_engine_does_not_import_vllm():
    code = "import sys, rise_engine.rollout.vllm, rise_rl.rollout_choice; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {k: make_tiny(tmp_path_factory.mktemp("vllm") / k, k, head_dim=32, scale=6.0) for k in KINDS}


@pytest.fixture(scope="module")
def started(folders):
    """One engine for each kind of model; the state of this process before and after the first start."""
    pytest.importorskip("vllm")
    engines, seen = {}, []
    for kind in KINDS:
        policy = a_policy(folders[kind])
        seen.append(process_state())
        settings = {"max_rows": 8, "subset": kind == "qwen3", "config": BESIDE_OTHERS}
        engines[kind] = VllmRollout(policy, context_length=CONTEXT, **settings)
        seen.append(process_state())
    return engines, seen


@pytest.fixture
def tied(started, folders) -> VllmRollout:
    return attach(started[0]["llama-tied"], a_policy(folders["llama-tied"]))


@pytest.fixture
def untied(started, folders) -> VllmRollout:
    return attach(started[0]["qwen3"], a_policy(folders["qwen3"]))


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_log_probs_are_the_trainers_after_an_update_and_a_sync(started, folders, kind, stage):
    rollouts = attach(started[0][kind], a_policy(folders[kind], zero_stage=stage))
    for step in (0, 1):
        rollouts.sync(step)
        assert parity_probe(rollouts, rollouts.policy) <= 1e-3
        assert_close(gaps(rollouts, temperature=0.6))
        assert_close(gaps(rollouts, temperature=1.0))
        rollouts.policy.train_step(a_step(step), temperature=1.0)
    whole = {name: tensor.numel() for name, tensor in named_weights(rollouts.policy)}
    assert rollouts.last_sync.bytes == 4 * sum(whole.values())
    assert whole["lm_head.weight"] == whole["model.embed_tokens.weight"]
    assert len(whole) == len(rollouts.policy.model.state_dict())


def test_buckets_hold_everything_in_order_and_little_at_once():
    named = [(str(i), torch.nn.Parameter(torch.zeros(n))) for i, n in enumerate([10, 10, 10, 90, 1, 1])]
    found = list(buckets(named, 4 * 25))
    assert [[name for name, _ in bucket] for bucket in found] == [["0", "1"], ["2"], ["3"], ["4", "5"]]
    assert list(buckets([], 8)) == []


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM sleeps on a GPU alone")
def test_a_vllm_that_slept_wakes_with_the_weights_of_the_update(folders):
    pytest.importorskip("vllm")
    policy = a_policy(folders["qwen3"])
    rollouts = VllmRollout(policy, context_length=CONTEXT, max_rows=8, config=VllmConfig(memory_fraction=0.2))
    for step, level in enumerate((1, 2, 2)):
        rollouts.weights.sleep_level = level
        rollouts.sync(step)
        parity_probe(rollouts, policy)
        held, _ = torch.cuda.mem_get_info()
        rollouts.release()
        assert torch.cuda.mem_get_info()[0] - held > torch.cuda.mem_get_info()[1] / 10  # of the fifth that it had
        with pytest.raises(RuntimeError, match="sleeps since release"):
            rollouts.generate(some_requests(), Sampling(2))
        policy.train_step(a_step(step), temperature=1.0)


@pytest.mark.slow
def test_adapters_are_merged_on_the_way(started, folders):
    policy = a_policy(folders["llama-tied"], lora=LoraSettings(rank=4, alpha=64))
    rollouts = attach(started[0]["llama-tied"], policy)
    rollouts.sync(0)
    before = gaps(rollouts)
    for step in (0, 1):
        policy.train_step(a_step(step), temperature=1.0)
    rollouts.sync(2)
    assert_close(before)
    assert_close(gaps(rollouts))


@pytest.mark.slow
def test_a_sync_that_was_skipped_is_caught(tied):
    tied.sync(0)
    tied.policy.train_step(a_step(), temperature=1.0)
    with pytest.raises(RuntimeError, match="synced at step 0, but the policy is at 1"):
        tied.generate(some_requests(), Sampling(2))
    tied.weights.version = 1  # claims to have them
    with pytest.raises(ParityError, match=r"weight sync that did not reach every tensor .* or was skipped"):
        parity_probe(tied, tied.policy)


@pytest.mark.slow
def test_a_prefix_cache_kept_over_an_update_is_caught(tied, monkeypatch):
    tied.sync(0)
    parity_probe(tied, tied.policy)
    tied.policy.train_step(a_step(), temperature=1.0)
    monkeypatch.setattr(tied.llm, "reset_prefix_cache", lambda: True)
    tied.sync(1)
    with pytest.raises(ParityError, match="prefix cache kept over an update"):
        parity_probe(tied, tied.policy)


@pytest.mark.slow
def test_a_tied_head_that_was_left_out_is_caught_and_either_remedy_is_enough(tied, monkeypatch):
    from rise_engine import weight_sync

    stream = weight_sync.named_weights

    def headless(policy):
        return ((name, tensor) for name, tensor in stream(policy) if name != "lm_head.weight")

    tied.sync(0)
    tied.policy.train_step(a_step(), temperature=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(weight_sync, "named_weights", headless)
        tied.sync(1)
        assert parity_probe(tied, tied.policy) <= 1e-3
        tied.policy.train_step(a_step(1), temperature=1.0)
        patch.setattr(weight_sync, "refresh_tied_head", lambda worker: None)
        tied.sync(2)
        with pytest.raises(ParityError, match="a tied lm_head is sent separately"):
            parity_probe(tied, tied.policy)
        patch.setattr(weight_sync, "named_weights", stream)
        tied.sync(2)
    assert parity_probe(tied, tied.policy) <= 1e-3


@pytest.mark.slow
def test_a_resume_without_a_sync_is_caught(tied, folders, tmp_path):
    tied.policy.train_step(a_step(), temperature=1.0)
    (tmp_path / "checkpoint").mkdir()
    tied.policy.save(tmp_path / "checkpoint")
    later = attach(tied, a_policy(folders["llama-tied"]))
    later.sync(0)
    later.policy.load(tmp_path / "checkpoint")
    with pytest.raises(RuntimeError, match="synced at step 0, but the policy is at 1"):
        later.generate(some_requests(), Sampling(2))
    later.weights.version = 1
    with pytest.raises(ParityError, match="weight sync"):
        parity_probe(later, later.policy)


@pytest.mark.slow
def test_nothing_is_generated_before_the_first_sync_or_after_one_that_failed(tied, monkeypatch):
    from rise_engine import weight_sync

    with pytest.raises(RuntimeError, match="before the first sync"):
        tied.generate(some_requests(), Sampling(2))
    tied.sync(0)

    def breaks(policy):
        """In the middle of the layer that vLLM makes of query, key and value: the query is half of it here."""
        query = "model.layers.0.self_attn.q_proj.weight"
        yield query, torch.ones_like(dict(policy.model.named_parameters())[query])
        raise OSError("gone")

    monkeypatch.setattr(weight_sync, "named_weights", breaks)
    with pytest.raises(EngineError, match=r"step 0: vLLM failed in loading: OSError: gone$"):
        tied.sync(0)  # once: a second query would fill the layer, and end what the first has begun
    with pytest.raises(RuntimeError, match="before the first sync"):
        tied.generate(some_requests(), Sampling(2))
    monkeypatch.undo()
    tied.sync(0)
    assert_close(gaps(tied))


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_answers_are_a_function_of_seed_and_weights(tied):
    """Whatever was asked before (an evaluation, which a resumed run does not repeat) and in whatever order."""
    tied.sync(0)
    sampling = Sampling(24, 0.8)
    first = tied.generate(some_requests(), sampling)
    tied.generate(some_requests(seed=7)[:5], Sampling(9, 1.0))
    torch.rand(3)
    assert tied.generate(some_requests(), sampling) == first
    tied.sync(0)
    assert tied.generate(some_requests(), sampling) == first
    assert [(r.uid, r.index) for r in first] == [(r.uid, r.index) for r in some_requests()]
    assert len({r.token_ids for r in first}) == len(first)
    assert {r.weight_version for r in first} == {0}
    others = tied.generate(some_requests(seed=1), sampling)
    assert not {r.token_ids for r in first} & {r.token_ids for r in others}


@pytest.mark.slow
def test_first_tokens_follow_the_trainers_distribution(tied):
    """Counts of 1200 answers of one token against softmax(logits / T): each within 5 standard deviations."""
    tied.sync(0)
    prompt, n, temperature = (5, 6, 7), 1200, 0.4
    requests = [RolloutRequest("u", i, prompt, seed=derive_seed("first", i)) for i in range(n)]
    counts = torch.zeros(384)
    for r in tied.generate(requests, Sampling(1, temperature)):
        counts[r.token_ids[0]] += 1
    p = torch.cat(tied.policy.logprobs(prompt, [(t,) for t in range(384)], temperature=temperature)).exp()
    assert p.sum() == pytest.approx(1, abs=1e-4)
    assert (p > 0.01).sum() >= 5  # neither flat nor peaked
    assert ((counts - n * p).abs() <= 5 * (n * p * (1 - p)).sqrt() + 1).all()


@pytest.mark.slow
def test_the_answers_to_a_prompt_share_its_prefill_within_a_call_and_no_call_meets_an_older_one(tied, monkeypatch):
    tied.sync(0)
    cached, finished = [], VllmStream._finished

    def watched(self, output):
        cached.append(output.num_cached_tokens)
        return finished(self, output)

    monkeypatch.setattr(VllmStream, "_finished", watched)
    requests = [r for r in some_requests() if r.uid == "long"]  # 70 tokens: two blocks of 32 and a rest
    for _ in range(2):
        tied.generate(requests, Sampling(4))
        assert sorted(cached) == [0, 64, 64, 64]
        cached.clear()


@pytest.mark.slow
def test_every_stop_id_ends_an_answer_and_is_its_last_token(tied):
    tied.policy.stop_ids = tuple(range(0, 384, 12))
    tied.sync(0)
    told: list[int] = []
    found = tied.generate(some_requests(8), Sampling(16), told.append)
    for r in found:
        *body, last = r.token_ids
        assert not set(body) & set(tied.policy.stop_ids)
        assert (last in tied.policy.stop_ids) == (r.finish_reason == "stop")
        assert r.finish_reason == "stop" or len(r.token_ids) == 16
        assert len(r.logprobs) == len(r.token_ids)
        assert r.text == tied.policy.tokenizer.decode(r.token_ids, skip_special_tokens=True)
    assert {r.finish_reason for r in found} == {"stop", "length"}
    assert told == sorted(told)
    assert told[-1] == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_the_ratio_is_one_at_the_first_step_whatever_the_temperature(tied, temperature):
    tied.sync(0)
    sampled = tied.generate(some_requests(), Sampling(24, temperature))
    sequences = [
        TrainSequence(
            r.uid, r.prompt_ids, r.token_ids, 0.01, (-1.0) ** i, old_logprob=r.logprobs, behaviour_logprob=r.logprobs
        )
        for i, r in enumerate(sampled)
    ]
    stats = tied.policy.train_step(sequences, temperature=temperature)
    assert stats.ratio_mean == pytest.approx(1, abs=1e-4)
    assert stats.ratio_max == pytest.approx(1, abs=1e-3)
    assert stats.logprob_gap_max <= 1e-3
    assert stats.logprob_gap_mean <= 1e-4


@pytest.mark.slow
def test_a_subset_is_sampled_only_by_name_and_with_log_probs_of_the_whole_distribution(tied, untied):
    tied.sync(0)
    with pytest.raises(RequestError, match=r"top_p 0.9, top_k 0.*renormalised over a subset"):
        tied.generate(some_requests(), Sampling(5, top_p=0.9))
    with pytest.raises(ValueError, match="started without subset"):
        tied.generate(some_requests(), Sampling(5, top_p=0.9, subset=True))
    untied.sync(0)
    for r in untied.generate(some_requests(), Sampling(16, 0.7, top_k=3, subset=True)):
        [expected] = untied.policy.logprobs(r.prompt_ids, [r.token_ids], temperature=0.7)
        assert_close((torch.tensor(r.logprobs) - expected).abs())
        for i, token in enumerate(r.token_ids):
            context = (*r.prompt_ids, *r.token_ids[:i])
            whole = torch.cat(untied.policy.logprobs(context, [(t,) for t in range(384)], temperature=0.7))
            assert token in whole.topk(3).indices.tolist()
            break


@pytest.mark.slow
def test_greedy_answers_are_the_likeliest_tokens(untied):
    untied.sync(0)
    [r] = untied.generate([RolloutRequest("u", 0, (5, 6, 7), 0)], Sampling(4, temperature=0))
    for i, token in enumerate(r.token_ids):
        context = (5, 6, 7, *r.token_ids[:i])
        whole = torch.cat(untied.policy.logprobs(context, [(t,) for t in range(384)], temperature=1.0))
        assert token == whole.argmax().item()


# --- requests under way ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_requests_may_join_while_others_run(tied):
    tied.sync(0)
    sampling = Sampling(20, 0.9)
    expected = tied.generate(some_requests(), sampling)
    found = {}
    with tied.stream(sampling) as stream:
        tickets = stream.add(some_requests()[:5])
        for _ in range(3):
            found.update(stream.advance())
        tickets += stream.add(some_requests()[5:])
        while stream.pending:
            found.update(stream.advance())
    answers = [found[t] for t in tickets]
    assert [(r.uid, r.index) for r in answers] == [(r.uid, r.index) for r in expected]
    assert sum(a.token_ids == b.token_ids for a, b in zip(answers, expected)) >= len(expected) - 1  # rounding aside


@pytest.mark.slow
def test_what_is_unfinished_is_dropped_and_weights_wait_for_the_end(tied):
    tied.sync(0)
    with tied.stream(Sampling(20)) as stream:
        stream.add(some_requests())
        stream.advance()
        with pytest.raises(RuntimeError, match="12 answers are still being sampled"):
            tied.sync(0)
    assert tied.llm.llm_engine.get_num_unfinished_requests() == 0
    tied.sync(0)
    assert_close(gaps(tied))


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_sampling_and_its_weights_are_not_used_again(tied, monkeypatch):
    tied.sync(0)
    runner = tied.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "execute_model", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no memory left")))
        with pytest.raises(
            RolloutError, match=r"with the weights of step 0: MemoryError: no memory left\. Resume the run"
        ):
            tied.generate(some_requests(), Sampling(4))
    with pytest.raises(RuntimeError, match="before the first sync"):
        tied.generate(some_requests(), Sampling(4))


@pytest.mark.slow
def test_a_request_over_the_context_names_itself_and_leaves_nothing_behind(tied):
    tied.sync(0)
    long = RolloutRequest("too-long", 0, tuple(range(10, 200)), 0)
    with pytest.raises(RequestError, match="'too-long': a prompt of 190 tokens and max_new_tokens 11 need 201 tokens"):
        tied.generate([*some_requests(), long], Sampling(11))
    assert_close(gaps(tied))


# --- starting --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_starting_leaves_the_process_as_it_was(started):
    _, (before, after, *_) = started
    assert after == before


@pytest.mark.slow
def test_the_models_that_vllm_can_serve(started, folders, tmp_path, monkeypatch):
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_DIMS
    policy = a_policy(folders["qwen3"])
    assert why_not(policy) is None
    with monkeypatch.context() as patch:
        patch.setattr("vllm.__version__", "0.31.2")
        assert why_not(policy) == "vLLM 0.31.2 is installed, and 0.32 is what its weights are renewed in"
    policy.model.config.architectures = ["UnheardOfForCausalLM"]
    assert why_not(policy) == "vLLM has no model of the kind UnheardOfForCausalLM"
    assert "head_dim 8" in why_not(a_policy(make_tiny(tmp_path / "narrow")))
