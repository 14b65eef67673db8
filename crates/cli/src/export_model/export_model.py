"""Compiles a PyTorch model into a package with which Accelerate trains without Python; `accelerate export-model` runs it.

The package holds two programs. "train" computes what the model gives and the gradients of its loss, "eval" what it gives in evaluation
mode. Both take all parameters and buffers and then the inputs, and buffers are changed in place. The metadata of both say which these
are. The values of parameters and buffers are written beside the package.
"""

import argparse
import importlib
import json
import os
import re
import sys

try:
    import torch
    from safetensors.torch import save_file
    from torch._inductor import aot_compile
    from torch._inductor.package import package_aoti
    from torch.export import Dim, export
    from torch.export.experimental import _export_forward_backward
    from torch.export.graph_signature import OutputKind
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    sys.exit(f"error: {sys.executable} has not what exporting needs, torch and safetensors: {error}")


def fail(message):
    sys.exit(f"error: {message}")


class Functional(torch.nn.Module):
    """The model as a function of all its tensors, which gives a list with the loss first."""

    def __init__(self, model, names):
        super().__init__()
        # Not a submodule: then its parameters would be constants of the program.
        self.__dict__["model"], self.names = model, names

    def forward(self, tensors, inputs):
        outputs = torch.func.functional_call(self.__dict__["model"], dict(zip(self.names, tensors)), tuple(inputs))
        if hasattr(outputs, "keys") and "loss" in outputs:
            outputs = [outputs["loss"], *(outputs[name] for name in outputs if name != "loss")]
        loss, *others = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        return [loss, *(other.detach() for other in others)]


def parse_input(text, dims):
    """`float32[batch,64]` as a tensor of that type and shape, and what is dynamic of it."""
    found = re.fullmatch(r"(\w+)\[([\w, ]*)\]", text.strip())
    dtype = getattr(torch, found[1], None) if found else None
    if not isinstance(dtype, torch.dtype):
        fail(f"`{text}` is no input; write a type and a shape, with names for sizes that vary: float32[batch,64]")
    shape, dynamic = [], {}
    for index, size in enumerate(part.strip() for part in found[2].split(",") if part.strip()):
        if not size.isdigit():
            # Example sizes differ, for those that are equal by chance would become one.
            dynamic[index], size = dims.setdefault(size, (Dim(size, min=1), 6 + len(dims)))
        shape.append(int(size))
    example = torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
    return example, dynamic


def described(tensor, dynamic=()):
    return {"dtype": str(tensor.dtype)[len("torch."):], "shape": [-1 if index in dynamic else size for index, size in enumerate(tensor.shape)]}


def check(functional, tensors, inputs):
    """One pass on copies, to say in plain words what Inductor would say in others. Gives the loss and the gradients by position."""
    copies = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    loss = functional(copies, inputs)[0]
    if loss.dim() != 0 or not loss.requires_grad:
        fail(f"the first output has shape {list(loss.shape)}; it has to be the loss, a scalar that depends on parameters")
    trained = [index for index, copy in enumerate(copies) if copy.requires_grad]
    found = torch.autograd.grad(loss, [copies[index] for index in trained], allow_unused=True)
    unused = [functional.names[index] for index, gradient in zip(trained, found) if gradient is None]
    if unused:
        fail(f"the loss does not depend on {', '.join(unused)}; freeze them with requires_grad_(False), or leave them out")
    return loss, dict(zip(trained, found))


def compare(program, tensors, inputs, loss, wanted):
    """An export may put another derivative in an operator's place. Passes that draw random numbers cannot be compared."""
    outputs = torch.fx.Interpreter(program.graph_module).run(*[tensor.detach().clone() for tensor in tensors], *inputs)
    found = {spec.kind: output for output, spec in zip(outputs, program.graph_signature.output_specs)}
    is_random = not torch.allclose(found[OutputKind.LOSS_OUTPUT], loss, rtol=1e-3)
    largest = max(gradient.abs().max() for gradient in wanted.values())
    for index, gradient in zip(gradients(program), outputs[-len(wanted):]):
        if not (is_random or (gradient - wanted[index]).abs().max() <= 0.02 * wanted[index].abs().max() + 1e-4 * largest):
            fail(f"the exported program has another gradient than the model, of a parameter of shape {list(gradient.shape)}")


def gradients(program):
    """For each gradient at the end of the outputs, whose it is: inputs are called by their position, `arg7_1`."""
    specs = program.graph_signature.output_specs
    return [int(spec.target[3:].removesuffix("_1")) for spec in specs if spec.kind == OutputKind.GRADIENT_TO_USER_INPUT]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("function", help="module:function, which returns the model")
    parser.add_argument("--inputs", nargs="+", required=True)
    _ = [parser.add_argument(name, required=True) for name in ("--output", "--device", "--torch_version")]
    arguments = parser.parse_args()
    if torch.__version__.split("+")[0] != arguments.torch_version:
        fail(f"{sys.executable} has torch {torch.__version__}; programs are built with {arguments.torch_version}, which is needed")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        fail("a package for cuda is made on a machine with a GPU, and torch sees none here")
    sys.path.insert(0, os.getcwd())
    module, _, function = arguments.function.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        fail(f"{arguments.function} cannot be imported from {os.getcwd()}: {error}")
    model = make().to(arguments.device)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if any(not tensor.is_contiguous() for tensor in named.values()):
        fail("a parameter or buffer is not contiguous; make it so in the function, with .contiguous()")
    owner_of = {id(tensor): name for name, tensor in named.items()}
    everything = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    aliases = {name: owner_of[id(tensor)] for name, tensor in everything if name not in named}
    num_params, persistent, dims = len(list(model.parameters())), set(model.state_dict()), {}
    examples = [parse_input(text, dims) for text in arguments.inputs]
    inputs, dynamic = [example.to(arguments.device) for example, _ in examples], [dims_of for _, dims_of in examples]
    tensors, functional = list(named.values()), Functional(model, list(named))
    given, shapes = (tensors, inputs), ([{} for _ in tensors], dynamic)

    model.train()
    expected = check(functional, tensors, inputs)
    # An export of the fused attention of CPUs, of which only the forward pass is right.
    with sdpa_kernel(SDPBackend.MATH):
        train = _export_forward_backward(export(functional, given, dynamic_shapes=shapes, strict=False))
    compare(train, tensors, inputs, *expected)
    model.eval()
    with torch.no_grad():
        evaluation = export(functional, given, dynamic_shapes=shapes, strict=False).run_decompositions()
    stored = [{"name": name, "requires_grad": tensor.requires_grad, "persistent": name in persistent, **described(tensor)}
              for name, tensor in named.items()]
    signature = {"version": 1, "parameters": stored[:num_params], "buffers": stored[num_params:], "aliases": aliases,
                 "inputs": [described(example, dims_of) for example, dims_of in examples], "gradients": gradients(train)}
    # The program that loads the package has libtorch, and threads of its own; with OMP_NUM_THREADS=1 here, code has one.
    configs = {"package": True, "link_libtorch": False, "metadata": {"accelerate": json.dumps(signature)}}
    configs = {"cpp.dynamic_threads": torch.get_num_threads() > 1, **{f"aot_inductor.{name}": it for name, it in configs.items()}}
    compiled = lambda program: aot_compile(program.module(check_guards=False), *program.example_inputs, options=configs)
    package_aoti(arguments.output, {"train": compiled(train), "eval": compiled(evaluation)})
    values = {name: tensor.detach().cpu() for name, tensor in named.items()}
    save_file(values, arguments.output.removesuffix("pt2") + "safetensors", metadata={"format": "pt"})


main()
