"""Writes what PyTorch's optimizers, schedules, clipping and loss scaling compute, for the Rust tests.

Run with torch 2.11.0:  python parity/optim/generate.py
Outputs (committed): optimizers.json, schedules.json, plateau.json, adamw8bit.json, clip.json, grad_scaler.json,
beside this file. `transformers` is not needed: its warmup formulas are written down here. Nor is `torchao`: 8-bit
AdamW is written down here by its definition, and so is Lion, which torch does not have.
"""

import json
import math
import pathlib

import torch

HERE = pathlib.Path(__file__).parent
SHAPES = {"weight": [3, 4], "bias": [5], "scale": [2, 2, 2]}
NUM_STEPS = 6


class Lion(torch.optim.Optimizer):
    """Chen and others 2023, algorithm 2, in the order of arithmetic of the authors' lion_pytorch.py."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, foreach=None):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                m = self.state[p]["exp_avg"]
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(torch.sign(m * beta1 + p.grad * (1 - beta1)), alpha=-lr)
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


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
    "rmsprop_default": (torch.optim.RMSprop, {"lr": 1e-2}),
    "rmsprop_momentum": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "alpha": 0.9}),
    "rmsprop_centered": (torch.optim.RMSprop, {"lr": 1e-2, "centered": True, "maximize": True, "eps": 1e-6}),
    "rmsprop_all": (
        torch.optim.RMSprop,
        {"lr": 3e-3, "momentum": 0.5, "centered": True, "maximize": True, "weight_decay": 0.05},
    ),
    "adafactor_default": (torch.optim.Adafactor, {"lr": 1e-2}),
    "adafactor_decay": (
        torch.optim.Adafactor,
        {"lr": 0.8, "weight_decay": 0.1, "beta2_decay": -0.5, "d": 1.5, "eps": (0.5, 2.0)},
    ),
    "adafactor_maximize": (torch.optim.Adafactor, {"lr": 0.1, "maximize": True, "eps": (1e-15, 1e-3)}),
    "lion_default": (Lion, {"lr": 1e-2}),
    "lion_decay": (Lion, {"lr": 3e-3, "betas": (0.5, 0.8), "weight_decay": 0.2}),
}
# What torch has no fused kernels for, it computes with operations over lists.
WITHOUT_FUSED = (torch.optim.RMSprop, torch.optim.Adafactor, Lion)


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
    kernels = "foreach" if optimizer_class in WITHOUT_FUSED else "fused"
    optimizer = optimizer_class(params.values(), **options, **{kernels: fused})
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


def restarts(warmup, total, cycles):
    def rule(step):
        if step < warmup:
            return float(step) / float(max(1, warmup))
        progress = float(step - warmup) / float(max(1, total - warmup))
        if progress >= 1.0:
            return 0.0
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(cycles) * progress) % 1.0))))

    return rule


def inverse_sqrt(warmup, timescale=None):
    timescale = timescale or warmup or 10_000

    def rule(step):
        if step < warmup:
            return float(step) / float(max(1, warmup))
        shift = timescale - warmup
        return 1.0 / math.sqrt((step + shift) / timescale)

    return rule


def polynomial(warmup, total, lr_init, lr_end=1e-7, power=1.0):
    def rule(step):
        if step < warmup:
            return float(step) / float(max(1, warmup))
        if step > total:
            return lr_end / lr_init
        left = 1 - (step - warmup) / (total - warmup)
        return ((lr_init - lr_end) * left**power + lr_end) / lr_init

    return rule


def warmed(lr, optimizer, start_factor, steps, schedule):
    """A line up to the rate of `schedule`, then `schedule` from its beginning."""
    line = lr.LinearLR(optimizer, start_factor, total_iters=steps)
    return lr.SequentialLR(optimizer, [line, schedule(optimizer)], [steps])


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
        "restarts_4_30_3": (lambda o: lr.LambdaLR(o, restarts(4, 30, 3)), 33),
        "restarts_0_9_1": (lambda o: lr.LambdaLR(o, restarts(0, 9, 1)), 10),
        "inverse_sqrt_5": (lambda o: lr.LambdaLR(o, inverse_sqrt(5)), 40),
        "inverse_sqrt_0": (lambda o: lr.LambdaLR(o, inverse_sqrt(0)), 10),
        "inverse_sqrt_3_timescale_7": (lambda o: lr.LambdaLR(o, inverse_sqrt(3, 7)), 20),
        "multi_step_2_5_5_9_0.3": (lambda o: lr.MultiStepLR(o, [2, 5, 5, 9], 0.3), 12),
        "cosine_annealing_7_0.001": (lambda o: lr.CosineAnnealingLR(o, 7, 0.001), 30),
        "cosine_annealing_10": (lambda o: lr.CosineAnnealingLR(o, 10), 22),
        "linear_lr_0.25_1_6": (lambda o: lr.LinearLR(o, 0.25, 1.0, 6), 9),
        "linear_lr_default": (lambda o: lr.LinearLR(o), 7),
        "linear_lr_1_0_4": (lambda o: lr.LinearLR(o, 1.0, 0.0, 4), 6),
        # The formula knows one initial rate; here each of the two groups has the formula with its own.
        "polynomial_warmup_4_20": (lambda o: lr.LambdaLR(o, [polynomial(4, 20, 0.1), polynomial(4, 20, 0.02)]), 24),
        "polynomial_warmup_0_11_0.001_2.5": (
            lambda o: lr.LambdaLR(o, [polynomial(0, 11, 0.1, 0.001, 2.5), polynomial(0, 11, 0.02, 0.001, 2.5)]),
            14,
        ),
        "warmed_step_4_0.1": (lambda o: warmed(lr, o, 0.1, 4, lambda o: lr.StepLR(o, 3, 0.5)), 14),
        "warmed_cosine_5_third": (lambda o: warmed(lr, o, 1 / 3, 5, lambda o: lr.CosineAnnealingLR(o, 10, 1e-3)), 18),
        "warmed_lambda_3_1": (lambda o: warmed(lr, o, 1.0, 3, lambda o: lr.LambdaLR(o, lambda n: 0.95**n)), 9),
        "warmed_one_cycle_3_0.5": (
            lambda o: warmed(lr, o, 0.5, 3, lambda o: lr.OneCycleLR(o, 0.5, total_steps=8)),
            11,
        ),
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


def plateau():
    """Rates after each metric; the metrics fall, rest, jump and once are no numbers."""
    metrics = [5.0, 4.0, 3.9999, 3.9, 4.1, 4.1, math.nan, 3.5, 3.5, 3.5, 3.4999, 3.4998, 3.3, 3.2999, 9.0, 9.0, 9.0, 9.0]
    metrics += [9.0, 9.0005, 9.0008, 1.0, 1.0, 1.1, 1.2, 0.5, -1.0, -1.00005, -1.0002, -1.0002, -1.0002, -1.0002, -1.0002]
    cases = []
    for options in (
        {},
        {"patience": 1},
        {"patience": 0, "factor": 0.5, "cooldown": 2},
        {"patience": 2, "threshold": 0.05, "threshold_mode": "abs", "min_lr": [0.003, 0.0]},
        {"mode": "max", "patience": 1, "factor": 0.3, "min_lr": 1e-3},
        {"mode": "max", "patience": 3, "threshold_mode": "abs", "threshold": 0.2},
        {"patience": 0, "factor": 0.1, "eps": 1e-3},
    ):
        one, two = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([{"params": [one]}, {"params": [two], "lr": 0.02}], lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
        rows = []
        for metric in metrics:
            scheduler.step(metric)
            rows.append([scheduler.get_last_lr(), scheduler.best, scheduler.num_bad_epochs, scheduler.cooldown_counter])
        cases.append({"options": options, "rows": rows})
    return {"metrics": [None if math.isnan(metric) else metric for metric in metrics], "cases": cases}


def dynamic_map(signed):
    """Dettmers and others 2021: bitsandbytes' `create_dynamic_map`, with 7 exponent bits of 8."""
    data = []
    for i in range(7):
        fraction_items = 2**i + 1 if signed else 2 ** (i + 1) + 1
        boundaries = torch.linspace(0.1, 1, fraction_items)
        means = (boundaries[:-1] + boundaries[1:]) / 2.0
        data += ((10 ** (-6 + i)) * means).tolist()
        if signed:
            data += (-(10 ** (-6 + i)) * means).tolist()
    return torch.tensor(sorted(data + [0.0, 1.0]))


def quantize(values, qmap):
    blocks = values.view(-1, 256)
    scale = blocks.abs().amax(-1).clip(torch.finfo(torch.float32).tiny)
    normed = blocks / scale.view(-1, 1)
    # The largest code whose value is not above the number, then the nearer of it and the next.
    codes = torch.searchsorted(qmap, normed, right=True) - 1
    codes = codes.clip(min=0)
    up = (codes + 1).clip(max=255)
    codes = torch.where(normed - qmap[codes] >= (qmap[up] - qmap[codes]) * 0.5, up, codes)
    if qmap[0] == 0.0:
        # Unlike torchao: a square that is not zero never becomes zero, or the next step divides by almost nothing.
        codes = torch.where((codes == 0) & (normed > 0), 1, codes)
    return codes.to(torch.uint8), scale


def dequantize(codes, scale, qmap):
    return (qmap[codes.long()] * scale.view(-1, 1)).flatten()


def adamw8bit():
    """The step of torchao's `single_param_adam` (but for `quantize`), over 16 blocks. Numbers are written down by a rule, not drawn."""
    numel, lr, beta1, beta2, eps, weight_decay = 4096, 1e-2, 0.9, 0.95, 1e-8, 0.1
    position = torch.arange(numel, dtype=torch.float64)
    rule = lambda step: ((position * 7919 + step * 104729) % 1009 / 1009 - 0.5) * 10 ** (-(position % 7) / 2)
    signed, unsigned = dynamic_map(True), dynamic_map(False)
    p = rule(0).float()
    exp_avg, exp_avg_sq = quantize(torch.zeros(numel), signed), quantize(torch.zeros(numel), unsigned)
    rows = []
    for step in range(1, 7):
        grad = rule(step).float()
        p = p - lr * weight_decay * p
        m = dequantize(*exp_avg, signed).lerp(grad, 1 - beta1)
        v = dequantize(*exp_avg_sq, unsigned).lerp(grad.square(), 1 - beta2)
        denom = v.sqrt() / (1 - beta2**step) ** 0.5 + eps
        p = p - lr * (m / (1 - beta1**step)) / denom
        exp_avg, exp_avg_sq = quantize(m, signed), quantize(v, unsigned)
        row = {"param": flat(p[::16]), "param_sum": float(p.double().sum())}
        for name, (codes, scale) in {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}.items():
            row[name] = codes.flatten()[::16].tolist()
            row[f"{name}_sum"] = int(codes.long().sum())
            row[f"{name}_scale"] = flat(scale)
        rows.append(row)
    options = {"lr": lr, "betas": [beta1, beta2], "eps": eps, "weight_decay": weight_decay}
    return {"numel": numel, "options": options, "rows": rows}


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
        "plateau": plateau,
        "adamw8bit": adamw8bit,
        "clip": clip,
        "grad_scaler": grad_scaler,
    }.items():
        text = json.dumps(make(), separators=(",", ":"))
        (HERE / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.11.0", torch.__version__
    main()
