"""Runs through a loader with Python Accelerate and reports its pace: the rival of the races of `bench loader`.

Each rank prints one line of JSON: a time, and the sum of all tokens that it got, from which the race checks that both
sides read the same.
"""

import argparse
import json
import time

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.utils.data import DataLoader, Dataset, IterableDataset

TOKENS = 128
BATCH_SIZE = 32
SKIPPED_BATCHES = 10_000


def tokens(num_rows):
    return (torch.arange(num_rows).unsqueeze(1) * 31 + torch.arange(TOKENS).unsqueeze(0) * 7) % 50_257


class Memory(Dataset):
    def __init__(self, num_rows):
        self.tokens = tokens(num_rows)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, row):
        return self.tokens[row]


class Work(Dataset):
    """Each row keeps the processor busy for a millisecond, as decoding an image would."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, row):
        end = time.perf_counter() + 1e-3
        while time.perf_counter() < end:
            pass
        return torch.tensor([(row * 31 + column * 7) % 50_257 for column in range(TOKENS)])


class Stream(IterableDataset):
    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __iter__(self):
        for row in range(self.num_rows):
            yield (row * 31 + torch.arange(TOKENS) * 7) % 50_257


def pace(loader, num_batches):
    """Microseconds per batch of the second pass, the first one warms up; and the sum of its tokens."""
    for _ in range(2):
        total, start = 0, time.perf_counter()
        for batch in loader:
            total += int(batch.sum())
        micros = (time.perf_counter() - start) * 1e6 / num_batches
    return micros, total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["memory", "work", "skip", "first-batch", "dispatch"], required=True)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--batches", type=int, default=500)
    arguments = parser.parse_args()

    dispatch = arguments.mode == "dispatch"
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    num_rows = arguments.batches * BATCH_SIZE
    if arguments.mode == "dispatch":
        loader = DataLoader(Stream(num_rows * accelerator.num_processes), batch_size=BATCH_SIZE)
    elif arguments.mode == "work":
        loader = DataLoader(Work(num_rows), batch_size=BATCH_SIZE, num_workers=arguments.num_workers)
    elif arguments.mode == "skip":
        loader = DataLoader(Memory((SKIPPED_BATCHES + 1) * BATCH_SIZE), batch_size=BATCH_SIZE)
    else:
        loader = DataLoader(Memory(num_rows), batch_size=BATCH_SIZE, num_workers=arguments.num_workers)
    loader = accelerator.prepare(loader)

    if arguments.mode == "skip":
        start = time.perf_counter()
        batch = next(iter(skip_first_batches(loader, SKIPPED_BATCHES)))
        micros, total = (time.perf_counter() - start) * 1e6, int(batch.sum())
    elif arguments.mode == "first-batch":
        start = time.perf_counter()
        batch = next(iter(loader))
        micros, total = (time.perf_counter() - start) * 1e6, int(batch.sum())
    else:
        micros, total = pace(loader, arguments.batches)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    print("report=" + json.dumps({"rank": rank, "world_size": world_size, "micros": micros, "sum": total}), flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
