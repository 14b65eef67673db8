"""Models that `accelerate export-model` compiles, and their training as they are with Python Accelerate.

    accelerate export-model exported:mlp --inputs ... --output mlp.pt2
    torchrun --nproc_per_node W exported.py --cases FILE --world_size W --output FOLDER

Writes `outcomes.json`: for every case the losses of all ranks, those of an evaluation after each step, and at the end the
parameters and buffers of every rank.
"""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import grid
from grid import formula

# The settings stand in `bench/src/bin/parity_exported.rs` as well.
MICRO_BATCHES, BATCH_SIZE, WIDTH, CLASSES = 12, 8, 12, 5


def with_values(model):
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(formula(list(param.shape), index) * 0.2)
    return model


class Mlp(nn.Module):
    """Gives a tuple."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, rows, labels):
        logits = self.second(torch.relu(self.first(rows)))
        return cross_entropy(logits, labels), logits


class Tied(nn.Module):
    """Batch norm, a weight under two names, a frozen bias, two parameters with the same gradient; gives a dictionary."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.left, self.right = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)
        self.right.weight = self.left.weight
        self.first.bias.requires_grad_(False)

    def forward(self, rows, labels):
        hidden = torch.relu(self.norm(self.first(rows)))
        logits = self.left(hidden) + self.right(hidden)
        return {"logits": logits, "loss": cross_entropy(logits, labels)}


class Direct(nn.Module):
    """The gradient is the input itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(BATCH_SIZE, WIDTH))

    def forward(self, rows, labels):
        return (self.weight * rows).sum(), labels


class Attention(nn.Module):
    """A table that is looked up and a block of a transformer, for which the rows of a batch are one sequence."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, rows, labels):
        hidden = self.block((self.embed(labels) + rows).unsqueeze(0))
        return mse_loss(hidden.squeeze(0), rows)


def mlp():
    return with_values(Mlp())


def tied():
    return with_values(Tied())


def direct():
    return with_values(Direct())


def attention():
    return with_values(Attention())


def loss_of(outputs):
    return outputs if isinstance(outputs, torch.Tensor) else outputs["loss"] if isinstance(outputs, dict) else outputs[0]


def train(case):
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case["accumulation"])
    rank, world_size = accelerator.process_index, accelerator.num_processes
    model = globals()[case["model"]]()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)

    def of_all_ranks(value):
        return accelerator.gather(torch.tensor([value], dtype=torch.float64)).tolist()

    outcome = {"losses": [], "evaluations": []}
    for step in range(MICRO_BATCHES):
        rows = formula([BATCH_SIZE, WIDTH], 0.25 + step * world_size + rank)
        labels = (torch.arange(BATCH_SIZE) + step + rank) % CLASSES
        model.train()
        with accelerator.accumulate(model):
            loss = loss_of(model(rows, labels))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        outcome["losses"].append(of_all_ranks(loss.item()))
        model.eval()
        with torch.no_grad():
            outcome["evaluations"].append(of_all_ranks(loss_of(model(rows, labels)).item()))
    unwrapped = accelerator.unwrap_model(model)
    state = {**dict(unwrapped.named_parameters()), **dict(unwrapped.named_buffers())}
    outcome["state"] = {
        name: accelerator.gather(tensor.detach().double().reshape(1, -1)).flatten().tolist()
        for name, tensor in state.items()
    }
    return outcome


if __name__ == "__main__":
    grid.run(__doc__, train)
