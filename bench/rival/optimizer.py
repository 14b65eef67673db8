"""Times torch's fused AdamW alone: the rival of the races of `bench optimizer`.

Prints one line of JSON: the median time of a step, and the mean square of the parameters at the end, from which the
race checks that both sides computed the same.
"""

import argparse
import json
import statistics
import time

import torch

MAX_NORM = 1.0


def formula(shape, phase):
    """Numbers between -1 and 1 that both sides make alike."""
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count, dtype=torch.float64) * 0.7 + phase).sin().to(torch.float32).reshape(shape)


def shapes(mode):
    if mode != "small":
        return [[2000, 2000]] * 8
    layer = [[240, 80], [240], [80, 80], [80], [320, 80], [320], [80, 320], [80], [80], [80], [80], [80]]
    return [[100, 80], [64, 80], [80], [80]] + layer * 12


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["small", "large", "sweep"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    arguments = parser.parse_args()

    params, gradients = [], []
    for index, shape in enumerate(shapes(arguments.mode)):
        params.append(torch.nn.Parameter(formula(shape, index)))
        gradients.append(formula(shape, index + 0.5) * 0.01)
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, fused=True)
    micros = []
    if arguments.mode == "sweep":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1_000_000)
        for step in range(arguments.steps):
            for param, gradient in zip(params, gradients):
                scaler.scale((param * gradient).sum()).backward()
            start = time.perf_counter()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if arguments.warmup <= step:
                micros.append((time.perf_counter() - start) * 1e6)
    else:
        for param, gradient in zip(params, gradients):
            (param * gradient).sum().backward()
        for step in range(arguments.steps):
            start = time.perf_counter()
            optimizer.step()
            if arguments.warmup <= step:
                micros.append((time.perf_counter() - start) * 1e6)
    with torch.no_grad():
        total = sum(float(param.double().square().sum()) for param in params)
        answer = total / sum(param.numel() for param in params)
    print("report=" + json.dumps({"rank": 0, "micros": statistics.median(micros), "answer": answer}), flush=True)


if __name__ == "__main__":
    main()
