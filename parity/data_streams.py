"""Runs through loaders with Python Accelerate and writes which rows each rank gets.

    torchrun --nproc_per_node W data_streams.py --cases FILE --world_size W --output FOLDER

Writes `rank<r>.json`: for every case the batches of this rank in each epoch, what
`gather_for_metrics` returned, and what the default generator gives next. Rows are their own numbers.
"""

import argparse
import json
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, WeightedRandomSampler


class Numbers(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        return row


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(range(self.rows))


class Ragged:
    """Batches of 1, 2, 3, 1, 2, 3, ... rows: a batch sampler without a batch size."""

    drop_last = False

    def __init__(self, rows):
        self.batches, start, size = [], 0, 1
        while start < rows:
            self.batches.append(list(range(start, min(start + size, rows))))
            start, size = start + size, size % 3 + 1

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def make_loader(case, rank):
    if case["kind"] == "stream":
        return DataLoader(Stream(case["rows"]), batch_size=case["batch_size"], drop_last=case["drop_last"])
    if case["kind"] == "ragged":
        return DataLoader(Numbers(case["rows"]), batch_sampler=Ragged(case["rows"]))
    options = {"batch_size": case["batch_size"], "drop_last": case["drop_last"]}
    generator = None
    if case["own_generator"]:
        generator = torch.Generator()
        generator.manual_seed(seed_of(case, rank) + 7)
    rows = case["rows"]
    if case["sampler"] == "weighted":
        options["sampler"] = WeightedRandomSampler([1.0 + row % 3 for row in range(rows)], rows, generator=generator)
    elif case["sampler"] == "subset":
        options["sampler"] = SubsetRandomSampler(range(0, rows, 2), generator=generator)
    elif case["sampler"] == "random":
        options.update(shuffle=True, generator=generator)
    return DataLoader(Numbers(rows), **options)


def seed_of(case, rank):
    return case["seed"] + (100 * rank if case["seed_per_rank"] else 0)


def run(case):
    try:
        return run_whole(case)
    except TypeError as error:
        # The dispatcher broadcasts None when there is no whole round, on all ranks alike.
        return {"epochs": [[], []], "metrics": [[], []], "next_draw": 0, "error": str(error)}


def run_whole(case):
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            split_batches=case["split_batches"],
            even_batches=case["even_batches"],
            dispatch_batches=case["dispatch_batches"],
            use_seedable_sampler=case["seedable"],
            data_seed=case["seed"] if case["seedable"] else None,
        ),
    )
    rank = accelerator.process_index
    torch.manual_seed(seed_of(case, rank))
    loader = accelerator.prepare_data_loader(make_loader(case, rank))
    epochs, metrics = [], []
    for epoch in range(2):
        batches, gathered = [], []
        passing = skip_first_batches(loader, case["skip"]) if case["skip"] and epoch == 0 else loader
        for batch in passing:
            batches.append(batch.tolist())
            if case["metrics"]:
                gathered += accelerator.gather_for_metrics(batch).tolist()
        epochs.append(batches)
        metrics.append(gathered)
    next_draw = int(torch.empty((), dtype=torch.int64).random_().item())
    return {"epochs": epochs, "metrics": metrics, "next_draw": next_draw}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--world_size", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")

    accelerator = Accelerator(cpu=True)
    # Under some launchers Accelerate quietly runs single processes; comparing those would prove nothing.
    if accelerator.num_processes != arguments.world_size:
        raise RuntimeError(f"{accelerator.num_processes} processes take part; {arguments.world_size} were asked for")
    results = [run(case) for case in json.loads(arguments.cases.read_text())]
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"rank{accelerator.process_index}.json").write_text(json.dumps(results) + "\n")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
