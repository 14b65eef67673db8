"""Writes checkpoints of Python Accelerate, and what is in them, for tests of `accelerate checkpoint convert`.

    PYTHONPATH=... ACCELERATE_USE_CPU=true python generate.py

Each folder is what `save_state` wrote. `expected.json` says what each tensor has to be under its name, as hexadecimal digits.

`fsdp1` and `fsdp2` are what two ranks write with FSDP and SHARDED_STATE_DICT. Accelerate does not shard on CPUs, so that this
program shards models with PyTorch, and calls what Accelerate's `save_state` calls then.
"""

import json
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, save_fsdp_model, save_fsdp_optimizer, set_seed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

HERE = Path(__file__).parent


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 3, bias=False)
        self.tied = torch.nn.Linear(4, 3)
        self.tied.weight = self.last.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(rows))) + self.tied(self.norm(self.first(rows)))


class Registered:
    def __init__(self, state) -> None:
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state) -> None:
        self.state = state


class Pickled:
    """No plain data."""


def hexadecimal(tensor: torch.Tensor) -> str:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()).hex()


def save(name: str, make_optimizer, make_scheduler, registered=(), safe_serialization: bool = True) -> dict:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    set_seed(11)
    accelerator = Accelerator(cpu=True)
    model = Model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model)
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    scheduler = make_scheduler(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for state in registered:
        accelerator.register_for_checkpointing(Registered(state))
    for _ in range(3):
        loss = model(torch.randn(5, 3)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder), safe_serialization=safe_serialization)
    state = optimizer.state_dict()["state"]
    moments = {
        f"{key}.{ordered[number]}": hexadecimal(value)
        for number, of_parameter in state.items()
        for key, value in of_parameter.items()
        if value is not None
    }
    tensors = {key: value for key, value in model.state_dict().items() if key != "tied.weight"}
    (HERE / f"{name}.names.txt").write_text("\n".join(ordered) + "\n")
    return {
        "model": {key: hexadecimal(value) for key, value in tensors.items()},
        "optimizer": moments,
        "random_states": {"rank_0.cpu": hexadecimal(torch.get_rng_state())},
        "last_lr": scheduler.get_last_lr(),
    }


def groups(model: torch.nn.Module) -> list:
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    return [{"params": weights}, {"params": others, "weight_decay": 0.0}]


def save_sharded(rank: int, world_size: int, version: int, port: int) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    # The functions below write messages, for which there has to be one.
    PartialState(cpu=True)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(11)
    # Two ranks divide neither 5 nor 3.
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    if version == 1:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    else:
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (world_size,)))
        optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(3):
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT")
    accelerator = SimpleNamespace(process_index=rank, num_processes=world_size, wait_for_everyone=dist.barrier)
    folder = HERE / f"fsdp{version}"
    save_fsdp_model(plugin, accelerator, model, str(folder))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(scheduler.state_dict(), folder / "scheduler.bin")
        expected = {
            "model": {key: hexadecimal(value) for key, value in weights.items()},
            "optimizer": {
                f"{key}.{name}": hexadecimal(value)
                for name, of_parameter in state["state"].items()
                for key, value in of_parameter.items()
            },
            "random_states": {},
            "last_lr": scheduler.get_last_lr(),
        }
        (folder / "expected.json").write_text(json.dumps(expected))
    dist.barrier()
    dist.destroy_process_group()


def sharded(version: int) -> dict:
    folder = HERE / f"fsdp{version}"
    shutil.rmtree(folder, ignore_errors=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(save_sharded, (2, version, port), 2)
    expected = folder / "expected.json"
    said = json.loads(expected.read_text())
    expected.unlink()
    return said


def main() -> None:
    def halving(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

    expected = {
        "adamw": save(
            "adamw",
            lambda model: torch.optim.AdamW(groups(model), lr=1e-2),
            halving,
            [{"best": 0.5, "epochs": [1, 2], "running": torch.arange(3.0)}, Pickled(), 7],
        ),
        "sgd": save(
            "sgd",
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
            lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
            safe_serialization=False,
        ),
        "named": save(
            "named",
            lambda model: torch.optim.AdamW(model.named_parameters(), lr=1e-2, amsgrad=True),
            halving,
        ),
        "plain": save("plain", lambda model: torch.optim.SGD(model.parameters(), lr=0.1), halving),
    }
    expected |= {f"fsdp{version}": sharded(version) for version in (1, 2)}
    # Accelerate has no loss scale on a CPU, where this is what it would write.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    torch.save(scaler.state_dict(), HERE / "adamw" / "scaler.pt")
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
