"""Saves and loads 512 MiB of state with torch.distributed.checkpoint and with Accelerate's `save_state`, and reads what an
index of 300 shards says: the rival of `bench checkpoint`.

Each rank prints one line of JSON, as `bench/src/bin/checkpoint.rs` does. Sizes stand in both programs.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

from report import tell

NUM_LAYERS, WIDTH, BATCH_SIZE = 32, 1182, 16


def formula(shape, phase):
    """Numbers between -1 and 1 that both sides make alike."""
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count, dtype=torch.float64) * 0.7 + phase).sin().to(torch.float32).reshape(shape)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))
        with torch.no_grad():
            for index, param in enumerate(self.parameters()):
                param.copy_(formula(list(param.shape), index) * 0.05)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def status_bytes(key):
    """Memory of this process, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key} line")


class Training:
    def __init__(self):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        model = Mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.input = formula([BATCH_SIZE, WIDTH], self.accelerator.process_index)

    def step(self):
        loss = self.model(self.input).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def answer(self):
        """The mean squares of parameters and of the optimizer's moments."""
        params = list(self.model.parameters())
        moments = [state[name] for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        means = []
        for tensors in (params, moments):
            total = sum(tensor.double().square().sum().item() for tensor in tensors)
            means.append(total / sum(tensor.numel() for tensor in tensors))
        return means

    def state_dict(self):
        """Of model and optimizer, as torch.distributed.checkpoint wants it. Its tensors are those of the run."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save_distributed(self, folder):
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state_dict(), checkpoint_id=str(folder))

    def load_distributed(self, folder):
        """Into the tensors of the run: nothing is copied afterwards."""
        import torch.distributed.checkpoint as dcp

        dcp.load(self.state_dict(), checkpoint_id=str(folder))

    def save_accelerate(self, folder):
        self.accelerator.save_state(str(folder))

    def load_accelerate(self, folder):
        self.accelerator.load_state(str(folder))


def timed(accelerator, work):
    """What it takes until all ranks are through, in milliseconds."""
    accelerator.wait_for_everyone()
    start = time.perf_counter()
    work()
    accelerator.wait_for_everyone()
    return (time.perf_counter() - start) * 1e3


def time_way(training, arguments, name, save, load):
    answer = training.answer()
    save_ms, load_ms, grown_bytes = [], [], 0
    for number in range(arguments.times):
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS:")
        save_ms.append(timed(training.accelerator, lambda: save(arguments.folder / f"{name}_{number}")))
        grown_bytes = max(grown_bytes, status_bytes("VmHWM:") - before)
    for number in range(arguments.times):
        training.step()
        if training.answer() == answer:
            raise RuntimeError("a step has changed nothing")
        load_ms.append(timed(training.accelerator, lambda: load(arguments.folder / f"{name}_{number}")))
        if training.answer() != answer:
            raise RuntimeError(f"{name}: what was loaded is not what was saved")
    return {"save_ms": save_ms, "load_ms": load_ms, "grown_bytes": grown_bytes, "answer": answer}


def time_state(arguments):
    training = Training()
    training.step()
    ways = {
        "distributed": (training.save_distributed, training.load_distributed),
        "accelerate": (training.save_accelerate, training.load_accelerate),
    }
    save, load = ways[arguments.way]
    report = time_way(training, arguments, arguments.way, save, load)
    report["rank"] = training.accelerator.process_index
    report["world_size"] = training.accelerator.num_processes
    tell(report)
    training.accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()


def time_async(arguments):
    """How long the call takes that begins to save in the background."""
    import torch.distributed.checkpoint as dcp

    training = Training()
    training.step()
    stall_ms = []
    for number in range(arguments.times):
        training.step()
        training.accelerator.wait_for_everyone()
        start = time.perf_counter()
        saving = dcp.async_save(training.state_dict(), checkpoint_id=str(arguments.folder / f"distributed_{number}"))
        stall_ms.append((time.perf_counter() - start) * 1e3)
        saving.result()
    report = {
        "rank": training.accelerator.process_index,
        "world_size": training.accelerator.num_processes,
        "stall_ms": stall_ms,
        "answer": training.answer(),
    }
    tell(report)
    training.accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()


def time_index(arguments):
    from safetensors import safe_open

    index_ms = []
    for _ in range(arguments.times):
        start = time.perf_counter()
        index = json.loads((arguments.folder / "model.safetensors.index.json").read_text())
        shapes = {}
        for file in sorted(set(index["weight_map"].values())):
            with safe_open(arguments.folder / file, framework="pt") as opened:
                for name in opened.keys():
                    shapes[name] = opened.get_slice(name).get_shape()
        index_ms.append((time.perf_counter() - start) * 1e3)
        if shapes.keys() != index["weight_map"].keys():
            raise RuntimeError("other tensors than in the index")
    print("report=" + json.dumps({"rank": 0, "index_ms": index_ms}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["state", "async", "index"], required=True)
    parser.add_argument("--way", choices=["distributed", "accelerate"], default="distributed")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--times", type=int, required=True)
    arguments = parser.parse_args()
    {"state": time_state, "async": time_async, "index": time_index}[arguments.mode](arguments)


if __name__ == "__main__":
    main()
