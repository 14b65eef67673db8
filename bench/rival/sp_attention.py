"""Computes attention whose heads and tokens ranks exchange by torch's all-to-all, forward and backward, and reports time and an
answer: the rival of `bench sp_step`. Each rank prints one line of JSON, as `bench/src/bin/sp_attention.rs` does.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional

from fsdp_step import noise, peak_resident_bytes
from report import tell


def to_heads(packed, num_ranks):
    """`[batch, own tokens, n, heads, width]` to `[batch, n, own heads, tokens, width]`."""
    batch, tokens, n, heads, width = packed.shape
    sent = packed.view(batch, tokens, n, num_ranks, heads // num_ranks, width).permute(3, 1, 0, 2, 4, 5).contiguous()
    received = all_to_all_single(torch.empty_like(sent), sent)
    return received.flatten(0, 1).permute(1, 2, 3, 0, 4)


def to_tokens(heads, num_ranks):
    """`[batch, own heads, tokens, width]` to `[batch, heads, own tokens, width]`."""
    batch, own, tokens, width = heads.shape
    sent = heads.view(batch, own, num_ranks, tokens // num_ranks, width).permute(2, 1, 0, 3, 4).contiguous()
    received = all_to_all_single(torch.empty_like(sent), sent)
    return received.flatten(0, 1).transpose(0, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ["batch_size", "length", "heads", "head_dim", "steps", "warmup"]:
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    own = arguments.length // num_ranks
    shape = [arguments.batch_size, arguments.length, arguments.heads, arguments.head_dim]
    inputs = [noise(shape, seed)[:, rank * own : (rank + 1) * own].contiguous().requires_grad_() for seed in range(3)]
    step_ms, losses = [], []
    for step in range(arguments.steps):
        started = time.perf_counter()
        query, key, value = to_heads(torch.stack(inputs, dim=2), num_ranks).unbind(1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        loss = to_tokens(attended, num_ranks).square().mean()
        loss.backward()
        if arguments.warmup <= step:
            step_ms.append((time.perf_counter() - started) * 1e3)
        losses.append(loss.item() + sum(tensor.grad.norm().item() for tensor in inputs))
        for tensor in inputs:
            tensor.grad.zero_()
    report = {"rank": rank, "world_size": num_ranks, "step_ms": step_ms, "losses": losses}
    tell(report | {"peak_resident_bytes": peak_resident_bytes()})
    dist.barrier()


if __name__ == "__main__":
    main()
