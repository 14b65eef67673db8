"""Saves a small model as TorchScript, trains it, and prints its losses as one line of JSON.

    python3 script_module.py --device cuda --output model.pt
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn

from train import wave

STEPS, RATE = 6, 0.1


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    model = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5))
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(wave(list(param.shape), index) * 0.5)
    model = torch.jit.script(model)
    torch.jit.save(model, str(arguments.output))
    model.to(arguments.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, fused=True)
    losses = []
    for step in range(STEPS):
        loss = model(wave([8, 12], step).to(arguments.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
