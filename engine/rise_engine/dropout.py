"""The model's own randomness in training passes, turned off.

Ratio, clipping, KL term and importance correction compare the log-probs of a training pass with those of scoring
passes. The two must differ by what the policy has learnt and by nothing else.
"""

from __future__ import annotations

import re

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

# attention_dropout, resid_pdrop, layerdrop, drop_path_rate, ...; router_jitter_noise of Mixtral and its kin.
_RATE = re.compile(r"drop|jitter_noise$")


def without_dropout(model: nn.Module) -> None:
    """Sets every rate of the model to 0: of dropout modules, in attributes, and in its configurations (Falcon reads
    its own in every pass). An export's config.json says so too.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        _set_to_zero(module)
        if hasattr(module, "config"):
            _set_to_zero(module.config)


def _set_to_zero(holder: object) -> None:
    for name, value in list(vars(holder).items()):
        if isinstance(value, float) and _RATE.search(name):
            setattr(holder, name, 0.0)
