"""Trains the classifier of `src/models.rs` with Python Accelerate and prints its losses as one line of JSON.

    python3 train.py --device cuda --precision bf16 --steps 20

Numbers follow from formulas that stand in both programs.
"""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, NUM_BLOCKS, ROWS, LEARNING_RATE, MAX_NORM = 97, 48, 3, 16, 2e-3, 1.0


def wave(shape, phase):
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count, dtype=torch.float64) * 0.61 + phase).sin().to(torch.float32).reshape(shape)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            for index, param in enumerate(self.parameters()):
                param.copy_(wave(list(param.shape), index) * 0.2)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--precision", choices=["no", "bf16", "fp16"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    handlers = [GradScalerKwargs(init_scale=1024.0)] if arguments.precision == "fp16" else []
    accelerator = Accelerator(
        cpu=arguments.device == "cpu", mixed_precision=arguments.precision, kwargs_handlers=handlers
    )
    if accelerator.device.type != arguments.device:
        raise RuntimeError(f"Accelerate took {accelerator.device}")
    model = Classifier().to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(arguments.steps):
        tokens = (torch.arange(ROWS * 8, device=accelerator.device) * 31 + 7 * step) % VOCABULARY
        labels = (tokens * 5 + 3) % VOCABULARY
        logits = model(tokens.view(ROWS, 8))
        loss = functional.cross_entropy(logits.float().view(-1, VOCABULARY), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
