"""Compiles a PyTorch model into a package with which Accelerate trains without Python. `accelerate export-model` runs it, with its
arguments as JSON, and tells what is written to the file `failure`. "train" gives outputs and gradients of the loss, "eval" the outputs in
evaluation mode. Both take all parameters and buffers and then the inputs, and change buffers in place."""

import contextlib, ctypes, functools, importlib, json, logging, os, random, signal, sys, traceback

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this without a traceback.
logging.getLogger("torch.utils.flop_counter").addFilter(lambda _: False)  # It warns that Triton is not there.
ARGUMENTS = json.loads(sys.argv[1])


def fail(text, stage="", place=""):
    with open(ARGUMENTS["failure"], "w", encoding="utf-8") as file:
        json.dump({"stage": stage, "text": text, "place": place}, file)
    sys.exit(1)


@contextlib.contextmanager
def stage(name):
    try:
        yield
    except Exception as error:
        others = [os.path.dirname(module.__file__) for module in (importlib, sys.modules.get("torch", importlib))]  # Not the user's code.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(("<", *others))]
        fail(f"{type(error).__name__}: {error}", name, f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "")


with stage("torch"):
    import safetensors.torch, torch, torch.nn.attention
    from torch._inductor import aot_compile, cpp_builder, package
    from torch.export import Dim, experimental, export


class Functional(torch.nn.Module):
    """The model as a function of all its tensors, which gives a list with the loss first."""
    def __init__(self, model, named):
        super().__init__()
        # Not a submodule: then its parameters would be constants of the program.
        self.__dict__["model"], self.names = model, list(named)
        self.trained = [index for index, tensor in enumerate(named.values()) if tensor.requires_grad]

    def forward(self, tensors, inputs):
        state = dict(zip(self.names, tensors))
        outputs = torch.func.functional_call(self.__dict__["model"], state, tuple(inputs))
        assigned = ", ".join(name for name, tensor in zip(self.names, tensors) if state[name] is not tensor)
        if assigned:
            fail(f"forward assigns another tensor to {assigned}, which a package cannot keep; change it in place, by copy_, mul_ or add_")
        if hasattr(outputs, "keys") and "loss" in outputs:
            outputs = [outputs["loss"], *(outputs[name] for name in outputs if name != "loss")]
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        return [*leaves[:1], *(other.detach() for other in leaves[1:])]

    def train_pass(self, tensors, inputs):
        host = lambda: (random.getstate(), str("numpy" in sys.modules and sys.modules["numpy"].random.get_state()))
        before, (loss, *others) = host(), self(tensors, inputs) or [torch.zeros(0)]
        if host() != before:
            fail("forward draws random numbers of Python or NumPy, which would be constants of a package; draw them by torch.rand and its like")
        if loss.dim() != 0 or not loss.requires_grad:
            fail(f"the first output has shape {list(loss.shape)}; it has to be the loss, a scalar that depends on parameters")
        gradients = torch.autograd.grad(loss, [tensors[index] for index in self.trained], allow_unused=True)
        unused = ", ".join(self.names[index] for index, gradient in zip(self.trained, gradients) if gradient is None)
        if unused:
            fail(f"the loss does not depend on {unused}; freeze them with requires_grad_(False), or leave them out")
        if not all(tensor.isfinite().all() for tensor in (loss, *gradients)):
            fail(f"the loss is {loss.item()} or a gradient is not finite, so that a package cannot be compared with the model", "examples")
        return [loss, *others, *gradients]

    def passed(self, run, tensors, inputs, trained=()):
        """What `run` gives of copies, by name: outputs, gradients of the tensors at the positions `trained`, and what it changed."""
        tensors = [tensor.detach().clone().requires_grad_(index in trained) for index, tensor in enumerate(tensors)]
        torch.manual_seed(0)
        given = run(tensors, [tensor.clone() for tensor in inputs])
        names = ["loss", *(f"output {index}" for index in range(1, len(given) - len(trained)))]
        names += [f"gradient of {self.names[index]}" for index in trained] + [f"value of {name} after a pass" for name in self.names]
        return {name: tensor.detach() for name, tensor in zip(names, [*given, *tensors])}


@torch.no_grad()
def interpreted(program, tensors, inputs):
    outputs = list(zip(program.graph_signature.output_specs, torch.fx.Interpreter(program.graph_module).run(*tensors, *inputs)))
    changed = {spec.target: output for spec, output in outputs if spec.kind.name == "USER_INPUT_MUTATION"}
    _ = [tensor.copy_(changed[f"tensors_{index}"]) for index, tensor in enumerate(tensors) if f"tensors_{index}" in changed]
    return [output for spec, output in outputs if spec.kind.name != "USER_INPUT_MUTATION"]


def compare(program, found, wanted):
    """Sums in another order differ by 1e-6 in float32 and 1e-2 in bfloat16, where mistakes are larger than what is allowed here."""
    largest = max((tensor.abs().max().item() for name, tensor in wanted.items() if "gradient" in name and tensor.numel()), default=0)
    is_short = any(tensor.is_floating_point() and tensor.element_size() < 4 for tensor in wanted.values())
    for name, value in wanted.items():
        # Whole numbers among the outputs are places of largest values, say, which roundings may move.
        if value.numel() and (value.is_floating_point() or "value" in name):
            value, other = value.double(), found[name].double()
            part, scale = (0.06 if is_short else 1e-3 if name == "loss" else 0.02), value.nan_to_num(0, 0, 0).abs().max().item()
            if not torch.allclose(other, value, 0, part * scale + (1e-4 * largest if "gradient" in name else 1e-5), equal_nan=True):
                fail(f"the {name} differs by {(other - value).abs().max():.3g}, where the largest value is {scale:.3g}", program)


def main(module, function, inputs, integers, output, device, torch_version, signature, **_):
    if torch.__version__.split("+")[0] != torch_version:
        fail(f"{sys.executable} has torch {torch.__version__}; programs are built with {torch_version}, which is needed")
    if device == "cuda" and not torch.cuda.is_available():
        fail("a package for cuda is made on a machine with a GPU, and torch sees none here")
    with stage("import"):
        make = getattr(importlib.import_module(module), function)
    with stage("call"):
        model = torch.nn.ModuleList([make()])[0].to(device)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if any(not tensor.is_contiguous() for tensor in named.values()):
        fail("a parameter or buffer is not contiguous; make it so in the function, with .contiguous()")
    owner_of = {id(tensor): name for name, tensor in named.items()}
    everything = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    tensors, functional, persistent, kept = list(named.values()), Functional(model, named), set(model.state_dict()), {}
    dims = {name: Dim(name, min=1) for given in inputs for name in given["names"].values()}
    shapes = ([{} for _ in tensors], [{int(index): dims[name] for index, name in given["names"].items()} for given in inputs])
    numbers = [torch.arange(given["count"]) % integers if given["is_whole"] else torch.randn(given["count"]) for given in inputs]
    examples = [of.reshape(given["sizes"]).to(device, getattr(torch, given["dtype"])) for of, given in zip(numbers, inputs)]
    for mode, run in ("train", functional.train_pass), ("eval", functional):
        model.train(mode == "train")
        # An export of the fused attention of CPUs, of which only the forward pass is right.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH) if mode == "train" else torch.no_grad():
            with stage("examples"):
                wanted = functional.passed(run, tensors, examples, functional.trained if mode == "train" else ())
            with stage("export"), contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):  # It prints graphs.
                cpp_builder.get_cpp_compiler()
                program = export(functional, (tensors, examples), dynamic_shapes=shapes, strict=False)
                program = experimental._export_forward_backward(program) if mode == "train" else program.run_decompositions()
        targets = [spec.target for spec in program.graph_signature.output_specs if spec.kind.name == "GRADIENT_TO_USER_INPUT"]
        kept[mode] = program, wanted, [int(target[3:].removesuffix("_1")) for target in targets]  # They are `arg7_1`, by position.
        compare(mode, functional.passed(functools.partial(interpreted, program), tensors, examples, kept[mode][2]), wanted)
    stored = [{"name": name, "requires_grad": tensor.requires_grad, "persistent": name in persistent,
               "dtype": str(tensor.dtype)[len("torch."):], "shape": list(tensor.shape)} for name, tensor in named.items()]
    num_params, aliases = len(list(model.parameters())), {name: owner_of[id(it)] for name, it in everything if name not in named}
    signature.update(parameters=stored[:num_params], buffers=stored[num_params:], gradients=kept["train"][2], aliases=aliases)
    # The program that loads the package has libtorch, and threads of its own; with OMP_NUM_THREADS=1 here, code has one.
    configs = {"aot_inductor.package": True, "aot_inductor.link_libtorch": False, "cpp.dynamic_threads": torch.get_num_threads() > 1,
               "aot_inductor.metadata": {"accelerate": json.dumps(signature)}}
    compiled = lambda program: aot_compile(program.module(check_guards=False), *program.example_inputs, options=configs)
    with stage("compile"):
        package.package_aoti(output, {mode: compiled(program) for mode, (program, _, _) in kept.items()})
    ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib/libtorch.so"), ctypes.RTLD_GLOBAL)
    for mode, (program, wanted, whose) in kept.items():  # Compiled code draws random numbers of its own.
        if not any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in program.graph.nodes):
            run = torch._C._aoti.AOTIModelPackageLoader(output, mode, False, 1, -1).run
            compare("compiled", functional.passed(lambda *of: run([tensor.detach() for tensor in sum(of, [])]), tensors, examples, whose), wanted)
    values = {name: tensor.detach().cpu() for name, tensor in named.items()}
    safetensors.torch.save_file(values, output.removesuffix("pt2") + "safetensors", metadata={"format": "pt"})


main(**ARGUMENTS)
