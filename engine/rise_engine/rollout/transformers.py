"""Rollouts from the trainer's own model, in its own process: nothing to copy, nothing to go stale unnoticed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..frozen import FrozenPolicy
from ..policy import PolicyEngine
from .base import Rollout, RolloutRequest, Sampling
from .checks import check_requests, check_subset, check_version
from .decode import Answer, decode


class TransformersRollout:
    """A RolloutEngine on the policy's weights. max_rows: answers decoded together; each holds its keys and values.

    policy: the one being trained, or a frozen one. Raises ValueError under ZeRO-3 with several ranks: a rank that
    finishes first would leave the others waiting for its share of the weights.
    """

    def __init__(self, policy: PolicyEngine | FrozenPolicy, max_rows: int = 64) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows: expected at least 1, found {max_rows}")
        if isinstance(policy, PolicyEngine) and policy.world_size > 1 and policy.engine.zero_optimization_stage() == 3:
            raise ValueError(
                "rollouts with transformers: ZeRO-3 on several ranks is not supported; use stage 2 or vLLM"
            )
        self.policy = policy
        self.max_rows = max_rows
        self.version: int | None = None

    def sync(self, version: int) -> None:
        """The weights are shared, so this only stamps them."""
        self.version = version

    def release(self) -> None:
        """Nothing is held that the trainer could use."""

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: Sampling,
        progress: Callable[[int], None] | None = None,
    ) -> list[Rollout]:
        """In the order of the requests; tokens depend on a request's seed and prompt, not on its company (rounding
        aside). Raises RuntimeError before the first sync or after weights moved without one, ValueError for sampling or
        prompts that cannot be served.
        """
        version = self._check(requests, sampling)
        answers: list[Answer | None] = [None] * len(requests)
        done = 0

        def finished(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done)

        # Equal prompts side by side, so that each is prefilled once, and similar lengths together: little padding.
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), requests[i].prompt_ids))
        for start in range(0, len(order), self.max_rows):
            rows = order[start : start + self.max_rows]
            decoded = decode(
                self.policy.model,
                [requests[i] for i in rows],
                sampling=sampling,
                stop_ids=self.policy.stop_ids,
                pad_id=self.policy.pad_id,
                device=self.policy.device,
                finished=finished,
            )
            for i, answer in zip(rows, decoded):
                answers[i] = answer
        return [self._rollout(r, a, version) for r, a in zip(requests, answers) if a is not None]

    def withdraw(self, error: Exception) -> None:
        """Nobody waits for this rank's requests."""

    @contextmanager
    def stream(self, sampling: Sampling) -> Iterator[BatchStream]:
        """Answers by whole batches of max_rows requests, in the order of the requests."""
        yield BatchStream(self, sampling)

    def _rollout(self, request: RolloutRequest, answer: Answer, version: int) -> Rollout:
        return Rollout(
            uid=request.uid,
            index=request.index,
            prompt_ids=request.prompt_ids,
            token_ids=tuple(answer.token_ids),
            logprobs=tuple(answer.logprobs),
            text=self.policy.tokenizer.decode(answer.token_ids, skip_special_tokens=True),
            finish_reason="stop" if answer.stopped else "length",
            weight_version=version,
        )

    def _check(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> int:
        check_subset(sampling)
        check_requests(requests, sampling, self.policy.context_length)
        return check_version(self.version, self.policy.step)


class BatchStream:
    """A RolloutStream over `generate`: one batch at a time, so that the one before it can be graded meanwhile."""

    def __init__(self, rollouts: TransformersRollout, sampling: Sampling) -> None:
        self.rollouts, self.sampling = rollouts, sampling
        self.waiting: deque[tuple[int, RolloutRequest]] = deque()
        self.count = 0

    @property
    def pending(self) -> int:
        return len(self.waiting)

    def add(self, requests: Sequence[RolloutRequest]) -> list[int]:
        tickets = list(range(self.count, self.count + len(requests)))
        self.count += len(requests)
        self.waiting.extend(zip(tickets, requests))
        return tickets

    def advance(self) -> list[tuple[int, Rollout]]:
        batch = [self.waiting.popleft() for _ in range(min(self.rollouts.max_rows, self.pending))]
        answers = self.rollouts.generate([request for _, request in batch], self.sampling)
        return [(ticket, answer) for (ticket, _), answer in zip(batch, answers)]
