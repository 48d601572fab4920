"""Trains so many steps with checkpoints, going on where it was; told to, worker 0 dies before a step.

resumes.py ROOT STEPS [DIE_AT]
"""

import os
import signal
import sys

import torch

import fleet

root, steps, die_at = sys.argv[1], int(sys.argv[2]), int((*sys.argv, -1)[3])
fleet.init()
torch.manual_seed(0)
model = torch.nn.Sequential(fleet.nn.Embedding(None, 4), torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), model=model)
print("told", fleet.resume_from(root), flush=True)
if fleet.is_server():
    if die_at == 0:
        raise SystemExit("ends before it serves")
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    with fleet.Checkpoints(root, every_steps=3, background=False) as checkpoints:
        for step in range(fleet.resume_step(), steps):
            if step == die_at and fleet.is_first_worker():
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.minimize((model(torch.arange(step, step + 4)) - 1).square().mean())
            checkpoints.after_step()
    fleet.barrier_worker()
    with torch.no_grad():
        print("ends with", model(torch.arange(20)).flatten().tolist(), flush=True)
    fleet.stop_worker()
