"""Log-probs of the whole tempered distribution from a vLLM engine that samples from a part of it.

vLLM reports log-probs either before everything, the temperature included, or after everything, top-p and top-k
included. So here the temperature is divided out where logits are made, and vLLM samples at temperature 1.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Tempering:
    """Divides the logits of a worker's model by `temperature` from now on. 0 leaves them as they are (greedy)."""

    def __init__(self, worker: Any) -> None:
        self.temperature = 1.0
        model = worker.model_runner.get_model()
        compute = model.compute_logits

        def tempered(*args: Any, **kwargs: Any) -> Tensor | None:
            logits = compute(*args, **kwargs)
            return logits if logits is None or self.temperature == 0 else logits.float().div_(self.temperature)

        model.compute_logits = tempered
