"""Writes what PyTorch's optimizers, schedules, clipping and loss scaling compute, for the Rust tests.

Run with torch 2.11.0:  python parity/optim/generate.py
Outputs (committed): optimizers.json, schedules.json, clip.json, grad_scaler.json, beside this file.
`transformers` is not needed: its three warmup formulas are written down here as lambdas.
"""

import json
import math
import pathlib

import torch

HERE = pathlib.Path(__file__).parent
SHAPES = {"weight": [3, 4], "bias": [5], "scale": [2, 2, 2]}
NUM_STEPS = 6

OPTIMIZERS = {
    "adamw_default": (torch.optim.AdamW, {"lr": 1e-2}),
    "adamw_amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "adamw_no_decay": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.0, "eps": 1e-6}),
    "adam_default": (torch.optim.Adam, {"lr": 1e-2}),
    "adam_l2": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "sgd_plain": (torch.optim.SGD, {"lr": 0.1}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.05}),
    "sgd_nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adagrad_default": (torch.optim.Adagrad, {"lr": 0.1}),
    "adagrad_decay": (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.02, "initial_accumulator_value": 0.1},
    ),
}


def flat(tensor):
    return [float(value) for value in tensor.detach().double().flatten()]


def start(dtype=torch.float32):
    """The same start for all cases: parameters and one list of gradients per step."""
    generator = torch.Generator().manual_seed(7)
    values = {name: torch.randn(shape, generator=generator, dtype=torch.float32) for name, shape in SHAPES.items()}
    grads = []
    for _ in range(NUM_STEPS):
        grads.append({name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()})
    # `scale` gets its first gradient in the third step: state is made late for it.
    for step in grads[:2]:
        del step["scale"]
    return {name: value.to(dtype) for name, value in values.items()}, grads


def run(optimizer_class, options, fused):
    values, grads = start()
    params = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    optimizer = optimizer_class(params.values(), **options, fused=fused)
    steps = []
    for step in grads:
        for name, param in params.items():
            param.grad = step[name].clone() if name in step else None
        if isinstance(optimizer, torch.optim.SGD) and fused and options.get("momentum"):
            # torch's fused SGD fails when only some momentum buffers exist: give the late parameter a step of
            # its own, which is what one optimizer per parameter would compute.
            late = [p for p in params.values() if p.grad is not None and not optimizer.state[p]]
            early = [p for p in params.values() if p.grad is not None and optimizer.state[p]]
            for members in (early, late):
                kept = {p: p.grad for p in params.values()}
                for p in params.values():
                    p.grad = kept[p] if any(p is member for member in members) else None
                optimizer.step()
                for p, grad in kept.items():
                    p.grad = grad
        else:
            optimizer.step()
        steps.append({name: flat(param) for name, param in params.items()})
    state = {}
    for name, param in params.items():
        for key, value in optimizer.state[param].items():
            if value is not None:
                state[f"{key}.{name}"] = flat(value)
    return steps, state


def optimizers():
    values, grads = start()
    cases = {}
    for name, (optimizer_class, options) in OPTIMIZERS.items():
        steps, state = run(optimizer_class, options, fused=True)
        loop_steps, _ = run(optimizer_class, options, fused=False)
        cases[name] = {"options": options, "steps": steps, "state": state, "for_loop_last": loop_steps[-1]}
    return {
        # Kernels differ in the last bit between instruction sets, so equality is only demanded on the same one.
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "shapes": SHAPES,
        "start": {name: flat(value) for name, value in values.items()},
        "grads": [{name: flat(grad) for name, grad in step.items()} for step in grads],
        "cases": cases,
    }


def linear(warmup, total):
    def rule(step):
        if step < warmup:
            return float(step) / float(max(1, warmup))
        return max(0.0, float(total - step) / float(max(1, total - warmup)))

    return rule


def constant(warmup):
    return lambda step: float(step) / float(max(1.0, warmup)) if step < warmup else 1.0


def cosine(warmup, total, cycles):
    def rule(step):
        if step < warmup:
            return float(step) / float(max(1, warmup))
        progress = float(step - warmup) / float(max(1, total - warmup))
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * float(cycles) * 2.0 * progress)))

    return rule


def schedules():
    lr = torch.optim.lr_scheduler
    cases = {
        "linear_10_100": (lambda o: lr.LambdaLR(o, linear(10, 100)), 105),
        "linear_0_7": (lambda o: lr.LambdaLR(o, linear(0, 7)), 9),
        "constant_5": (lambda o: lr.LambdaLR(o, constant(5)), 9),
        "cosine_5_50": (lambda o: lr.LambdaLR(o, cosine(5, 50, 0.5)), 52),
        "cosine_3_40_cycles_1.5": (lambda o: lr.LambdaLR(o, cosine(3, 40, 1.5)), 42),
        "step_3_0.5": (lambda o: lr.StepLR(o, 3, 0.5), 12),
        "exponential_0.97": (lambda o: lr.ExponentialLR(o, 0.97), 40),
        "polynomial_10_2": (lambda o: lr.PolynomialLR(o, 10, 2.0), 14),
        "lambda_0.95": (lambda o: lr.LambdaLR(o, lambda step: 0.95**step), 20),
        "one_cycle_20": (lambda o: lr.OneCycleLR(o, 0.5, total_steps=20), 20),
        "one_cycle_13_linear": (
            lambda o: lr.OneCycleLR(o, 0.5, total_steps=13, pct_start=0.4, anneal_strategy="linear"),
            13,
        ),
        "one_cycle_30_three_phase": (lambda o: lr.OneCycleLR(o, 0.5, total_steps=30, three_phase=True), 30),
    }
    out = {}
    for name, (make, num_steps) in cases.items():
        one, two = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
        groups = [{"params": [one]}, {"params": [two], "lr": 0.02}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        rates, momenta = [scheduler.get_last_lr()], [optimizer.param_groups[0]["momentum"]]
        for _ in range(num_steps):
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr())
            momenta.append(optimizer.param_groups[0]["momentum"])
        out[name] = {"lrs": rates, "momentum": momenta}
    return out


def clip():
    values, grads = start()
    cases = []
    for max_norm in (0.5, 1e3):
        for norm_type in (2.0, 1.0, 3.0, math.inf):
            params = [torch.nn.Parameter(value.clone()) for value in values.values()]
            for param, grad in zip(params, grads[2].values()):
                param.grad = grad.clone()
            norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
            cases.append(
                {
                    "max_norm": max_norm,
                    "norm_type": "inf" if norm_type == math.inf else norm_type,
                    "total_norm": float(norm),
                    "grads": {name: flat(p.grad) for name, p in zip(values, params)},
                }
            )
    return {"shapes": SHAPES, "grads": {name: flat(grad) for name, grad in grads[2].items()}, "cases": cases}


def grad_scaler():
    """Scale, tracker and parameter after each step; `i` marks an infinite gradient, `n` one that is no number."""
    script = "....i..n.i......."
    cases = []
    for options in (
        {"init_scale": 1024.0, "growth_interval": 3},
        {"init_scale": 3.0, "growth_factor": 1.5, "backoff_factor": 0.25, "growth_interval": 2},
    ):
        scaler = torch.amp.GradScaler("cpu", **options)
        param = torch.nn.Parameter(torch.tensor([0.5]))
        optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
        rows = []
        for number, event in enumerate(script):
            optimizer.zero_grad()
            factor = {".": 0.25 * (number + 1), "i": math.inf, "n": math.nan}[event]
            scaler.scale((param * factor).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            rows.append({"scale": scaler.get_scale(), "tracker": scaler._get_growth_tracker(), "param": float(param.detach())})
        cases.append({"options": options, "rows": rows})
    return {"script": script, "cases": cases}


def main():
    torch.set_num_threads(1)
    for name, make in {
        "optimizers": optimizers,
        "schedules": schedules,
        "clip": clip,
        "grad_scaler": grad_scaler,
    }.items():
        text = json.dumps(make(), separators=(",", ":"))
        (HERE / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.11.0", torch.__version__
    main()
