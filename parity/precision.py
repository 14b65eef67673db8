"""Trains a small model in every precision with Python Accelerate and writes what the Rust side must reproduce.

    torchrun --nproc_per_node W precision.py --cases FILE --world_size W --output FOLDER [--permuted]

Writes `outcomes.json`: for every case the losses of all ranks, the learning rate and whether the step was skipped,
micro-batch by micro-batch. With `--permuted` the rows of every batch come in the opposite order, which changes nothing but
the order in which they are added up.

Accelerate refuses or ignores fp16 on a CPU, so that is written out with what Accelerate uses: torch's autocast and
GradScaler.
"""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import grid
from grid import formula, opposite

# The settings stand in `bench/src/bin/parity_precision.rs` as well.
MICRO_BATCHES, BATCH_SIZE, WIDTH, PART, CLASSES, MAX_NORM = 100, 16, 48, 8, 10, 0.3


class Attention(torch.nn.Module):
    """Attention and dropout over the parts of each row, which take the batch first."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(PART, 2, dropout=0.1, batch_first=True)
        self.dropout = torch.nn.Dropout(0.1)
        self.second = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        parts = inputs.reshape(-1, WIDTH // PART, PART)
        attended, _ = self.attention(parts, parts, parts, need_weights=False)
        return self.second(self.dropout(attended).flatten(1))


def make_model(kind):
    model = Attention() if kind == "attention" else torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 2 * WIDTH),
        torch.nn.LayerNorm(2 * WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(2 * WIDTH, CLASSES),
    )
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(formula(list(param.shape), index) * 0.2)
    return model


def make_optimizer(name, params, half):
    if name == "sgd":
        # Where its first step is skipped, the fused kernel of torch 2.11 goes on with momentum that was never set.
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, fused=not half)
    return torch.optim.AdamW(params, lr=2e-3, weight_decay=0.01, fused=True)


def linear_with_warmup(optimizer, warmup, total):
    def factor(step):
        return step / max(1, warmup) if step < warmup else max(0.0, (total - step) / max(1, total - warmup))

    return LambdaLR(optimizer, factor)


def rows(world_size, permuted):
    count = MICRO_BATCHES * BATCH_SIZE * world_size
    inputs, labels = formula([count, WIDTH], 0.25), torch.arange(count) % CLASSES
    if permuted:
        inputs, labels = opposite(inputs, BATCH_SIZE), opposite(labels, BATCH_SIZE)
    return DataLoader(TensorDataset(inputs, labels), batch_size=BATCH_SIZE)


def train(case, permuted):
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    half = case["precision"] == "fp16"
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="no" if half else case["precision"],
        gradient_accumulation_steps=case["accumulation"],
    )
    world_size = accelerator.num_processes
    # Dropout draws on both sides alike, on each rank for itself.
    set_seed(accelerator.process_index)
    model = make_model(case["model"])
    optimizer = make_optimizer(case["optimizer"], model.parameters(), half)
    scheduler = linear_with_warmup(optimizer, 10, MICRO_BATCHES * world_size)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=20, enabled=half)
    plain_optimizer, plain_scheduler = optimizer, scheduler
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, rows(world_size, permuted), scheduler)
    outcome = {"losses": [], "lrs": [], "skipped": []}
    for index, (inputs, labels) in enumerate(loader):
        skipped = False
        with accelerator.accumulate(model):
            with torch.autocast("cpu", torch.float16, enabled=half):
                logits = model(inputs)
            loss = cross_entropy(logits.float(), labels)
            outcome["losses"].append(accelerator.gather(loss.detach().double().reshape(1)).tolist())
            accelerator.backward(scaler.scale(loss * float("inf") if index in case["planted"] else loss))
            if accelerator.sync_gradients:
                scaler.unscale_(plain_optimizer)
                if case["clip"]:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            if half:
                if accelerator.sync_gradients:
                    scale = scaler.get_scale()
                    scaler.step(plain_optimizer)
                    scaler.update()
                    skipped = scaler.get_scale() < scale
                    for _ in range(0 if skipped else world_size):
                        plain_scheduler.step()
                    plain_optimizer.zero_grad()
            else:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        outcome["skipped"].append(skipped)
        outcome["lrs"].append(plain_scheduler.get_last_lr()[0])
    return outcome


if __name__ == "__main__":
    grid.run(__doc__, train, "permuted")
