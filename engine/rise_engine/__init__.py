"""The engine: policy under DeepSpeed, rollouts, packing, checkpoints."""

import os

import torch

# Without a GPU DeepSpeed takes the CPU anyway, after a warning at every import.
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
