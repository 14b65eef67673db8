"""Models that `accelerate export-model` takes, and such that a package would compute wrongly."""

import random

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Tripled(torch.autograd.Function):
    """Its derivative is not that of what it computes."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return 3 * gradient


class Model(nn.Module):
    def __init__(self, forward, dropout=0.3):
        super().__init__()
        self.linear, self.dropout, self.embed = nn.Linear(4, 4), nn.Dropout(dropout), nn.Embedding(2, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.function = 0, forward

    def forward(self, x, labels):
        return self.function(self, self.linear(x) + self.embed(labels), labels)


def in_place(model, hidden, labels):
    if model.training:
        model.mean.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
    return cross_entropy(model.dropout(hidden - model.mean), labels), hidden


def tripled(model, hidden, labels):
    return cross_entropy(model.dropout(Tripled.apply(hidden)), labels)


def without_padding(model, hidden, labels):
    return cross_entropy(Tripled.apply(hidden), labels, ignore_index=0)


def only_padding(model, hidden, labels):
    return cross_entropy(hidden, torch.zeros_like(labels), ignore_index=0)


def counting(model, hidden, labels):
    model.calls += 1
    return cross_entropy(hidden / model.calls, labels)


def drawing(model, hidden, labels):
    return cross_entropy(hidden * (1 if random.random() < 0.5 else 2), labels)


def assigning(model, hidden, labels):
    model.mean = model.mean * 0.9 + 0.1 * hidden.detach().mean(0)
    return cross_entropy(hidden - model.mean, labels)


def branching(model, hidden, labels):
    loss = cross_entropy(hidden, labels)
    return loss * 2 if loss.item() > 1 else loss


def evaluating(model, hidden, labels):
    if not model.training:
        model.calls += 1
    return cross_entropy(hidden / (1 + model.calls), labels)


def one_row(model, hidden, labels):
    return cross_entropy(hidden[:, :1], labels)


def __getattr__(name):
    """`build_tripled` makes the model of the function `tripled`."""
    forward = globals()[name.removeprefix("build_")]
    return lambda: torch.manual_seed(0) and Model(forward, 0.0 if forward is in_place else 0.3)


def no_model():
    return 3


def raising():
    raise ValueError("no configuration")
