"""Trains a small model from a checkpoint of Python Accelerate, and saves one: Python's half of `cargo xtask parity checkpoint`.

    python checkpoint.py --optimizer adamw [--load FOLDER] [--save FOLDER] --first 3 --steps 3 --losses FILE --names FILE

`bench/src/bin/parity_checkpoint.rs` does the same with the library of this repository. Losses are written as the digits of
their float32 bits, because a difference of one bit counts.
"""

import argparse
import json
import struct
from pathlib import Path

import torch
from accelerate import Accelerator

WIDTH = 8
ROWS = 8


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(torch.nn.functional.gelu(self.norm(self.hidden(rows))))


class Progress:
    """What a program registers."""

    def __init__(self) -> None:
        self.state = {"step": 0, "best": 1.5, "name": "first"}

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(step * ROWS * WIDTH, (step + 1) * ROWS * WIDTH, dtype=torch.float32)
    rows = numbers.reshape(ROWS, WIDTH).mul(0.1).sin()
    return rows, rows.sum(1, keepdim=True)


def make_optimizer(name: str, model: Model) -> torch.optim.Optimizer:
    """With the kernels that the Rust side calls as well, and parameters in two groups."""
    decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1, fused=True)
    raise ValueError(f"unknown optimizer {name!r}; known: adamw, sgd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", required=True)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--names", type=Path)
    arguments = parser.parse_args()

    torch.manual_seed(7)
    accelerator = Accelerator(cpu=True)
    model = Model()
    optimizer = make_optimizer(arguments.optimizer, model)
    if arguments.names:
        names = {parameter: name for name, parameter in model.named_parameters()}
        ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        arguments.names.write_text("\n".join(ordered))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if arguments.load:
        accelerator.load_state(str(arguments.load))
        assert progress.state["step"] == arguments.first, progress.state

    losses = []
    for step in range(arguments.first, arguments.first + arguments.steps):
        rows, targets = batch(step)
        # Random numbers go on, too.
        rows = rows + torch.rand(rows.shape) * 1e-3
        loss = torch.nn.functional.mse_loss(model(rows), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(struct.pack(">f", loss.item()).hex())
        progress.state["step"] = step + 1
    arguments.losses.write_text(json.dumps(losses))
    if arguments.save:
        accelerator.save_state(str(arguments.save))


if __name__ == "__main__":
    main()
