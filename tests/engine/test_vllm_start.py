"""What vLLM is started with, what a start that fails says, and that it leaves this process as it was. No engine is."""

from __future__ import annotations

import os
import random
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import numpy
import pytest
import torch

from rise_engine.rollout import vllm as vllm_engine
from rise_engine.rollout import vllm_start
from rise_engine.rollout.vllm import VllmRollout
from rise_engine.rollout.vllm_config import VllmConfig
from rise_engine.rollout.vllm_start import arguments, undisturbed
from tests.engine.vllm_helpers import a_policy, process_state


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_start_without_enough_memory_names_the_key_that_decides_it(monkeypatch, device):
    def refuses(**settings):
        raise ValueError("Free memory is less than desired. Decrease GPU memory utilization")

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(vllm_start, "imported", lambda: nullcontext(SimpleNamespace(LLM=refuses)))
    monkeypatch.setattr(vllm_start, "arguments", lambda policy, **_: {"dtype": "float32"})
    policy = SimpleNamespace(device=torch.device(device))
    with pytest.raises(ValueError, match=r"vLLM does not start: Free memory is less") as raised:
        vllm_start.start(policy, context_length=8, max_rows=1, subset=False, config=VllmConfig(memory_fraction=0.7))
    assert ("rollout.vllm.memory_fraction, 0.7" in str(raised.value)) == (device == "cuda")
    triton = {"TRITON_PRINT_AUTOTUNING": "0", "TRITON_F32_DEFAULT": "ieee"}  # for good, as kernels compile later
    assert os.environ == ({"LOCAL_RANK": "0", **triton} if device == "cuda" else {})


def test_the_process_is_put_back_even_if_the_start_fails(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    before = process_state()

    def start_that_fails():
        random.random()
        numpy.random.rand()
        torch.manual_seed(5)
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        os.environ["LD_PRELOAD"] = "something"
        os.environ["VLLM_KEPT"] = "1"
        signal.signal(signal.SIGTERM, lambda *_: None)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_num_threads = print
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"), undisturbed():
        start_that_fails()
    assert process_state() == before
    monkeypatch.delenv("VLLM_KEPT")


def test_the_context_has_room_for_the_probe(tiny_folder, monkeypatch):
    """However short the prompts and answers of a run are; a model's own limit stays."""
    monkeypatch.setattr(vllm_engine, "start", lambda policy, **settings: SimpleNamespace(**settings))
    policy = a_policy(tiny_folder("llama-tied"))
    for asked, given in ((10, 100), (150, 150), (10**6, policy.context_length)):
        found = VllmRollout(policy, context_length=asked)
        assert (found.context_length, found.llm.context_length) == (given, given)


def test_a_start_that_runs_out_of_memory_says_so_too(monkeypatch):
    def dies(**settings):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(vllm_start, "imported", lambda: nullcontext(SimpleNamespace(LLM=dies)))
    monkeypatch.setattr(vllm_start, "arguments", lambda policy, **_: {})
    policy = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"vLLM does not start: OutOfMemoryError\('CUDA out of memory'\)"):
        vllm_start.start(policy, context_length=8, max_rows=1, subset=False, config=VllmConfig())


def test_what_vllm_is_started_with_on_a_gpu(tiny_folder):
    policy = a_policy(tiny_folder("qwen3"))
    policy.device = torch.device("cuda")
    config = VllmConfig(memory_fraction=0.4, sleep=2)
    found = arguments(policy, context_length=300, max_rows=64, subset=False, config=config)
    assert (found["gpu_memory_utilization"], found["enable_sleep_mode"]) == (0.4, True)
    assert found["load_format"] == "dummy"  # weights come with the first sync, or the probe fails
    assert found["dtype"] == "float32"
    assert found["hf_overrides"] == {"head_dtype": "float32"}  # the trainer's head works in float32 too
    assert not {"enforce_eager", "kv_cache_memory_bytes"} & set(found)
