"""Writes the TorchScript files of the tests beside this file: `python generate.py`, with torch 2.11.

With a path it also makes a package of AOTInductor there, for ACCELERATE_TEST_AOTI_PACKAGE; packages hold machine code and
are not kept.
"""

import pathlib
import sys

import torch
from torch import nn

HERE = pathlib.Path(__file__).parent


class Mlp(nn.Module):
    """Two layers with dropout between, and a buffer."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.hidden(x)))))


class Tied(nn.Module):
    """Two inputs, nested outputs, one weight under two names."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 2, bias=False)
        self.unembed = nn.Linear(2, 2, bias=False)
        self.unembed.weight = self.embed.weight

    def forward(self, x, y):
        hidden = self.embed(x) + y
        return hidden, [self.unembed(hidden), hidden.sum()]


def fill(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 10 - 0.2)
    return module


def main():
    for name, module in {"mlp": Mlp(), "tied": Tied()}.items():
        torch.jit.script(fill(module)).save(str(HERE / f"{name}.pt"))
    if len(sys.argv) > 1:
        model = fill(Mlp()).eval()
        batch = torch.export.Dim("batch", min=1, max=64)
        exported = torch.export.export(model, (torch.ones(2, 3),), dynamic_shapes=({0: batch},))
        torch._inductor.aoti_compile_and_package(exported, package_path=sys.argv[1])
    model = fill(Mlp()).eval()
    print(model(torch.tensor([[1.0, 2.0, 3.0]])).tolist())


main()
