"""The classifier of `train.py` with its loss, which `accelerate export-model` compiles, and its training as it is.

    python3 exported.py --device cuda --output model_for_inference.pt2

Writes a package for inference and prints as one line of JSON the losses of the training, and what the package has to give.
"""

import argparse
import json

import torch
from torch.nn import functional

from train import ROWS, VOCABULARY, Classifier

STEPS, RATE, LENGTH = 6, 0.1, 8


class Trained(Classifier):
    def forward(self, tokens, labels):
        logits = super().forward(tokens)
        return functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1)), logits


def tokens(step, rows, device):
    numbers = (torch.arange(rows * LENGTH, device=device) * 31 + 7 * step) % VOCABULARY
    return numbers.view(rows, LENGTH)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    device = arguments.device
    model = Classifier().to(device).eval()
    rows = torch.export.Dim("rows", min=1)
    with torch.no_grad():
        program = torch.export.export(model, (tokens(0, 6, device),), dynamic_shapes=({0: rows},))
        logits = model(tokens(0, ROWS, device))
    torch._inductor.aoti_compile_and_package(program, package_path=arguments.output)

    trained = Trained().to(device)
    optimizer = torch.optim.SGD(trained.parameters(), lr=RATE, fused=True)
    losses = []
    for step in range(STEPS):
        given = tokens(step, ROWS, device)
        loss, _ = trained(given, (given * 5 + 3) % VOCABULARY)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(json.dumps({"losses": losses, "logits": logits.double().flatten().tolist()}))


if __name__ == "__main__":
    main()
