"""What the programs share that train a grid of cases: numbers by formula, arguments, and the file of outcomes."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import PartialState


def formula(shape, phase):
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count, dtype=torch.float64) * 0.7 + phase).sin().to(torch.float32).reshape(shape)


def opposite(rows, batch_size):
    """The rows of every batch in the opposite order, which changes nothing but the order in which they are added up."""
    return rows.unflatten(0, (-1, batch_size)).flip(1).flatten(0, 1)


def run(description, train, *flags):
    """Calls `train(case, ...)` with what the command line says of `flags` for every case, and writes what it returns to
    `outcomes.json`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--world_size", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    arguments = parser.parse_args()
    given = {flag: getattr(arguments, flag) for flag in flags}

    state = PartialState(cpu=True)
    # Under some launchers Accelerate quietly runs single processes; comparing those would prove nothing.
    if state.num_processes != arguments.world_size:
        raise RuntimeError(f"{state.num_processes} processes take part; {arguments.world_size} were asked for")
    outcomes = [train(case, **given) for case in json.loads(arguments.cases.read_text())]
    if state.is_main_process:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "outcomes.json").write_text(json.dumps(outcomes) + "\n")
    state.wait_for_everyone()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
