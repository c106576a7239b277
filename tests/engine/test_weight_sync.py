"""Who holds the GPU when: the order of a sync, of sleep and of wake, seen without a GPU."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from rise_engine import weight_sync, weights_stream
from rise_engine.config import EngineConfig
from rise_engine.errors import EngineError
from rise_engine.policy import PolicyEngine
from rise_engine.weight_sync import WeightSync
from tests.engine.helpers import a_step
from tests.tiny import make_tiny


class Calls(list):
    """What was done, in order; at `fails` memory runs out."""

    fails = ""

    def append(self, call):
        super().append(call)
        if call == self.fails:
            raise torch.OutOfMemoryError("full")


class Recorder:
    """Stands for vLLM's LLM and writes down what it is told."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.waiting, self.sleeping = calls, 0, set()
        self.llm_engine = SimpleNamespace(
            get_num_unfinished_requests=lambda: self.waiting, is_sleeping=lambda: bool(self.sleeping)
        )

    def wake_up(self, tags):
        self.calls.append(f"wake {tags[0]}")
        self.sleeping -= set(tags)

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.sleeping = {"weights", "kv_cache"}

    def collective_rpc(self, function, args):
        assert function is weight_sync.load_weights
        weights, version = args
        self.calls.append(f"load {sum(1 for _ in weights)}")
        return [version]

    def reset_prefix_cache(self):
        self.calls.append("reset cache")
        return True


@pytest.fixture
def on_gpu(monkeypatch):
    """A policy that says it is on a GPU, and the list of what is done to it and to vLLM."""
    calls = Calls()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty cache"))
    monkeypatch.setattr(weight_sync, "offload_optimizer", lambda _: calls.append("offload optimizer"))
    monkeypatch.setattr(weight_sync, "reload_optimizer", lambda _: calls.append("reload optimizer"))
    return SimpleNamespace(device=torch.device("cuda"), model=torch.nn.Linear(3, 2), step=0), calls


@pytest.mark.parametrize("level", [1, 2])
def test_vllm_has_the_gpu_between_a_sync_and_a_release_and_the_optimizer_otherwise(on_gpu, level):
    policy, calls = on_gpu
    weights = WeightSync(Recorder(calls), policy, sleep_level=level)
    report = weights.sync(0)  # awake since its start
    assert calls == ["offload optimizer", "empty cache", "load 2", "reset cache"]
    assert (weights.version, report.bytes) == (0, 4 * 8)
    calls.clear()
    weights.release()
    assert calls == [f"sleep {level}", "reload optimizer"]
    assert (weights.version, weights.asleep) == (None, True)
    calls.clear()
    weights.release()  # a second update without a rollout between
    assert calls == ["reload optimizer"]
    calls.clear()
    policy.step = 1
    weights.sync(1)
    assert calls == ["offload optimizer", "empty cache", "wake weights", "load 2", "wake kv_cache", "reset cache"]
    assert (weights.version, weights.asleep) == (1, False)


def test_level_0_and_a_cpu_leave_memory_alone(on_gpu):
    policy, calls = on_gpu
    for device, level in (("cuda", 0), ("cpu", 2)):
        policy.device = torch.device(device)
        weights = WeightSync(Recorder(calls), policy, sleep_level=level)
        calls.clear()
        policy.step = 3
        weights.sync(3)
        weights.release()
        assert calls == ["load 2", "reset cache"]
        assert weights.version == 3


def test_a_sync_with_answers_under_way_changes_nothing(on_gpu):
    policy, calls = on_gpu
    llm = Recorder(calls)
    weights = WeightSync(llm, policy, sleep_level=2)
    weights.sync(0)
    llm.waiting = 5
    calls.clear()
    policy.step = 1
    with pytest.raises(RuntimeError, match="5 answers are still being sampled"):
        weights.sync(1)
    assert (calls, weights.version) == ([], 0)


def test_a_cache_that_cannot_be_reset_is_an_error_and_the_weights_are_not_used(on_gpu):
    policy, calls = on_gpu
    llm = Recorder(calls)
    llm.reset_prefix_cache = lambda: False
    weights = WeightSync(llm, policy, sleep_level=0)
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        weights.sync(0)
    assert weights.version is None


def test_a_stamp_of_another_step_than_the_policys_is_refused(on_gpu):
    """Weights of step 0 stamped 1 would pass for new ones after the next update."""
    policy, calls = on_gpu
    weights = WeightSync(Recorder(calls), policy, sleep_level=0)
    with pytest.raises(RuntimeError, match="asked to stamp step 1, but the policy is at 0"):
        weights.sync(1)
    assert (calls, weights.version) == ([], None)


def test_a_vllm_that_stays_asleep_is_an_error_and_the_next_sync_wakes_it_again(on_gpu):
    policy, calls = on_gpu
    llm = Recorder(calls)
    weights = WeightSync(llm, policy, sleep_level=2)
    weights.release()
    wake, llm.wake_up = llm.wake_up, lambda tags: None  # vLLM warns, and no more, about a tag that it does not wake
    with pytest.raises(EngineError, match="still asleep after weights and cache were woken"):
        weights.sync(0)
    assert (weights.version, weights.asleep) == (None, True)
    llm.wake_up = wake
    weights.sync(0)
    assert (weights.version, weights.asleep) == (0, False)


def release_and_sync(weights: WeightSync) -> None:
    weights.release()
    weights.sync(weights.policy.step)


@pytest.mark.parametrize(
    ("call", "phase", "remedy"),
    [
        ("sleep 2", "going to sleep", "rollout.vllm.sleep"),
        ("reload optimizer", "giving the GPU back to the optimizer", "engine.offload.optimizer"),
        ("wake weights", "waking its weights", "rollout.vllm.memory_fraction"),
        ("load 2", "loading", "rollout.vllm.memory_fraction"),
        ("wake kv_cache", "waking its cache", "rollout.vllm.memory_fraction"),
    ],
)
def test_a_phase_that_fails_is_named_with_what_to_change(on_gpu, call, phase, remedy):
    """As an EngineError, after which a run saves what it has trained."""
    policy, calls = on_gpu
    policy.step = 7
    weights = WeightSync(Recorder(calls), policy, sleep_level=2)
    calls.fails = call
    expected = f"at step 7: vLLM failed in {phase}: OutOfMemoryError: full. If memory ran out: .*{remedy}"
    with pytest.raises(EngineError, match=expected):
        release_and_sync(weights)
    assert weights.version is None


class Model(torch.nn.Linear):
    """A model of vLLM's: its loader says what it has loaded."""

    def load_weights(self, weights):
        return {name for name, _ in weights}


def test_a_worker_that_does_not_take_every_weight_gives_no_stamp(on_gpu):
    """However little that changes: no log-prob can tell one update at a rate of 1e-6."""
    policy, calls = on_gpu
    llm, model = Recorder(calls), Model(3, 2)
    weights = WeightSync(llm, policy, sleep_level=0)

    def sync(reload):
        worker = SimpleNamespace(
            model_runner=SimpleNamespace(get_model=lambda: model),
            reload_weights=lambda weights_iterator: reload(weights_iterator),
        )
        llm.collective_rpc = lambda function, args: [function(worker, *args)]
        weights.sync(0)

    for complaint, reload in {
        "1 of vLLM's weights .* keep old values: bias": lambda sent: model.load_weights(
            x for x in sent if x[0] != "bias"
        ),
        "2 of vLLM's weights .* keep old values: bias, weight": lambda sent: sum(1 for _ in sent),
        "stopped reading after 24 bytes": lambda sent: model.load_weights([next(iter(sent)), ("bias", None)]),
    }.items():
        with pytest.raises(EngineError, match=complaint):
            sync(reload)
        assert weights.version is None
    sync(lambda sent: model.load_weights(sent))
    assert weights.version == 0
    assert "load_weights" not in vars(model)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_adams_moments_come_back_as_they_went(tmp_path, monkeypatch, stage):
    """On a CPU both places are host memory, so this shows that they are found, moved and put back whole."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    folder = make_tiny(tmp_path / "tiny")
    norms = []
    for waits in (False, True):
        policy = PolicyEngine(folder, EngineConfig(zero_stage=stage, lr=1e-2, warmup_steps=0))
        policy.train_step(a_step(0), temperature=1.0)
        if waits:
            optimizer = weight_sync._movable(policy)
            before = [t.clone() for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
            assert len(before) >= 3
            weight_sync.offload_optimizer(policy)
            weight_sync.reload_optimizer(policy)
            after = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        stats = [policy.train_step(a_step(i), temperature=1.0) for i in (1, 2)]
        norms.append([(s.loss, s.grad_norm) for s in stats])
    assert norms[0] == norms[1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_keeps_the_place_that_moments_have_left(tmp_path, monkeypatch, stage):
    """A view of them that somebody else holds would keep their memory on the GPU. (Moving is copying here.)"""
    from deepspeed.runtime.zero import offload_states

    def copy_elsewhere(optimizer, device, pin_memory):
        for state in optimizer.state.values():
            state.update({key: value.clone() for key, value in state.items() if torch.is_tensor(value)})

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(offload_states, "offload_optimizer_states", copy_elsewhere)
    policy = PolicyEngine(make_tiny(tmp_path / "tiny"), EngineConfig(zero_stage=stage, lr=1e-2, warmup_steps=0))
    for step in (0, 1):
        policy.train_step(a_step(step), temperature=1.0)
        moments = [s[key] for s in weight_sync._movable(policy).state.values() for key in ("exp_avg", "exp_avg_sq")]
        weight_sync.offload_optimizer(policy)
        places, ours = {t.untyped_storage().data_ptr() for t in moments}, {id(t) for t in moments}
        tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and id(t) not in ours]
        strided = (t for t in tensors if t.device.type == "cpu" and t.layout == torch.strided)
        assert not [tuple(t.shape) for t in strided if t.untyped_storage().data_ptr() in places]


def test_a_bucket_is_let_go_before_the_next_is_gathered(tmp_path, monkeypatch):
    """But for its last tensor, which whoever passes it on still names."""
    import deepspeed

    policy = PolicyEngine(make_tiny(tmp_path / "tiny"), EngineConfig(zero_stage=3))
    seen: list[weakref.ref] = []
    alive: list[int] = []
    gather = deepspeed.zero.GatheredParameters

    def watched(parameters):
        alive.append(sum(ref() is not None for ref in seen))
        return gather(parameters)

    monkeypatch.setattr(deepspeed.zero, "GatheredParameters", watched)
    monkeypatch.setattr(weights_stream, "BUCKET_BYTES", 20_000)
    for _, tensor in weights_stream.named_weights(policy):
        seen.append(weakref.ref(tensor))
        del tensor
    assert 2 < len(alive) < len(seen) / 2  # several buckets of several tensors
    assert max(alive) <= 1
