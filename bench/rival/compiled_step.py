"""Times whole training steps of a small model that returns its loss with `torch.compile` under Python Accelerate: the rival of
the race `compiled_step_torch`. `accelerate export-model compiled_step:model` compiles the same model.

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

from optimizer import formula

# The sizes stand in `bench/src/bin/compiled_step.rs` as well.
WIDTH, CLASSES, BATCH_SIZE = 64, 10, 32


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            for index, param in enumerate(self.parameters()):
                param.copy_(formula(list(param.shape), index) * 0.1)

    def forward(self, rows, labels):
        return cross_entropy(self.second(torch.relu(self.first(rows))), labels)


def model():
    return Model()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=True, dynamo_backend="inductor")
    compiled = Model()
    params = list(compiled.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, fused=True)
    compiled, optimizer = accelerator.prepare(compiled, optimizer)
    rows, labels = formula([BATCH_SIZE, WIDTH], 0.25), torch.arange(BATCH_SIZE) % CLASSES
    micros = []
    for step in range(arguments.steps):
        started = time.perf_counter()
        loss = compiled(rows, labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step >= arguments.warmup:
            micros.append((time.perf_counter() - started) * 1e6)
    with torch.no_grad():
        answer = sum(float(p.double().square().sum()) for p in params) / sum(p.numel() for p in params)
    print("report=" + json.dumps({"rank": 0, "micros": statistics.median(micros), "answer": answer}), flush=True)


if __name__ == "__main__":
    main()
