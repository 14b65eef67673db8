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
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from optimizer import formula

WIDTH, CLASSES, BATCH_SIZE = 64, 10, 32
# How often bare and prepared training take turns.
TURNS = 5


class Clock:
    """Microseconds from step to step."""

    def __init__(self, warmup):
        self.warmup, self.steps, self.micros, self.last = warmup, 0, [], time.perf_counter()

    def step(self):
        now = time.perf_counter()
        if self.warmup <= self.steps:
            self.micros.append((now - self.last) * 1e6)
        self.last, self.steps = now, self.steps + 1


def make_model(fused):
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, CLASSES))
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(formula(list(param.shape), index) * 0.1)
    # Without `fused`, what AdamW chooses by itself.
    chosen = {"fused": True} if fused else {}
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, **chosen)


def rows(num_batches):
    num_rows = num_batches * BATCH_SIZE
    return formula([num_rows, WIDTH], 0.25), torch.arange(num_rows) % CLASSES


def mean_square(model):
    with torch.no_grad():
        params = list(model.parameters())
        return sum(float(param.double().square().sum()) for param in params) / sum(param.numel() for param in params)


def train(model, optimizer, batches, backward, clock):
    for inputs, labels in batches:
        backward(cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
        clock.step()
    return clock.micros


def with_loader(arguments, prepare):
    model, optimizer = make_model(arguments.fused)
    loader, backward = DataLoader(TensorDataset(*rows(arguments.steps)), batch_size=BATCH_SIZE), torch.Tensor.backward
    if prepare:
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        backward = accelerator.backward
    return train(model, optimizer, loader, backward, Clock(arguments.warmup)), mean_square(model)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["step", "tax"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--fused", action="store_true")
    arguments = parser.parse_args()

    if arguments.mode == "step":
        model, optimizer = make_model(arguments.fused)
        batches = [rows(1)] * arguments.steps
        micros = statistics.median(train(model, optimizer, batches, torch.Tensor.backward, Clock(arguments.warmup)))
        answer = mean_square(model)
    else:
        bare, prepared = [], []
        for _ in range(TURNS):
            bare += with_loader(arguments, False)[0]
            times, answer = with_loader(arguments, True)
            prepared += times
        micros = statistics.median(prepared) - statistics.median(bare)
    print("report=" + json.dumps({"rank": 0, "micros": micros, "answer": answer}), flush=True)


if __name__ == "__main__":
    main()
