"""Trains the case with Python Accelerate and writes what the Rust side must reproduce.

    torchrun --nproc_per_node W ddp_train.py --case FOLDER --optimizer sgd --steps 50 --output FOLDER

Writes `losses.json`, one list of per-rank losses for every step, and `final.safetensors`, the
parameters after the last step.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import save_file

from case import load_model, load_rows, make_optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=Path, required=True)
    parser.add_argument("--optimizer", required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--world_size", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=True)
    # Under some launchers Accelerate quietly runs single processes; comparing those would prove nothing.
    if accelerator.num_processes != arguments.world_size:
        raise RuntimeError(f"{accelerator.num_processes} processes take part; {arguments.world_size} were asked for")
    model = load_model(arguments.case)
    optimizer = make_optimizer(arguments.optimizer, model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, load_rows(arguments.case, arguments.batch_size))
    model.train()

    losses = []
    for step, (input_ids, attention_mask, labels) in enumerate(loader):
        if step == arguments.steps:
            break
        loss, _ = model(input_ids, attention_mask, labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).tolist())
    if len(losses) != arguments.steps:
        raise RuntimeError(f"the case has rows for {len(losses)} steps; {arguments.steps} were asked for")

    if accelerator.is_main_process:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "losses.json").write_text(json.dumps(losses) + "\n")
        state = accelerator.unwrap_model(model).state_dict()
        save_file({name: tensor.clone() for name, tensor in state.items()}, arguments.output / "final.safetensors")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
