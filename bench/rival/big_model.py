"""Makes the folder of offloaded weights, or computes a model over it with Python Accelerate: the rival of `bench big_model`.

The folder is the one that our half reads, so both sides read the same files out of the same page cache.
"""

import argparse
import json
import statistics
import time

import torch
from accelerate import disk_offload, init_empty_weights
from accelerate.utils import offload_state_dict

NUM_LAYERS, WIDTH = 32, 2048


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--passes", type=int, default=5)
    return parser.parse_args()


def make(folder):
    """Weights of 512 MiB by which the numbers of the input neither vanish nor grow."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(WIDTH, WIDTH, generator=generator) * (2 / WIDTH) ** 0.5
    offload_state_dict(folder, {f"{2 * number}.weight": draw() for number in range(NUM_LAYERS)})


def drop_caches():
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3")


@torch.no_grad()
def main():
    arguments = parse()
    if arguments.make:
        return make(arguments.folder)
    torch.set_num_threads(1)
    with init_empty_weights():
        layers = [(torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.ReLU()) for _ in range(NUM_LAYERS)]
        model = torch.nn.Sequential(*[layer for pair in layers for layer in pair])
    model = disk_offload(model, arguments.folder, execution_device=torch.device("cpu"))
    inputs = torch.arange(WIDTH, dtype=torch.float32).remainder(17).unsqueeze(0) / 8 - 1
    warm, answers = [], set()
    # The first pass is that of nobody: it makes what is made once.
    for number in range(arguments.passes + 2):
        if number == 1:
            drop_caches()
        start = time.perf_counter()
        output = model(inputs)
        millis = (time.perf_counter() - start) * 1e3
        answers.add(output.double().abs().sum().item())
        if number == 1:
            cold = millis
        elif number > 1:
            warm.append(millis)
    report = {"cold": cold, "warm": statistics.median(warm), "answers": sorted(answers)}
    print(f"report={json.dumps(report)}", flush=True)


if __name__ == "__main__":
    main()
