"""Computes the loss of a long text and its gradients as torch does it, all logits at once: the rival of `bench tiled_loss`."""

import argparse
from pathlib import Path

import torch
from torch.nn import functional

from fsdp_step import noise, peak_resident_bytes
from report import tell


def resident_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS line")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--vocabulary", type=int, required=True)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    weight = (noise([arguments.vocabulary, arguments.width], 0) * 0.02).requires_grad_()
    hidden = noise([arguments.length, arguments.width], 1).requires_grad_()
    labels = torch.arange(arguments.length).mul(7).remainder(arguments.vocabulary)
    before = resident_bytes()
    loss = functional.cross_entropy(functional.linear(hidden, weight), labels)
    loss.backward()
    taken = max(0, peak_resident_bytes() - before)
    tell({"taken_bytes": taken, "answer": [loss.item(), weight.grad.norm().item(), hidden.grad.norm().item()]})


if __name__ == "__main__":
    main()
