"""Sums over ranks with `torch.distributed` over Gloo: the rival of `allreduce_1k` to `allreduce_100m`.

Each rank prints one line of JSON for each size: the median of the microseconds of a call, and the sum of squares of its result, by
which the race checks that both sides added the same numbers.
"""

import statistics
import time

import torch
import torch.distributed

from report import tell

# As in `bench/src/bin/collectives.rs`.
SIZES = [
    ("1k", 1 << 10, 2000, 200),
    ("1m", 1 << 20, 200, 20),
    ("4m", 4 << 20, 60, 6),
    ("25m", 25 << 20, 20, 4),
    ("100m", 100 << 20, 8, 2),
]


def main() -> None:
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for name, num_bytes, count, warmup in SIZES:
        numel = num_bytes // 4
        own = torch.sin(torch.arange(numel, dtype=torch.float64) * 0.7 + rank).to(torch.float32)
        total = torch.empty_like(own)
        micros = []
        for call in range(warmup + count):
            total.copy_(own)
            torch.distributed.barrier()
            started = time.perf_counter()
            torch.distributed.all_reduce(total)
            if call >= warmup:
                micros.append((time.perf_counter() - started) * 1e6)
        report = {
            "name": name,
            "rank": rank,
            "world_size": world_size,
            "micros": statistics.median(micros),
            "answer": total.to(torch.float64).square().sum().item(),
        }
        tell(report)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
