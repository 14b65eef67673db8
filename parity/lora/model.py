"""The small model of the comparisons of adapters, and its cases. The same model stands in `crates/accelerate/tests/lora`."""

import math

import torch
from torch import nn

ROWS, WORDS, WIDTH, INNER, CLASSES, NUM_IDS = 4, 5, 6, 10, 3, 11


def formula(shape, shift):
    """Numbers that both sides compute alike."""
    count = math.prod(shape)
    return torch.sin(torch.arange(count, dtype=torch.float64) * 0.7 + shift).reshape(shape).float()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.up_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, INNER)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, hidden):
        return hidden + self.down_proj(torch.tanh(self.up_proj(torch.tanh(self.q_proj(hidden)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(NUM_IDS, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList([Block(), Block()])
        self.score = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids=None, **_):
        hidden = self.embed(ids)
        for block in self.layers:
            hidden = block(hidden)
        return self.score(hidden.mean(1))


def model():
    made = Model()
    with torch.no_grad():
        for index, param in enumerate(made.parameters()):
            param.copy_(formula(list(param.shape), index) * 0.5)
    return made


def ids(step):
    """Words of a batch; the first column is padding now and then."""
    numbers = torch.arange(ROWS * WORDS) * 7 + step * 3
    return (numbers % NUM_IDS).reshape(ROWS, WORDS)


def labels(step):
    return (torch.arange(ROWS) + step) % CLASSES


# As keyword arguments of `peft.LoraConfig`.
CASES = {
    "list": dict(target_modules=["q_proj", "down_proj"], r=2, lora_alpha=4),
    "pattern": dict(target_modules=r"^(?!.*layers\.1).*_proj$", r=3, lora_alpha=6, use_rslora=True),
    "embedding": dict(target_modules=["embed", "up_proj"], r=2),
    "bias_all": dict(target_modules=["q_proj"], r=2, bias="all"),
    "bias_lora_only": dict(target_modules=["up_proj", "down_proj"], r=2, bias="lora_only"),
    "modules_to_save": dict(
        target_modules=["q_proj", "up_proj"], exclude_modules=["layers.0.q_proj"], modules_to_save=["score"], r=2
    ),
    "rank_pattern": dict(
        target_modules=["q_proj", "up_proj"], r=4, rank_pattern={"layers.1.q_proj": 2, "^layers\\.0\\..*": 3},
        alpha_pattern={"up_proj": 16},
    ),
    "layers_to_transform": dict(target_modules=["q_proj", "up_proj"], layers_to_transform=[1], layers_pattern="layers", r=2),
    "all_linear": dict(target_modules="all-linear", r=2),
    "lora_bias": dict(target_modules=["q_proj", "up_proj"], r=2, lora_bias=True),
    "dropout": dict(target_modules=["q_proj", "down_proj"], r=2, lora_dropout=0.25),
    "gaussian": dict(target_modules=["q_proj", "embed"], r=2, init_lora_weights="gaussian"),
    "random": dict(target_modules=["q_proj", "embed"], r=2, init_lora_weights=False, lora_alpha=1.5),
}
