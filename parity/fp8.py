"""Trains a small model in FP8 with torchao, or by a transcription of TransformerEngine's delayed scaling, and writes what the Rust
side must reproduce.

    torchrun --nproc_per_node W fp8.py --cases FILE --world_size W --output FOLDER [--permuted]

Writes `outcomes.json`: for every case the losses of all ranks step by step, and at the end the largest values and scales of the
FP8 layers. With `--permuted` the rows of every batch come in the opposite order, which changes nothing but the order in which
they are added up.

torchao's kernel has scales for rows on GPUs only, so all of its products are emulated. TransformerEngine computes on GPUs only, and
is written down here as it is defined: `DelayedScaling` in its `common/recipe/__init__.py`, `pytorch/quantization.py`, and
the kernel that updates scales, `common/recipe/delayed_scaling.cu`.
"""

import dataclasses

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.ao import convert_model_to_fp8_ao, filter_linear_layers, find_first_last_linear_layers
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_utils import tensor_to_amax, tensor_to_scale

import grid
from grid import formula, opposite

# The settings stand in `bench/src/bin/parity_fp8.rs` as well.
STEPS, BATCH_SIZE, SIZES = 50, 16, [24, 64, 96, 40, 64, 64, 10]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def largest(dtype):
    return torch.finfo(dtype).max


class Remembered:
    """The scale of one tensor, and the largest values of the passes before it."""

    def __init__(self, recipe, dtype):
        self.recipe, self.dtype, self.updates = recipe, dtype, 0
        self.amax_history = torch.zeros(recipe["amax_history_len"])
        self.scale = torch.tensor(1.0)

    def rounded(self, matrix):
        """Codes and what they are multiplied by to be numbers again are the same as these numbers."""
        bound = largest(self.dtype)
        return (matrix.float() * self.scale).clamp(-bound, bound).to(self.dtype).float() / self.scale

    def record(self, matrix):
        self.amax_history[0] = torch.maximum(self.amax_history[0], matrix.detach().abs().max().float())

    def update(self):
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.amax_history[0], op=torch.distributed.ReduceOp.MAX)
        if self.recipe["amax_compute_algo"] == "max":
            amax = self.amax_history.max()
        else:
            amax = self.amax_history[0].clone()
        self.amax_history.copy_(torch.roll(self.amax_history, -1, 0))
        self.amax_history[0] = 0.0
        # The setting has no counterpart in TransformerEngine any more: steps between two computations of a scale.
        if self.updates % self.recipe["interval"] == 0:
            # A division of 32 bits, as in TransformerEngine's kernel; a number over a tensor would be multiplied by its reciprocal.
            scale = torch.full_like(amax, largest(self.dtype) * 2.0 ** -self.recipe["margin"]) / amax
            scale = torch.where(amax > 0.0, scale, self.scale)
            scale = torch.where(torch.isfinite(amax), scale, self.scale)
            self.scale = torch.where(torch.isinf(scale), torch.full_like(scale, torch.finfo(torch.float32).max), scale)
        self.updates += 1


class DelayedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        rows = x.reshape(-1, x.shape[-1])
        layer.input.record(rows)
        layer.weight_scale.record(weight)
        x_8, weight_8 = layer.input.rounded(rows), layer.weight_scale.rounded(weight)
        ctx.layer, ctx.bias_dtype = layer, bias.dtype
        ctx.save_for_backward(x_8, weight_8)
        output = torch.mm(x_8, weight_8.t()) + bias.to(x.dtype).float()
        return output.to(x.dtype).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient):
        x_8, weight_8 = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        ctx.layer.gradient.record(rows)
        gradient_8 = ctx.layer.gradient.rounded(rows)
        of_input = torch.mm(gradient_8, weight_8).to(gradient.dtype).reshape(*gradient.shape[:-1], -1)
        of_weight = torch.mm(gradient_8.t(), x_8).to(gradient.dtype)
        return of_input, of_weight.float(), rows.sum(0, dtype=ctx.bias_dtype), None


class DelayedLinear(torch.nn.Module):
    def __init__(self, linear, recipe):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.input, self.weight_scale = Remembered(recipe, E4M3), Remembered(recipe, E4M3)
        self.gradient = Remembered(recipe, E5M2 if recipe["fp8_format"] == "HYBRID" else E4M3)

    def forward(self, x):
        is_autocast = torch.is_autocast_enabled("cpu")
        if is_autocast:
            x = x.to(torch.bfloat16)
        with torch.autocast("cpu", enabled=False):
            return DelayedProduct.apply(x, self.weight, self.bias, self)

    def remembered(self):
        return {"input": self.input, "weight": self.weight_scale, "grad_output": self.gradient}


def make_model(case):
    layers = []
    for inputs, outputs in zip(SIZES, SIZES[1:]):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(formula(list(param.shape), index) * 0.2)
    if case["delayed"] is None:
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(case["recipe"]), emulate=True)
        convert_model_to_fp8_ao(model, config=config, module_filter_func=None)
        for module in model.modules():
            if isinstance(module, Float8Linear):
                # What Float8Linear does under the autocast of GPUs, it does not under that of CPUs.
                module.register_forward_pre_hook(
                    lambda _, inputs: (inputs[0].bfloat16() if torch.is_autocast_enabled("cpu") else inputs[0],)
                )
    else:
        ends = list(find_first_last_linear_layers(model))
        for name, module in list(model.named_children()):
            if isinstance(module, torch.nn.Linear) and filter_linear_layers(module, name, ends):
                setattr(model, name, DelayedLinear(module, case["delayed"]))
    return model


def make_optimizer(name, params):
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True)
    return torch.optim.AdamW(params, lr=2e-3, weight_decay=0.01, fused=True)


def scales_of(model):
    """By number of the layer among all linear layers, and tensor: the largest values, and the scale."""
    scales, number = {}, -1
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, DelayedLinear)):
            number += 1
        if isinstance(module, Float8Linear):
            cast, powers = module.config.cast_config_weight, module.config.round_scales_to_power_of_2
            is_rowwise = cast.scaling_granularity is ScalingGranularity.AXISWISE
            options = {"scaling_granularity": cast.scaling_granularity, "axiswise_dim": -1 if is_rowwise else None}
            amax = tensor_to_amax(module.weight.detach(), **options)
            scale = tensor_to_scale(module.weight.detach(), E4M3, round_scales_to_power_of_2=powers, **options)
            scales[f"{number}.weight"] = [*amax.flatten().tolist(), *scale.flatten().tolist()]
        if isinstance(module, DelayedLinear):
            for name, remembered in module.remembered().items():
                past = [amax for amax in remembered.amax_history[1:].tolist() if amax > 0.0]
                scales[f"{number}.{name}"] = [*past, remembered.scale.item()]
    return scales


def train(case, permuted):
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    plain = make_model(case)
    optimizer = make_optimizer(case["optimizer"], plain.parameters())
    count = STEPS * BATCH_SIZE * accelerator.num_processes
    inputs, labels = formula([count, SIZES[0]], 0.25), torch.arange(count) % SIZES[-1]
    if permuted:
        inputs, labels = opposite(inputs, BATCH_SIZE), opposite(labels, BATCH_SIZE)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=BATCH_SIZE)
    model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
    outcome = {"losses": []}
    for inputs, labels in loader:
        with torch.autocast("cpu", torch.bfloat16, enabled=case["autocast"]):
            logits = model(inputs)
        loss = cross_entropy(logits.float(), labels)
        outcome["losses"].append(accelerator.gather(loss.detach().double().reshape(1)).tolist())
        accelerator.backward(loss)
        for module in plain.modules():
            if isinstance(module, DelayedLinear):
                for remembered in module.remembered().values():
                    remembered.update()
        optimizer.step()
        optimizer.zero_grad()
    outcome["scales"] = scales_of(plain)
    return outcome


if __name__ == "__main__":
    grid.run(__doc__, train, "permuted")
