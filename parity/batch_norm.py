"""Trains a model with batch norm with Python Accelerate and writes what the Rust side must reproduce.

    torchrun --nproc_per_node W batch_norm.py --cases FILE --world_size W --output FOLDER

Writes `outcomes.json`: for every case the losses of all ranks in training and evaluation and the learning rates of all
ranks, micro-batch by micro-batch, and at the end the parameters and buffers of every rank.
"""

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import grid
from grid import formula

# The settings stand in `bench/src/bin/parity_batch_norm.rs` as well.
MICRO_BATCHES, BATCH_SIZE, WIDTH, CLASSES = 24, 8, 12, 5


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = torch.nn.BatchNorm1d(2 * WIDTH)
        self.second = torch.nn.Linear(2 * WIDTH, CLASSES)
        with torch.no_grad():
            for index, param in enumerate(self.parameters()):
                param.copy_(formula(list(param.shape), index) * 0.2)

    def forward(self, inputs):
        return self.second(torch.relu(self.norm(self.first(inputs))))


def labelled(count, phase):
    return formula([count, WIDTH], phase), torch.arange(count) % CLASSES


def train(case):
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=case["accumulation"],
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=case["broadcast_buffers"])],
    )
    world_size = accelerator.num_processes
    model = Model()
    plain_optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    scheduler = ReduceLROnPlateau(plain_optimizer, factor=0.7, patience=1)
    rows = TensorDataset(*labelled(MICRO_BATCHES * BATCH_SIZE * world_size, 0.25))
    model, optimizer, loader = accelerator.prepare(model, plain_optimizer, DataLoader(rows, batch_size=BATCH_SIZE))
    # Every rank evaluates other rows.
    held_out, held_out_labels = labelled(BATCH_SIZE, 1.0 + accelerator.process_index)

    def of_all_ranks(value):
        return accelerator.gather(torch.tensor([value], dtype=torch.float64)).tolist()

    outcome = {"losses": [], "evaluations": [], "lrs": []}
    for inputs, labels in loader:
        model.train()
        with accelerator.accumulate(model):
            loss = cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        outcome["losses"].append(of_all_ranks(loss.item()))
        model.eval()
        for _ in range(case["evaluations"]):
            with torch.no_grad():
                evaluated = cross_entropy(model(held_out), held_out_labels).item()
            outcome["evaluations"].append(of_all_ranks(evaluated))
        if case["plateau"]:
            scheduler.step(evaluated)
        outcome["lrs"].append(of_all_ranks(plain_optimizer.param_groups[0]["lr"]))
    state = accelerator.unwrap_model(model).state_dict()
    outcome["state"] = {
        name: accelerator.gather(tensor.double().reshape(1, -1)).flatten().tolist() for name, tensor in state.items()
    }
    return outcome


if __name__ == "__main__":
    grid.run(__doc__, train)
