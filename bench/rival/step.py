"""Times whole training steps of a tiny model with torch and with Python Accelerate: the rival of `bench step`.

Prints one line of JSON: the median time of a step, and the mean square of the parameters at the end, from which the
race checks that both sides computed the same.
"""

import argparse
import json
import statistics
import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from optimizer import formula

WIDTH, CLASSES, BATCH_SIZE = 64, 10, 32


class Clock:
    """Microseconds from step to step."""

    def __init__(self, warmup):
        self.warmup, self.steps, self.micros, self.last = warmup, 0, [], time.perf_counter()

    def step(self):
        now = time.perf_counter()
        if self.warmup <= self.steps:
            self.micros.append((now - self.last) * 1e6)
        self.last, self.steps = now, self.steps + 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["step", "bare", "prepared"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--fused", action="store_true")
    arguments = parser.parse_args()

    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, CLASSES))
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(formula(list(param.shape), index) * 0.1)
    num_rows = arguments.steps * BATCH_SIZE
    inputs = formula([num_rows, WIDTH], 0.25)
    labels = torch.arange(num_rows) % CLASSES
    fused = {"fused": True} if arguments.fused else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, **fused)
    loss_function = torch.nn.functional.cross_entropy
    params = list(model.parameters())
    if arguments.mode == "step":
        inputs, labels = inputs[:BATCH_SIZE], labels[:BATCH_SIZE]
        clock = Clock(arguments.warmup)
        for _ in range(arguments.steps):
            loss_function(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.step()
    else:
        loader = DataLoader(TensorDataset(inputs, labels), batch_size=BATCH_SIZE)
        backward = torch.Tensor.backward
        if arguments.mode == "prepared":
            accelerator = Accelerator(cpu=True)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            backward = accelerator.backward
        clock = Clock(arguments.warmup)
        for batch, batch_labels in loader:
            backward(loss_function(model(batch), batch_labels))
            optimizer.step()
            optimizer.zero_grad()
            clock.step()
    with torch.no_grad():
        total = sum(float(param.double().square().sum()) for param in params)
        answer = total / sum(param.numel() for param in params)
    print("report=" + json.dumps({"rank": 0, "micros": statistics.median(clock.micros), "answer": answer}), flush=True)


if __name__ == "__main__":
    main()
