"""A rank that is killed in its loop, and comes back: the rival's half of the race `launch_restart`."""

import os
import signal
import sys
import time

import torch
from accelerate import Accelerator

NUM_STEPS = 10


def say(line):
    """One write for each line: both ranks have one pipe, and `print` may write the end of a line by itself."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


accelerator = Accelerator(cpu=True)
rank, restart = accelerator.process_index, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
total = 0.0
for step in range(NUM_STEPS):
    total += accelerator.reduce(torch.tensor([1.0]), reduction="sum").item()
    if step == 0:
        say(f"in_loop rank={rank} restart={restart} at={time.time()}")
if restart == 0 and rank == 1:
    say(f"killed at={time.time()}")
    os.kill(os.getpid(), signal.SIGKILL)
if restart == 0:
    # The other rank is not there any more.
    accelerator.reduce(torch.tensor([1.0]), reduction="sum")
say(f"done rank={rank} sum={total}")
torch.distributed.destroy_process_group()
