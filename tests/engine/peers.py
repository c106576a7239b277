"""Two ranks that hold one model together; rank 1 cannot come to the second call. Run by test_vllm_peers.py."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch.distributed as dist

from rise_engine.agreement import failed_rank, gather
from rise_engine.rollout.base import RolloutRequest
from rise_engine.rollout.vllm import VllmRollout, _peers
from tests.torchrun import end

dist.init_process_group("gloo")
rank = dist.get_rank()
rollouts = VllmRollout.__new__(VllmRollout)  # without an engine: what is shared here is who asks for what
rollouts.peers = _peers(2, SimpleNamespace())

mine, everyone = rollouts._shared([RolloutRequest(f"of {rank}", i, (1,), seed=i) for i in range(rank + 1)])
said: list[object] = [[r.uid for r in everyone], [r.uid for r in everyone[mine]]]
gone = FileNotFoundError("rubric.txt is gone")


def second_call() -> None:
    if rank == 1:
        rollouts.withdraw(gone)
        raise gone
    rollouts._shared([])


try:
    gather(second_call)
except FileNotFoundError as error:
    said += [failed_rank(error), str(error), error is gone]
both: list[object] = [None, None]
dist.all_gather_object(both, said)
if rank == 0:  # lines of two ranks may run into each other
    print("RESULT", json.dumps(both))
end()
