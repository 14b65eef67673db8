"""Writes golden.json: what torch 2.11.0, accelerate 1.15.0 and huggingface_hub compute for the decisions of accelerate-core.

Run it in the Python environment of the parity checks; it needs no device and starts no processes.
"""

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from unittest import mock

import accelerate
import huggingface_hub
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.state import PartialState
from accelerate.utils import convert_file_size_to_int, dataclasses as configuration, str_to_bool
from huggingface_hub import split_torch_state_dict_into_shards
from torch.optim import SGD, lr_scheduler
from torch.utils.data import BatchSampler, IterableDataset

MODES = {"even": (False, True), "uneven": (False, False), "drop_last": (True, True)}


def batch_sampler_shard():
    """Indices per rank, for row counts around every border of a round."""
    cases = []
    for num_rows, batch_size, num_processes in itertools.product((0, 1, 2, 3, 5, 7, 8, 9, 12, 13), (1, 2, 3, 4), (1, 2, 3)):
        for mode, (drop_last, even_batches) in MODES.items():
            for split_batches in (False, True):
                if split_batches and batch_size % num_processes:
                    continue
                ranks = [
                    list(
                        BatchSamplerShard(
                            BatchSampler(range(num_rows), batch_size, drop_last),
                            num_processes,
                            rank,
                            split_batches=split_batches,
                            even_batches=even_batches,
                        )
                    )
                    for rank in range(num_processes)
                ]
                cases.append([num_rows, batch_size, num_processes, mode, split_batches, ranks])
    return cases


def ragged_batches():
    """The same over a sampler that has no batch_size."""

    class Ragged:
        def __init__(self, batches, drop_last):
            self.batches, self.drop_last, self.batch_size = batches, drop_last, None

        def __len__(self):
            return len(self.batches)

        def __iter__(self):
            return iter(list(batch) for batch in self.batches)

    cases = []
    for num_batches, num_processes, (mode, (drop_last, even_batches)) in itertools.product(range(1, 7), (2, 3), MODES.items()):
        batches = [list(range(10 * number, 10 * number + 1 + number % 3)) for number in range(num_batches)]
        shard = lambda rank: BatchSamplerShard(Ragged(batches, drop_last), num_processes, rank, even_batches=even_batches)
        cases.append([batches, num_processes, mode, [list(shard(rank)) for rank in range(num_processes)]])
    return cases


def iterable_dataset_shard():
    class Count(IterableDataset):
        def __init__(self, num_rows):
            self.num_rows = num_rows

        def __iter__(self):
            return iter(range(self.num_rows))

    cases = []
    for num_rows, batch_size, num_processes in itertools.product((1, 2, 3, 5, 8, 10, 12), (1, 2, 4), (2, 3)):
        for drop_last, split_batches in itertools.product((False, True), (False, True)):
            if split_batches and batch_size % num_processes:
                continue
            shard = lambda rank: IterableDatasetShard(
                Count(num_rows), batch_size, drop_last, num_processes, rank, split_batches
            )
            ranks = [list(shard(rank)) for rank in range(num_processes)]
            cases.append([num_rows, batch_size, num_processes, drop_last, split_batches, ranks])
    return cases


def split_between_processes():
    cases = []
    for num_items, num_processes, apply_padding in itertools.product(range(1, 8), (1, 2, 3, 4), (False, True)):
        ranks = []
        for rank in range(num_processes):
            state = mock.Mock(num_processes=num_processes, process_index=rank, distributed_type="MULTI_CPU")
            with PartialState.split_between_processes(state, list(range(num_items)), apply_padding) as part:
                ranks.append(part)
        cases.append([num_items, num_processes, apply_padding, ranks])
    return cases


def schedules():
    """Learning rate (the initial one is 1) and, for one-cycle, momentum, at every step from 0."""

    def rates(make, num_steps, **optimizer_arguments):
        optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, **optimizer_arguments)
        scheduler = make(optimizer)
        out = []
        for _ in range(num_steps):
            group = optimizer.param_groups[0]
            out.append([group["lr"], group["momentum"]])
            optimizer.step()
            if len(out) < num_steps:
                scheduler.step()
        return out

    plain = {
        "step_decay": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
        "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5], 0.5),
        "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        "cosine_annealing": lambda o: lr_scheduler.CosineAnnealingLR(o, 10, 0.1),
        "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
    }
    cycles = [
        dict(total_steps=10),
        dict(total_steps=11, anneal_strategy="linear"),
        dict(total_steps=20, three_phase=True),
        dict(total_steps=20, three_phase=True, anneal_strategy="linear", pct_start=0.25),
        dict(total_steps=12, pct_start=0.5, div_factor=10.0, final_div_factor=100.0, base_momentum=0.7, max_momentum=0.9),
        dict(total_steps=7, cycle_momentum=False),
    ]
    return {
        "plain": {name: [rate for rate, _ in rates(make, 14)] for name, make in plain.items()},
        "one_cycle": [
            [
                cycle,
                rates(lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, **cycle), cycle["total_steps"] + 1, momentum=0.5),
            ]
            for cycle in cycles
        ],
    }


def sizes():
    texts = ["10GB", "5gb", "8Gb", "2MB", "3Mb", "7KB", "9kb", "1GiB", "2gib", "3MiB", "4KiB", "1.5GB", "0.5GiB", "0.3MB", "0GB"]
    return [[text, convert_file_size_to_int(text)] for text in texts]


def shards():
    cases = []
    for num_bytes in ([4, 4, 4], [4, 30, 4, 8], [30, 40], [10, 10, 10], [3, 3, 3, 3, 3], [11, 1], [1, 11, 9], []):
        tensors = {f"t{position}": torch.zeros(size, dtype=torch.uint8) for position, size in enumerate(num_bytes)}
        split = split_torch_state_dict_into_shards(tensors, max_shard_size=10, filename_pattern="model{suffix}.safetensors")
        files = [[name, names] for name, names in split.filename_to_tensors.items()]
        cases.append([[[name, t.numel()] for name, t in tensors.items()], files, split.metadata["total_size"], split.is_sharded])
    return cases


def buckets():
    dtypes = {"float32": torch.float32, "float16": torch.float16}
    cases = []
    for parameters in (
        [["float32", 2]] * 6,
        [["float32", size] for size in (100, 1, 1, 300, 2, 2, 2)],
        [["float32", 3], ["float16", 3], ["float32", 4], ["float16", 20], ["float32", 1]],
        [["float16", 1]],
        [["float32", 1000]],
    ):
        tensors = [torch.zeros(size, dtype=dtypes[dtype]) for dtype, size in parameters]
        for limits in ([16, 40], [40], [1, 1_000_000]):
            found, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(tensors, limits)
            cases.append([parameters, limits, found])
    return cases


def defaults():
    """Fields and defaults of the configuration records."""
    names = ["AutocastKwargs", "DataLoaderConfiguration", "DistributedDataParallelKwargs", "GradScalerKwargs", "GradientAccumulationPlugin", "ProjectConfiguration"]
    plain = lambda value: value.value if hasattr(value, "value") else value
    out = {}
    for name in names:
        record = getattr(configuration, name)
        # Constructing would look at the machine; the fields say it all.
        out[name] = {
            field.name: None
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            else plain(field.default if field.default is not dataclasses.MISSING else field.default_factory())
            for field in dataclasses.fields(record)
        }
    return out


def names():
    return {
        "DistributedType": [value.value for value in configuration.DistributedType],
        "RNGType": [value.value for value in configuration.RNGType],
        "PrecisionType": [value.value for value in configuration.PrecisionType],
        "DDPCommunicationHookType": [value.value for value in configuration.DDPCommunicationHookType],
        "true": [text for text in ("y", "YES", "t", "True", "on", "1") if str_to_bool(text) == 1],
        "false": [text for text in ("n", "NO", "f", "False", "off", "0") if str_to_bool(text) == 0],
    }


def main():
    sections = [batch_sampler_shard, ragged_batches, iterable_dataset_shard, split_between_processes, schedules, sizes, shards, buckets, defaults, names]
    versions = {"accelerate": accelerate.__version__, "huggingface_hub": huggingface_hub.__version__, "torch": torch.__version__.split("+")[0]}
    golden = {"versions": versions} | {section.__name__: section() for section in sections}
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("golden.json")
    # One section per line: small, and a change shows which decision moved.
    lines = [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in golden.items()]
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
