"""One side of a race: does steps when it is told to, with Python Accelerate. The other side is `src/races.rs`.

    python3 race.py --device cuda --race gpt2 --size full

Says when it is ready, with the answers of its first steps. Then each line of its input is an order: a number of steps, which it
times, or `busy` and a number, for which it says how long the device was at work in one of them.
"""

import argparse
import json
import sys
import time

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

NUM_ANSWERS = 3
# The sizes stand in `src/races.rs` as well: vocabulary, width, layers, heads, length, batch size.
SIZES = {
    "small": {"full": (100, 64, 4, 4, 16, 1), "tiny": (100, 64, 4, 4, 16, 1)},
    "small_graphs": {"full": (100, 64, 4, 4, 16, 1)},
    "bert_8": {"full": (30522, 768, 12, 12, 128, 8), "tiny": (101, 32, 2, 2, 16, 2)},
    "bert_64": {"full": (30522, 768, 12, 12, 128, 64), "tiny": (101, 32, 2, 2, 16, 4)},
    "gpt2": {"full": (50257, 768, 12, 12, 1024, 8), "tiny": (101, 32, 2, 2, 32, 2)},
}
ROWS, ROW, BATCH_SIZE = {"full": 2048, "tiny": 128}, 12288, 64


def noise(shape, seed, device):
    """Numbers between -0.5 and 0.5, as `noise` in `src/transformer.rs` makes them."""
    count = 1
    for size in shape:
        count *= size
    numbers = (torch.arange(count, dtype=torch.float64, device=device) * 12.9898 + seed).sin() * 43758.5453
    return (numbers - numbers.floor() - 0.5).to(torch.float32).reshape(shape)


def fill(model, device):
    with torch.no_grad():
        for index, (name, param) in enumerate(model.named_parameters()):
            if param.dim() > 1:
                param.copy_(noise(list(param.shape), index, device) * 0.1)
            else:
                param.fill_(0.0 if name.endswith("bias") else 1.0)


class Block(nn.Module):
    """A layer of GPT-2, or with its norms behind the additions one of BERT."""

    def __init__(self, width, heads, is_bert):
        super().__init__()
        self.heads, self.is_bert = heads, is_bert
        self.norm_1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=not self.is_bert)
        return self.out(attended.transpose(1, 2).flatten(2, 3))

    def widen(self, x):
        return self.down(functional.gelu(self.up(x)))

    def forward(self, x):
        if self.is_bert:
            x = self.norm_1(x + self.attend(x))
            return self.norm_2(x + self.widen(x))
        x = x + self.attend(self.norm_1(x))
        return x + self.widen(self.norm_2(x))


class Transformer(nn.Module):
    """Logits of two classes from the first token as BERT, of the next tokens by its own table as GPT-2."""

    def __init__(self, vocabulary, width, layers, heads, length, is_bert):
        super().__init__()
        self.is_bert, self.length = is_bert, length
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.h = nn.ModuleList(Block(width, heads, is_bert) for _ in range(layers))
        if is_bert:
            self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(self.length, device=tokens.device))
        if self.is_bert:
            x = self.norm(x)
        for block in self.h:
            x = block(x)
        if self.is_bert:
            return self.head(torch.tanh(self.pooler(x[:, 0])))
        return functional.linear(self.norm(x), self.wte.weight)


def training(race, size, device):
    vocabulary, width, layers, heads, length, batch_size = SIZES[race][size]
    is_bert = race.startswith("bert")
    precision = "no" if race.startswith("small") else "bf16"
    backend = "cudagraphs" if race == "small_graphs" else "no"
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision, dynamo_backend=backend)
    model = Transformer(vocabulary, width, layers, heads, length, is_bert).to(device)
    fill(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = ((torch.arange(batch_size * length, device=device) * 7919) % vocabulary).view(batch_size, length)
    labels = torch.arange(batch_size, device=device) % 2 if is_bert else (tokens * 5 + 3) % vocabulary

    def step():
        logits = model(tokens)
        loss = functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def optimizer_alone(device):
    """148 tensors of a transformer with 12 layers of width 80."""
    layer = [[240, 80], [240], [80, 80], [80], [320, 80], [320], [80, 320], [80], [80], [80], [80], [80]]
    shapes = [[100, 80], [64, 80], [80], [80]] + layer * 12
    params = [nn.Parameter(noise(shape, index, device)) for index, shape in enumerate(shapes)]
    for index, param in enumerate(params):
        param.grad = noise(list(param.shape), index + 0.5, device)
    accelerator = Accelerator(cpu=device == "cpu")
    optimizer = accelerator.prepare(torch.optim.AdamW(params, lr=1e-3, fused=True))

    def flat():
        return torch.cat([param.detach().reshape(-1) for param in params])

    # What the first steps change shows the rule: a tensor is mostly what it began with.
    state = {"before": flat(), "left": NUM_ANSWERS}

    def step():
        optimizer.step()
        if state["left"] == 0:
            return params[0].detach()
        state["left"] -= 1
        after = flat()
        change = (after - state["before"]) * 1e3
        state["before"] = after
        return change

    return step


def loader(size, device):
    """One pass over the rows, each batch of which is added up on the device."""
    configuration = DataLoaderConfiguration(non_blocking=True)
    accelerator = Accelerator(cpu=device == "cpu", dataloader_config=configuration)
    dataset = TensorDataset(noise([ROWS[size], ROW], 0.0, "cpu"))
    batches = accelerator.prepare(DataLoader(dataset, batch_size=BATCH_SIZE, pin_memory=device == "cuda"))

    def step():
        total = torch.zeros((), device=device)
        for (rows,) in batches:
            total += rows.sum()
        return total

    return step


def answer(result):
    return (result if result.numel() == 1 else result.square().mean()).double().item()


def busy_seconds(step, steps, synchronize):
    """How long kernels and copies of one step keep the device at work."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        synchronize()
    events = profiler.profiler.kineto_results.events()
    on_device = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.start_ns(), event.start_ns() + event.duration_ns()) for event in on_device if not event.is_user_annotation())
    busy, end = 0, 0
    for start, stop in spans:
        busy += max(0, stop - max(start, end))
        end = max(end, stop)
    return busy / 1e9 / steps


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--race", choices=[*SIZES, "optimizer", "loader"], required=True)
    parser.add_argument("--size", choices=["tiny", "full"], required=True)
    arguments = parser.parse_args()
    device = arguments.device
    if arguments.race == "optimizer":
        step = optimizer_alone(device)
    elif arguments.race == "loader":
        step = loader(arguments.size, device)
    else:
        step = training(arguments.race, arguments.size, device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    def say(value):
        print("race=" + json.dumps(value), flush=True)

    say([answer(step()) for _ in range(NUM_ANSWERS)])
    for line in sys.stdin:
        words = line.split()
        if words[0] == "busy":
            say(busy_seconds(step, int(words[1]), synchronize))
            continue
        synchronize()
        start = time.perf_counter()
        for _ in range(int(words[0])):
            step()
        synchronize()
        say(time.perf_counter() - start)


if __name__ == "__main__":
    main()
