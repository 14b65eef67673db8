"""Trains a sharded model with torch's `fully_shard` and reports time and losses: the rival of `bench fsdp`.

One unit per layer, and the root. Each rank prints one line of JSON, as `bench/src/bin/fsdp_step.rs` does.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from report import tell

NUM_LAYERS, MLP_WIDTH = 12, 1024
VOCABULARY, WIDTH, NUM_HEADS, LENGTH = 1000, 256, 4, 64


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(MLP_WIDTH, MLP_WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(self.norm_1(x)).unflatten(2, (3, NUM_HEADS, WIDTH // NUM_HEADS)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2, 3))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def noise(shape, seed):
    """The same numbers in both programs: one libtorch, one generator."""
    torch.manual_seed(seed)
    return torch.randn(shape)


def initial_values(path, shape, index):
    """Matrices of noise, biases of zeros, scales of ones."""
    if len(shape) == 2:
        return noise(shape, index) * math.sqrt(2.0 / shape[1])
    return torch.zeros(shape) if path.endswith("bias") else torch.ones(shape)


def make_model(name):
    model = Mlp() if name == "mlp" else Transformer()
    with torch.no_grad():
        for index, (path, param) in enumerate(model.named_parameters()):
            param.copy_(initial_values(path, param.shape, index))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_batch(name, batch_size, rank):
    """Input and target, other ones on each rank."""
    if name == "mlp":
        shape = [batch_size, MLP_WIDTH]
        return noise(shape, 1000 + rank), noise(shape, 2000 + rank)
    tokens = torch.arange(batch_size * LENGTH).mul(7).add(rank).remainder(VOCABULARY).view(batch_size, LENGTH)
    return tokens, tokens.add(1).remainder(VOCABULARY)


def loss_of(name, output, target):
    if name == "mlp":
        return functional.mse_loss(output, target)
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def peak_resident_bytes():
    """The highest resident memory of this process so far, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line")


def train(optimizer, compute_loss, steps, warmup):
    """Takes steps, of which the first are not timed, and prints what this rank reports."""
    losses, step_ms = [], []
    started = time.perf_counter()
    for step in range(steps):
        loss = compute_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ended = time.perf_counter()
        if step >= warmup:
            step_ms.append((ended - started) * 1e3)
        started = ended
    report = {
        "rank": torch.distributed.get_rank(),
        "world_size": torch.distributed.get_world_size(),
        "step_ms": step_ms,
        "peak_resident_bytes": peak_resident_bytes(),
        "losses": losses,
    }
    tell(report)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["mlp", "transformer"], required=True)
    parser.add_argument("--batch_size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    arguments = parser.parse_args()

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = make_model(arguments.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    inputs, target = make_batch(arguments.model, arguments.batch_size, rank)
    train(optimizer, lambda: loss_of(arguments.model, model(inputs), target), arguments.steps, arguments.warmup)


if __name__ == "__main__":
    main()
