"""Makes data_golden.json: orders, batches and generator draws of torch 2.11.0 and accelerate 1.15.0.

    python data_golden.py > data_golden.json

Starts itself on 2 and 3 processes (gloo, CPU) for the prepared loaders.
"""

import json
import os
import subprocess
import sys
import tempfile

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import gather_object
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler


def next_draw():
    """What the default generator gives next: shows whether both sides have drawn equally often."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


def collate(rows):
    return torch.tensor(rows)


def batches(loader, limit=None):
    out = []
    for batch in loader:
        out.append(batch.tolist())
        if len(out) == limit:
            break
    return out


def generator(seed):
    g = torch.Generator()
    g.manual_seed(seed)
    return g


def plain():
    torch.manual_seed(42)
    loader = DataLoader(range(11), batch_size=4, shuffle=True, collate_fn=collate)
    shuffled = {"epochs": [batches(loader), batches(loader)], "next_draw": next_draw()}

    torch.manual_seed(42)
    loader = DataLoader(range(6), batch_size=4, collate_fn=collate)
    sequential = {"epochs": [batches(loader)], "next_draw": next_draw()}

    torch.manual_seed(42)
    loader = DataLoader(range(9), batch_size=3, shuffle=True, generator=generator(7), collate_fn=collate)
    own = {
        "epochs": [batches(loader), batches(loader, limit=1), batches(loader), batches(loader)],
        "next_draw": next_draw(),
    }

    torch.manual_seed(42)
    sampler = RandomSampler(range(10), num_samples=25, generator=generator(3))
    loader = DataLoader(range(10), batch_size=10, sampler=sampler, collate_fn=collate)
    oversampled = {"epochs": [batches(loader), batches(loader)], "next_draw": next_draw()}

    torch.manual_seed(42)
    subset = {"epochs": [list(SubsetRandomSampler([3, 5, 8, 13, 21])) for _ in range(2)], "next_draw": next_draw()}
    torch.manual_seed(42)
    weights = [0.1, 0.0, 2.0, 0.5]
    weighted = {"epochs": [list(WeightedRandomSampler(weights, 12)) for _ in range(2)], "next_draw": next_draw()}
    return {
        "shuffled": shuffled,
        "sequential": sequential,
        "own_generator": own,
        "oversampled": oversampled,
        "subset": subset,
        "weighted": weighted,
    }


CASES = [
    # name, rows, batch size, drop_last, seeds (one, or one per rank), configuration
    ("shuffle", 22, 4, False, "same", {}),
    ("shuffle_device_specific", 22, 4, False, "per rank", {}),
    ("shuffle_drop_last", 23, 3, True, "same", {}),
    ("shuffle_split", 22, 6, False, "same", {"split_batches": True}),
    ("shuffle_uneven", 23, 4, False, "same", {"even_batches": False}),
    ("seedable", 22, 4, False, "same", {"use_seedable_sampler": True}),
    ("seedable_data_seed", 21, 3, False, "same", {"use_seedable_sampler": True, "data_seed": 5}),
    ("own_generator", 20, 3, False, "same", {}),
    ("subset_sampler", 20, 2, False, "per rank", {}),
    ("subset_sampler_seedable", 20, 2, False, "same", {"use_seedable_sampler": True}),
    ("weighted_sampler", 20, 3, False, "per rank", {}),
    ("weighted_sampler_own_generator", 20, 3, False, "per rank", {}),
    ("weighted_sampler_seedable", 20, 3, False, "same", {"use_seedable_sampler": True}),
    ("own_generator_dispatched", 20, 3, False, "same", {"dispatch_batches": True}),
]


def prepared(path):
    """The batches of this rank for every case, gathered on rank 0 and written there."""
    results = {}
    for name, rows, batch_size, drop_last, seeds, configuration in CASES:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration))
        rank = accelerator.process_index
        torch.manual_seed(42 + (rank if seeds == "per rank" else 0))
        order = {"shuffle": True}
        if name.startswith("own_generator"):
            order["generator"] = generator(9)
        if name.startswith("subset_sampler"):
            order = {"sampler": SubsetRandomSampler(range(0, rows, 2))}
        if name.startswith("weighted_sampler"):
            own = generator(9 + rank) if name.endswith("own_generator") else None
            order = {"sampler": WeightedRandomSampler([1.0 + row % 3 for row in range(rows)], rows, generator=own)}
        loader = DataLoader(range(rows), batch_size=batch_size, drop_last=drop_last, collate_fn=collate, **order)
        loader = accelerator.prepare(loader)
        epochs = [batches(loader), batches(loader)]
        mine = [{"epochs": epochs, "next_draw": next_draw()}]
        results[name] = gather_object(mine)
        AcceleratorState._reset_state()
        GradientState._reset_state()
    if rank == 0:
        with open(path, "w") as f:
            json.dump(results, f)


def main():
    if len(sys.argv) > 1:
        return prepared(sys.argv[1])
    result = {"torch": torch.__version__.split("+")[0], "plain": plain(), "prepared": {}}
    for world_size in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "out.json")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
            environment = dict(os.environ, ACCELERATE_USE_CPU="true")
            subprocess.run(command + [__file__, path], check=True, env=environment)
            with open(path) as f:
                result["prepared"][str(world_size)] = json.load(f)
    result["cases"] = {
        name: {"rows": rows, "batch_size": batch_size, "drop_last": drop_last, "seeds": seeds, "configuration": configuration}
        for name, rows, batch_size, drop_last, seeds, configuration in CASES
    }
    # One line per case, so that a change shows which.
    lines = []
    for key, value in result.items():
        if key == "prepared":
            worlds = [
                f'"{world}": {{\n' + ",\n".join(f'    "{name}": {json.dumps(case)}' for name, case in cases.items()) + "\n  }"
                for world, cases in value.items()
            ]
            text = "{\n  " + ",\n  ".join(worlds) + "\n}"
        elif isinstance(value, dict):
            text = "{\n" + ",\n".join(f'  "{name}": {json.dumps(case)}' for name, case in value.items()) + "\n}"
        else:
            text = json.dumps(value)
        lines.append(f"{json.dumps(key)}: {text}")
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main()
