"""Trains a small sharded model with torch's `fully_shard` and writes what the Rust side must reproduce.

    torchrun --nproc_per_node W fsdp.py --cases FILE --world_size W --output FOLDER [--permuted | --sums_in_float32]

Writes `outcomes.json`: for every case the losses of all ranks, micro-batch by micro-batch, and the whole parameters after
the last step. With `--permuted` the rows of every batch come in the opposite order, which changes nothing but the order in
which they are added up. With `--sums_in_float32` only the cases whose gradients travel in bfloat16 are trained, and the
gradients are added up in float32, which `fully_shard` does in bfloat16.

Accelerate shards on GPUs only: among processes on CPUs it ignores its FullyShardedDataParallelPlugin and replicates the
model. What it calls for the plugin's version 2 is written out here.
"""

from itertools import cycle

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.nn.functional import cross_entropy, gelu

import grid
from grid import formula, opposite

# The settings stand in `bench/src/bin/parity_fsdp.rs` as well. No number of ranks divides a size, and four ranks are more
# than there are positions.
MICRO_BATCHES, BATCH_SIZE, LENGTH = 32, 6, 3
VOCABULARY, WIDTH, HIDDEN, NUM_LAYERS, MAX_NORM = 37, 13, 29, 3, 0.3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.empty(1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x) * self.scale)


class SumInFloat32(ReduceScatter):
    """Gradients travel in the type that the policy says, divided by the number of ranks, and are added up in float32."""

    def __init__(self):
        # What is sent is allocated first, then what comes out.
        self.dtypes = cycle([None, torch.float32])

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=next(self.dtypes) or dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        rows = input_tensor / group.size()
        versions = torch.empty_like(rows)
        torch.distributed.all_to_all_single(versions, rows, group=group)
        output_tensor.zero_()
        for version in versions.chunk(group.size()):
            output_tensor += version


def make_model(case, sums_in_float32):
    model = Model()
    with torch.no_grad():
        for index, (name, param) in enumerate(model.named_parameters()):
            around = 1.0 if name == "scale" or name.endswith("norm.weight") else 0.0
            # A token and a position of equal size may cancel, and the norm of what is left magnify its rounding.
            size = 0.2 if name == "positions.weight" else 0.5
            param.copy_(formula(list(param.shape), index) * size + around)
    model.layers[1].up.weight.requires_grad_(False)
    world_size = torch.distributed.get_world_size()
    dtypes = {name: dtype and getattr(torch, dtype) for name, dtype in case["policy"].items()}
    if sums_in_float32 and world_size == 1:
        # Nothing travels, and micro-batches are added up in this type.
        dtypes["reduce_dtype"] = torch.float32
    settings = {
        "mesh": init_device_mesh("cpu", (world_size,)),
        "reshard_after_forward": case["sharding_strategy"] == "FULL_SHARD",
        "mp_policy": MixedPrecisionPolicy(**dtypes),
    }
    for layer in model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    if sums_in_float32:
        for module in [model, *model.layers]:
            module.set_custom_reduce_scatter(SumInFloat32())
    return model


def make_optimizer(name, params):
    if name == "sgd":
        # torch 2.11 has no fused SGD for parameters in parts.
        return torch.optim.SGD(params, lr=0.005, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(params, lr=5e-3, weight_decay=0.01, fused=True)


def batches(permuted):
    """Input and target of every micro-batch of this rank, dealt as Accelerate deals them."""
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    numbers = torch.arange(MICRO_BATCHES * BATCH_SIZE * world_size * LENGTH)
    tokens = (numbers * 7 + numbers // 5).remainder(VOCABULARY).reshape(-1, LENGTH)
    target = (tokens * 5 + 1).remainder(VOCABULARY)
    if permuted:
        tokens, target = opposite(tokens, BATCH_SIZE), opposite(target, BATCH_SIZE)
    return list(zip(tokens.split(BATCH_SIZE), target.split(BATCH_SIZE)))[rank::world_size]


def train(case, permuted, sums_in_float32):
    if sums_in_float32 and case["policy"]["reduce_dtype"] != "bfloat16":
        return None
    model = make_model(case, sums_in_float32)
    optimizer = make_optimizer(case["optimizer"], model.parameters())
    losses = []
    for index, (tokens, target) in enumerate(batches(permuted)):
        is_last = (index + 1) % case["accumulation"] == 0
        model.set_requires_gradient_sync(is_last)
        loss = cross_entropy(model(tokens).float().flatten(0, 1), target.flatten())
        losses.append(loss.item())
        (loss / case["accumulation"]).backward()
        if is_last:
            if case["clip"]:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    of_ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, losses)
    parameters = {name: param.full_tensor().flatten().tolist() for name, param in model.named_parameters()}
    return {"losses": list(zip(*of_ranks)), "parameters": parameters}


if __name__ == "__main__":
    # Accelerate makes no process group for a single process, and `fully_shard` wants one.
    torch.distributed.init_process_group("gloo")
    grid.run(__doc__, train, "permuted", "sums_in_float32")
