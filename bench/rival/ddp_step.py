"""Trains the case with Python Accelerate and reports time and memory: the rival of `ddp_step` and `ddp_memory`.

Each rank prints one line of JSON: milliseconds per step after the warm-up steps, its peak resident
memory in bytes, and its losses, from which the race checks that both sides computed the same.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parity"))

import torch
from accelerate import Accelerator

from case import load_model, load_rows, make_optimizer
from report import tell


def peak_resident_bytes() -> int:
    """The highest resident memory of this process so far, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=Path, required=True)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=8)
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    model = load_model(arguments.case)
    optimizer = make_optimizer(arguments.optimizer, model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, load_rows(arguments.case, arguments.batch_size))
    model.train()
    losses, step_ms = [], []
    started = time.perf_counter()
    for step, (input_ids, attention_mask, labels) in enumerate(loader):
        if step == arguments.steps:
            break
        loss, _ = model(input_ids, attention_mask, labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ended = time.perf_counter()
        if step >= arguments.warmup:
            step_ms.append((ended - started) * 1e3)
        started = ended

    report = {
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "step_ms": step_ms,
        "peak_resident_bytes": peak_resident_bytes(),
        "losses": losses,
    }
    tell(report)
    accelerator.wait_for_everyone()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
