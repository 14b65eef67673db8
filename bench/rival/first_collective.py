"""A rank that sums its number over all ranks: the rival's half of the race `launch_first_collective`."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), reduction="sum")
print(f"rank={accelerator.process_index} world_size={accelerator.num_processes} sum={total.item()}", flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
