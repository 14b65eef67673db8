"""Writes the values that crates/accelerate/tests/nn_parity.rs and nn_forward.rs compare with.

Run with Python's torch 2.11.0 on the CPU; each file names the version that made it.

    python parity/nn/generate.py

`initialisation.<capability>.json`: for each case (a constructor or a torch.nn.init function after
torch.manual_seed), name, shape, first bits and checksum (FNV-1a, 64 bits, of the little-endian bytes) of every
tensor, and the bits of the random number drawn next, which proves that exactly as many numbers were drawn.
libtorch's random kernels round differently with and without AVX2, so there is a file for each; AVX-512 gives
what AVX2 gives.

`forward.json` and `layers.json`: inputs are drawn from the seed, outputs, gradients and running statistics are stored; of layers that
draw their parameters, names and checksums as well. `layers.json` has the layers and losses that came later.
"""

import json
import os
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).parent
CAPABILITIES = {"default": "DEFAULT", "avx2": "AVX2"}
SEED = 7


def constructors(nn):
    return {
        "linear": lambda: nn.Linear(7, 5),
        "linear_without_bias": lambda: nn.Linear(7, 5, bias=False),
        "linear_large": lambda: nn.Linear(64, 48),
        "embedding": lambda: nn.Embedding(100, 16),
        "embedding_small": lambda: nn.Embedding(3, 4),
        "embedding_with_padding": lambda: nn.Embedding(10, 8, padding_idx=3),
        "layer_norm": lambda: nn.LayerNorm([4, 6]),
        "layer_norm_without_bias": lambda: nn.LayerNorm(6, bias=False),
        "rms_norm": lambda: nn.RMSNorm(6),
        "group_norm": lambda: nn.GroupNorm(2, 6),
        "batch_norm1d": lambda: nn.BatchNorm1d(6),
        "batch_norm2d_without_affine": lambda: nn.BatchNorm2d(6, affine=False),
        "batch_norm2d_without_statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False),
        "conv1d": lambda: nn.Conv1d(4, 6, 3),
        "conv2d": lambda: nn.Conv2d(3, 8, (3, 5)),
        "conv2d_grouped": lambda: nn.Conv2d(4, 8, 3, groups=2, bias=False),
        "attention": lambda: nn.MultiheadAttention(16, 4),
        "attention_without_bias": lambda: nn.MultiheadAttention(16, 4, bias=False),
        "attention_other_sizes": lambda: nn.MultiheadAttention(16, 4, kdim=12, vdim=10),
        "sequential": lambda: nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1)), nn.Linear(6, 2)
        ),
    }


def functions(torch):
    init = torch.nn.init
    return {
        "uniform": (lambda t: init.uniform_(t, -0.3, 0.7), (5, 7)),
        "normal_small": (lambda t: init.normal_(t, 0.1, 0.5), (3, 5)),
        "normal_large": (lambda t: init.normal_(t, 0.0, 0.02), (9, 11)),
        "trunc_normal": (lambda t: init.trunc_normal_(t), (9, 11)),
        "trunc_normal_shifted": (lambda t: init.trunc_normal_(t, 0.3, 0.7, -0.2, 1.1), (9, 11)),
        "trunc_normal_small_std": (lambda t: init.trunc_normal_(t, 0.0, 0.02), (9, 11)),
        "xavier_uniform": (lambda t: init.xavier_uniform_(t), (6, 10)),
        "xavier_uniform_tanh": (lambda t: init.xavier_uniform_(t, init.calculate_gain("tanh")), (6, 10, 3)),
        "xavier_normal": (lambda t: init.xavier_normal_(t), (6, 10)),
        "kaiming_uniform": (lambda t: init.kaiming_uniform_(t), (6, 10)),
        "kaiming_uniform_fan_out_relu": (
            lambda t: init.kaiming_uniform_(t, mode="fan_out", nonlinearity="relu"), (6, 10, 3, 3)),
        "kaiming_normal": (lambda t: init.kaiming_normal_(t), (6, 10)),
        "kaiming_normal_selu": (lambda t: init.kaiming_normal_(t, nonlinearity="selu"), (6, 10)),
    }


def raw(tensor):
    return tensor.detach().contiguous().numpy().tobytes()


def fnv1a(data):
    checksum = 0xCBF29CE484222325
    for byte in data:
        checksum = (checksum ^ byte) * 0x100000001B3 % 2**64
    return f"{checksum:016x}"


def describe(name, tensor):
    data = raw(tensor)
    size = tensor.element_size()
    first = [data[i * size:(i + 1) * size][::-1].hex() for i in range(min(4, tensor.numel()))]
    return {
        "name": name,
        "shape": list(tensor.shape),
        "first": first,
        "fnv1a": fnv1a(data),
    }


def initialisation():
    import torch

    cases = {}
    for name, make in constructors(torch.nn).items():
        torch.manual_seed(SEED)
        module = make()
        tensors = [describe(key, value) for key, value in module.state_dict().items()]
        cases[name] = {"tensors": tensors, "next": describe("next", torch.rand(1))["first"][0]}
    for name, (fill, shape) in functions(torch).items():
        torch.manual_seed(SEED)
        tensor = torch.empty(shape)
        fill(tensor)
        cases[name] = {"tensors": [describe("tensor", tensor)], "next": describe("next", torch.rand(1))["first"][0]}
    return {"torch": torch.__version__.split("+")[0], "seed": SEED, "cases": cases}


def numbers(tensor):
    return {"shape": list(tensor.shape), "values": [float(x) for x in tensor.detach().double().flatten()]}


class Recorder:
    """Cases by name."""

    def __init__(self):
        self.cases = {}

    def __call__(self, name, module, *inputs, call=None):
        """Output, gradients of sum(output * cos(i)) and state after one call."""
        import torch

        call = call or (lambda m, *a: m(*a))
        inputs = [x.requires_grad_(x.is_floating_point()) for x in inputs]
        output = call(module, *inputs)
        weights = torch.cos(torch.arange(output.numel(), dtype=torch.float32)).view_as(output)
        (output * weights).sum().backward()
        self.cases[name] = {
            "output": numbers(output),
            "input_gradients": [numbers(x.grad) for x in inputs if x.grad is not None],
            "gradients": {k: numbers(p.grad) for k, p in module.named_parameters() if p.grad is not None},
            "buffers": {k: numbers(b) for k, b in module.named_buffers()},
        }


def layers():
    import torch
    from torch import nn

    record, randn = Recorder(), torch.randn

    def layer(name, make, *shape, call=None):
        torch.manual_seed(SEED)
        module = make()
        parameters = [describe(key, value) for key, value in module.state_dict().items()]
        record(name, module, randn(*shape), call=call)
        record.cases[name]["parameters"] = parameters

    layer("max_pool2d", lambda: nn.MaxPool2d(3, stride=2, padding=1), 2, 3, 7, 6)
    layer("max_pool2d_dilated", lambda: nn.MaxPool2d((2, 3), dilation=(2, 1), ceil_mode=True), 1, 2, 8, 7)
    layer("max_pool2d_default", lambda: nn.MaxPool2d(2), 1, 2, 5, 4)
    layer("avg_pool2d", lambda: nn.AvgPool2d((3, 2), stride=2, padding=1), 2, 3, 7, 6)
    layer("avg_pool2d_without_padding", lambda: nn.AvgPool2d(3, padding=1, count_include_pad=False, ceil_mode=True), 1, 2, 7, 5)
    layer("avg_pool2d_divided", lambda: nn.AvgPool2d(2, divisor_override=3), 2, 4, 4)
    layer("adaptive_avg_pool2d", lambda: nn.AdaptiveAvgPool2d((2, 3)), 2, 3, 7, 5)
    layer("flatten", lambda: nn.Flatten(), 2, 3, 2, 2)
    layer("flatten_middle", lambda: nn.Flatten(1, 2), 2, 3, 2, 2)
    layer("sigmoid", lambda: nn.Sigmoid(), 3, 4)
    layer("softmax", lambda: nn.Softmax(1), 2, 3, 4)
    layer("log_softmax", lambda: nn.LogSoftmax(-1), 2, 3, 4)
    layer("conv_transpose1d", lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1), 2, 4, 5)
    layer("conv_transpose2d", lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 1), groups=2, dilation=(1, 2)), 2, 4, 3, 4)
    layer("conv_transpose2d_without_bias", lambda: nn.ConvTranspose2d(2, 3, 2, bias=False), 1, 2, 3, 3)

    def of_sequence(m, x):
        output, state = m(x)
        state = state if isinstance(state, tuple) else (state,)
        return torch.cat([output.flatten(), *(part.flatten() for part in state)])

    layer("lstm", lambda: nn.LSTM(3, 4), 5, 2, 3, call=of_sequence)
    layer("lstm_stacked", lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True), 2, 5, 3, call=of_sequence)
    layer("gru", lambda: nn.GRU(3, 4), 5, 2, 3, call=of_sequence)
    layer("gru_stacked", lambda: nn.GRU(3, 4, num_layers=2, bidirectional=True, bias=False), 5, 2, 3, call=of_sequence)

    def loss(name, module, shape, make_target):
        torch.manual_seed(SEED)
        scores = randn(*shape)
        target = make_target()
        record(name, module, scores, call=lambda m, x: m(x, target))
        # Weights of classes, which are settings here.
        record.cases[name]["buffers"] = {}

    classes = lambda: torch.tensor([1, 4, 0, -100, 2, 4])
    probabilities = lambda: randn(6, 5).softmax(-1)
    weight = torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0])
    loss("cross_entropy", nn.CrossEntropyLoss(), [6, 5], classes)
    loss("cross_entropy_smoothed", nn.CrossEntropyLoss(label_smoothing=0.2), [6, 5], classes)
    loss("cross_entropy_weighted", nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1), [6, 5], classes)
    loss("cross_entropy_sum", nn.CrossEntropyLoss(reduction="sum", ignore_index=4), [6, 5],
         lambda: torch.tensor([1, 4, 0, 3, 2, 4]))
    loss("cross_entropy_each", nn.CrossEntropyLoss(reduction="none"), [6, 5], classes)
    loss("cross_entropy_probabilities", nn.CrossEntropyLoss(label_smoothing=0.1), [6, 5], probabilities)
    loss("cross_entropy_images", nn.CrossEntropyLoss(), [2, 3, 2, 2], lambda: torch.arange(8).view(2, 2, 2) % 3)
    loss("mse", nn.MSELoss(), [3, 4], lambda: randn(3, 4))
    loss("mse_sum", nn.MSELoss(reduction="sum"), [3, 4], lambda: randn(3, 4))
    loss("bce_with_logits", nn.BCEWithLogitsLoss(), [3, 5], lambda: randn(3, 5).sigmoid())
    loss("bce_with_logits_weighted", nn.BCEWithLogitsLoss(weight=weight, pos_weight=weight * 2, reduction="sum"), [3, 5],
         lambda: randn(3, 5).sigmoid().round())
    loss("kl_div", nn.KLDivLoss(), [3, 4], lambda: randn(3, 4).softmax(-1))
    loss("kl_div_batch_mean", nn.KLDivLoss(reduction="batchmean"), [3, 4], lambda: randn(3, 4).softmax(-1))
    loss("kl_div_log_target", nn.KLDivLoss(reduction="sum", log_target=True), [3, 4], lambda: randn(3, 4).log_softmax(-1))
    return {"torch": torch.__version__.split("+")[0], "seed": SEED, "cases": record.cases}


def forward():
    import torch
    from torch import nn

    record = Recorder()

    def fresh(make):
        torch.manual_seed(SEED)
        return make()

    def randn(*shape):
        return torch.randn(*shape)

    m = fresh(lambda: nn.Linear(7, 5)); record("linear", m, randn(2, 3, 7))
    m = fresh(lambda: nn.Embedding(10, 4, padding_idx=3)); record("embedding", m, torch.tensor([[1, 3], [9, 1]]))
    m = fresh(lambda: nn.LayerNorm(6)); record("layer_norm", m, randn(4, 6))
    m = fresh(lambda: nn.RMSNorm(6)); record("rms_norm", m, randn(4, 6))
    m = fresh(lambda: nn.RMSNorm(6, eps=1e-3)); record("rms_norm_with_eps", m, randn(4, 6))
    m = fresh(lambda: nn.GroupNorm(2, 6)); record("group_norm", m, randn(2, 6, 3))
    m = fresh(lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2)); record("conv1d", m, randn(2, 4, 11))
    m = fresh(lambda: nn.Conv1d(4, 6, 3, padding="same")); record("conv1d_same", m, randn(2, 4, 7))
    m = fresh(lambda: nn.Conv2d(4, 6, (3, 2), groups=2, padding=(1, 0))); record("conv2d", m, randn(2, 4, 5, 5))
    m = fresh(lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3), nn.GELU(approximate="tanh"), nn.SiLU(),
                                    nn.Tanh(), nn.ReLU())); record("activations", m, randn(5, 4))

    def batch_norm(name, make, *shape):
        module = fresh(make)
        batches = [torch.randn(*shape) for _ in range(3)]
        def three_batches_then_evaluation(module, *batches):
            outputs = [module(batch * 2 + 1) for batch in batches]
            module.eval()
            return torch.stack([*outputs, module(batches[0])])
        record(name, module, *batches, call=three_batches_then_evaluation)

    batch_norm("batch_norm1d", lambda: nn.BatchNorm1d(3), 4, 3)
    batch_norm("batch_norm1d_sequence", lambda: nn.BatchNorm1d(3, eps=1e-3, momentum=0.3), 4, 3, 5)
    batch_norm("batch_norm2d", lambda: nn.BatchNorm2d(2), 3, 2, 2, 3)
    batch_norm("batch_norm2d_cumulative", lambda: nn.BatchNorm2d(2, momentum=None), 3, 2, 2, 3)
    batch_norm("batch_norm2d_without_statistics", lambda: nn.BatchNorm2d(2, track_running_stats=False), 3, 2, 2, 3)

    def attend(**kwargs):
        return lambda m, *a: m(*a, need_weights=False, **kwargs)[0]

    def attention(**kwargs):
        return fresh(lambda: nn.MultiheadAttention(8, 2, **kwargs))

    padding = torch.tensor([[False, False, False, True], [False, False, False, False]])
    causal = torch.triu(torch.ones(4, 4, dtype=torch.bool), diagonal=1)
    additive = torch.linspace(-1, 1, 16).view(4, 4)
    alone = lambda **kw: (lambda m, x: attend(**kw)(m, x, x, x))
    m = attention(batch_first=True); record("attention_self", m, randn(2, 4, 8), call=alone())
    m = attention(); record("attention_sequence_first", m, randn(4, 2, 8), call=alone())
    m = attention(batch_first=True); record("attention_padding", m, randn(2, 4, 8), call=alone(key_padding_mask=padding))
    m = attention(batch_first=True)
    record("attention_padding_and_additive", m, randn(2, 4, 8),
           call=alone(key_padding_mask=torch.zeros(2, 4).masked_fill(padding, float("-inf")), attn_mask=additive))
    m = attention(batch_first=True); record("attention_causal", m, randn(2, 4, 8), call=alone(attn_mask=causal, is_causal=True))
    m = attention(batch_first=True); record("attention_boolean_mask", m, randn(2, 4, 8), call=alone(attn_mask=causal))
    m = attention(batch_first=True)
    record("attention_mask_per_head", m, randn(2, 4, 8), call=alone(attn_mask=torch.linspace(-2, 1, 64).view(4, 4, 4)))
    m = attention(batch_first=True)
    record("attention_cross", m, randn(2, 3, 8), randn(2, 5, 8), call=lambda m, q, k: attend()(m, q, k, k))
    m = attention(batch_first=True, kdim=6, vdim=5)
    record("attention_other_sizes", m, randn(2, 3, 8), randn(2, 5, 6), randn(2, 5, 5), call=attend())
    m = attention(batch_first=True, bias=False); record("attention_without_bias", m, randn(2, 4, 8), call=alone())

    return {"torch": torch.__version__.split("+")[0], "seed": SEED, "cases": record.cases}


def rounded(value):
    """Nine significant digits hold a float32 exactly."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return value


def write(name, content):
    (FOLDER / name).write_text(json.dumps(rounded(content), separators=(",", ":")).replace('"},"', '"},\n"') + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import torch

        found = torch.backends.cpu.get_cpu_capability()
        assert found == CAPABILITIES[sys.argv[1]], f"this machine has {found} only"
        write(f"initialisation.{sys.argv[1]}.json", initialisation())
    else:
        for capability in CAPABILITIES:
            environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
            subprocess.run([sys.executable, __file__, capability], env=environment, check=True)
        write("forward.json", forward())
        write("layers.json", layers())
