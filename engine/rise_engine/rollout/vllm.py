"""Rollouts from a vLLM engine in the trainer's own process, one per rank (or per group of ranks)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..agreement import portable, world_size
from ..parity import PROBE_PROMPT, PROBE_TOKENS
from ..policy import PolicyEngine
from ..weight_sync import SyncReport, WeightSync, offload_optimizer
from .base import Rollout, RolloutRequest, Sampling
from .checks import RolloutError, check_requests, check_subset, check_version
from .tempering import Tempering
from .vllm_config import VllmConfig
from .vllm_start import start

if TYPE_CHECKING:
    from ..frozen import FrozenPolicy


class VllmRollout:
    """A RolloutEngine on a copy of the policy's weights that `sync` renews.

    context_length: tokens of the longest prompt, its hint and the longest answer together. max_rows: answers decoded
    together. subset: whether top-p and top-k will be asked for. last_sync: what the latest sync took. Collective in
    construction and `sync`; `generate` is too where tensor_parallel_size is above 1. Raises ValueError where vLLM
    cannot serve the model.
    """

    def __init__(
        self,
        policy: PolicyEngine | FrozenPolicy,
        *,
        context_length: int,
        max_rows: int = 64,
        subset: bool = False,
        config: VllmConfig | None = None,
    ) -> None:
        config = config or VllmConfig()
        if max_rows < 1:
            raise ValueError(f"max_rows: expected at least 1, found {max_rows}")
        self.policy = policy
        probed = max(context_length, PROBE_PROMPT + PROBE_TOKENS)  # after every sync, whatever else is asked for
        self.context_length = min(probed, policy.context_length)
        if policy.device.type == "cuda" and config.sleep:
            offload_optimizer(policy)
        self.peers = _peers(config.tensor_parallel_size, policy)
        self.llm = start(policy, context_length=self.context_length, max_rows=max_rows, subset=subset, config=config)
        self.tempering: Tempering | None = self.llm.collective_rpc(Tempering)[0] if subset else None
        self.weights = WeightSync(self.llm, policy, sleep_level=config.sleep)
        self.last_sync: SyncReport | None = None

    def sync(self, version: int) -> None:
        """Hands over the policy's weights, all ranks together; on a GPU wakes vLLM first. Whether they arrived is for
        `parity_probe` to say, which serves any engine and has a tolerance that only the caller knows: ask it next.
        """
        self.last_sync = self.weights.sync(version)

    def release(self) -> None:
        """Gives the GPU back to the trainer; the next `sync` takes it again."""
        self.weights.release()

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: Sampling,
        progress: Callable[[int], None] | None = None,
    ) -> list[Rollout]:
        """In the order of the requests; the tokens are a function of the requests and the weights alone, because every
        call begins with an empty prefix cache. Raises RuntimeError before the first sync or after weights moved without
        one, RequestError for what cannot be served, RolloutError if vLLM fails.
        """
        mine, everyone = self._shared(requests)
        found: dict[int, Rollout] = {}
        with self._stream(sampling) as stream:
            tickets = stream.add(everyone)
            while stream.pending:
                finished = stream.advance()
                found.update(finished)
                if finished and progress is not None:
                    progress(sum(ticket in found for ticket in tickets[mine]))
        return [found[ticket] for ticket in tickets[mine]]

    def stream(self, sampling: Sampling) -> AbstractContextManager[VllmStream]:
        """Requests under way, to which more may be added. What is unfinished on leaving is dropped."""
        if self.peers is not None:
            raise ValueError("stream: ranks that hold one model together must begin the same requests at the same time")
        return self._stream(sampling)

    @contextmanager
    def _stream(self, sampling: Sampling) -> Iterator[VllmStream]:
        check_subset(sampling)
        if self.tempering is None and sampling.subset:
            raise ValueError("sampling.subset: this engine was started without subset=True")
        if self.weights.asleep:
            raise RuntimeError("rollouts: vLLM sleeps since release(); sync() wakes it with the policy's weights")
        version = check_version(self.weights.version, self.policy.step)
        if self.tempering is not None:
            self.tempering.temperature = sampling.temperature
        self.weights.reset_cache()
        stream = VllmStream(self, sampling, version)
        try:
            yield stream
        finally:
            stream.drop()

    def withdraw(self, error: Exception) -> None:
        """Instead of a call to `generate` that the peers are making: they raise `error` too."""
        if self.peers is not None:
            self._exchanged(portable(error))

    def _exchanged(self, mine: Any) -> list[Any]:
        parts: list[Any] = [None] * dist.get_world_size(self.peers)
        dist.all_gather_object(parts, mine, group=self.peers)
        return parts

    def _shared(self, requests: Sequence[RolloutRequest]) -> tuple[slice, list[RolloutRequest]]:
        """Ranks that hold one model together answer all of their requests together. Returns which are this rank's."""
        if self.peers is None:
            return slice(0, len(requests)), list(requests)
        place = dist.get_rank(self.peers)
        parts = self._exchanged(list(requests))
        for peer, part in enumerate(parts):
            if isinstance(part, Exception):
                part.failed_rank = dist.get_global_rank(self.peers, peer)  # type: ignore[attr-defined]
                raise part
        begin = sum(len(part) for part in parts[:place])
        return slice(begin, begin + len(requests)), [r for part in parts for r in part]


class VllmStream:
    """Answers in the order in which they finish. pending: how many have not."""

    def __init__(self, rollouts: VllmRollout, sampling: Sampling, version: int) -> None:
        self.rollouts, self.sampling, self.version = rollouts, sampling, version
        self.engine = rollouts.llm.llm_engine
        self.running: dict[str, tuple[int, RolloutRequest]] = {}
        self.count = 0

    @property
    def pending(self) -> int:
        return len(self.running)

    def add(self, requests: Sequence[RolloutRequest]) -> list[int]:
        """Starts them; returns a ticket for each, by which `advance` names its answer."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        check_requests(requests, self.sampling, self.rollouts.context_length)
        temperature = self.sampling.temperature
        tickets = []
        for request in requests:
            ticket, self.count = self.count, self.count + 1
            parameters = SamplingParams(
                temperature=1.0 if self.rollouts.tempering and temperature > 0 else temperature,
                top_p=self.sampling.top_p,
                top_k=self.sampling.top_k,
                seed=request.seed,
                max_tokens=self.sampling.max_new_tokens,
                stop_token_ids=list(self.rollouts.policy.stop_ids),
                ignore_eos=True,  # stop_token_ids holds them all, and none is held back from token_ids
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt: Any = {"prompt_token_ids": list(request.prompt_ids)}
            with self._failures():
                self.engine.add_request(str(ticket), prompt, parameters)
            self.running[str(ticket)] = (ticket, request)
            tickets.append(ticket)
        return tickets

    def advance(self) -> list[tuple[int, Rollout]]:
        """One token for everything that runs (or a prefill); returns what finished by it."""
        with self._failures():
            outputs = self.engine.step()
        return [(ticket, rollout) for output in outputs for ticket, rollout in [self._finished(output)]]

    def drop(self) -> None:
        """Nothing is under way afterwards."""
        if self.running:
            self.engine.abort_request(list(self.running))
            self.running.clear()
        # On a GPU vLLM begins a step before it knows that the one before it was the last, and would leave it queued.
        while self.rollouts.weights.version is not None and self.engine.engine_core.engine_core.batch_queue:
            with self._failures():
                self.engine.step()

    def _finished(self, output: Any) -> tuple[int, Rollout]:
        ticket, request = self.running.pop(output.request_id)
        [answer] = output.outputs
        if answer.finish_reason not in ("stop", "length"):
            raise RolloutError(f"request {request.uid!r}: vLLM ended it with {answer.finish_reason!r}, not an answer")
        logprobs = tuple(answer.logprobs.logprobs)
        if len(logprobs) != len(answer.token_ids) or not all(map(math.isfinite, logprobs)):
            raise RolloutError(
                f"request {request.uid!r}: vLLM gave {len(logprobs)} log-probs for {len(answer.token_ids)} tokens, or "
                "some that are not finite"
            )
        return ticket, Rollout(
            uid=request.uid,
            index=request.index,
            prompt_ids=request.prompt_ids,
            token_ids=tuple(answer.token_ids),
            logprobs=logprobs,
            text=self.rollouts.policy.tokenizer.decode(answer.token_ids, skip_special_tokens=True),
            finish_reason=answer.finish_reason,
            weight_version=self.version,
        )

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.rollouts.weights.version = None
            raise RolloutError(
                f"vLLM failed while sampling with the weights of step {self.version}: "
                f"{type(error).__name__}: {error}. Resume the run from its last checkpoint; VLLM_LOGGING_LEVEL=INFO "
                "shows what vLLM does"
            ) from error


def _peers(size: int, policy: PolicyEngine | FrozenPolicy) -> Any:
    """The process group of the ranks that hold one model together; None if each holds its own. It waits as long as the
    policy's own does.
    """
    world = world_size()
    if world % size:
        raise ValueError(f"tensor_parallel_size: expected a divisor of the number of ranks ({world}), found {size}")
    if size == 1:
        return None
    timeout = timedelta(minutes=policy.config.timeout_minutes) if isinstance(policy, PolicyEngine) else None
    groups = [dist.new_group(range(i, i + size), timeout, backend="gloo") for i in range(0, world, size)]
    return groups[dist.get_rank() // size]
