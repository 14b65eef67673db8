"""A rank that is killed in its loop, and comes back: the rival's half of the race `launch_restart`."""

import os
import signal
import time

import torch
from accelerate import Accelerator

NUM_STEPS = 10

accelerator = Accelerator(cpu=True)
rank, restart = accelerator.process_index, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
total = 0.0
for step in range(NUM_STEPS):
    total += accelerator.reduce(torch.tensor([1.0]), reduction="sum").item()
    if step == 0:
        print(f"in_loop rank={rank} restart={restart} at={time.time()}", flush=True)
if restart == 0 and rank == 1:
    print(f"killed at={time.time()}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if restart == 0:
    # The other rank is not there any more.
    accelerator.reduce(torch.tensor([1.0]), reduction="sum")
print(f"done rank={rank} sum={total}", flush=True)
torch.distributed.destroy_process_group()
