"""Rollouts from the trainer's own model, in its own process: nothing to copy, nothing to go stale unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..frozen import FrozenPolicy
from ..policy import PolicyEngine
from .base import Rollout, RolloutRequest, Sampling
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
        if self.version is None:
            raise RuntimeError("rollouts: generate() before the first sync(); the engine has no weights yet")
        if self.version != self.policy.step:
            raise RuntimeError(
                f"rollouts: synced at step {self.version}, but the policy is at {self.policy.step}; call sync() first"
            )
        if (sampling.top_p < 1 or sampling.top_k > 0) and not sampling.subset:
            raise ValueError(
                f"sampling: top_p {sampling.top_p}, top_k {sampling.top_k}: only the full distribution is sampled "
                "from, as log-probs would otherwise be renormalised over a subset that the trainer does not know"
            )
        if sampling.temperature < 0:
            raise ValueError(f"sampling: temperature must be >= 0, found {sampling.temperature}")
        if sampling.max_new_tokens < 1:
            raise ValueError(f"sampling: max_new_tokens must be >= 1, found {sampling.max_new_tokens}")
        for request in requests:
            needed = len(request.prompt_ids) + sampling.max_new_tokens
            if not request.prompt_ids:
                raise ValueError(f"request {request.uid!r}: the prompt is empty")
            if needed > self.policy.context_length:
                raise ValueError(
                    f"request {request.uid!r}: a prompt of {len(request.prompt_ids)} tokens and max_new_tokens "
                    f"{sampling.max_new_tokens} need {needed} tokens; the context is {self.policy.context_length}"
                )
        return self.version
