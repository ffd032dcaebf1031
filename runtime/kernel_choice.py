"""Choose what runs a compiled step: the fused kernels, Inductor's, or those of offloaded experts.

`python generate.py --compile`, the server and a `Session` from Python all choose here. The fused
kernels (runtime/fused_decode.py) run on NVIDIA GPUs from compute capability 8.0 on, for models that
they compute. Everything else runs the blocks as torch.compile makes them (runtime/runner.py).
"""

import torch

from model import Context, MoE, Transformer
from ops.gpu import gpu_of
from runtime.fused_decode import FusedRunner, is_all_kernels
from runtime.fused_layer import MAX_FEW, fused_layers
from runtime.plain_forms import changed_forms
from runtime.runner import CompiledRunner, EagerRunner

KERNELS = "auto", "fused", "inductor"  # --decode_kernels


def choose_runner(model: Transformer, kernels: str = "auto") -> type[CompiledRunner]:
    """Return what runs a compiled model's calls.

    kernels: of KERNELS. "auto": the fused ones if `why_not_auto` has nothing against them. A model
    may have a `runner_class` and a `fused_runner_class` of its own (offload/plan.py). An unknown
    name raises ValueError.
    """
    if kernels not in KERNELS:
        raise ValueError(f"decode_kernels {kernels!r}: it must be one of {', '.join(KERNELS)}")
    fused = kernels == "fused"
    if kernels == "auto":
        fused = why_not_auto(model, model.norm.weight.device) is None
    return fused_runner(model) if fused else getattr(model, "runner_class", CompiledRunner)


def fused_runner(model: Transformer) -> type[FusedRunner]:
    """Return what runs the fused kernels of this model."""
    return getattr(model, "fused_runner_class", FusedRunner)


def passes_are_kernels(runner: EagerRunner) -> bool:
    """Whether Inductor compiles no part of steps of a few tokens, which takes it seconds each."""
    if not isinstance(runner, FusedRunner) or not runner.takes_tokens(MAX_FEW):
        return False
    if runner.begin_kernels is None or runner.head is None or runner.head.norm is None:
        return False
    weight = runner.model.embedding.weight
    positions = torch.zeros(1, 2, dtype=torch.int64, device=weight.device)
    x = weight.new_empty(1, 2, weight.shape[1])
    context = Context(x, positions=positions, last=positions[:, 0])
    layers = runner.layers.values()
    return not any(layer.mixers or not is_all_kernels(layer, x, context) for layer in layers)


def why_not_fused(model: Transformer, device: torch.device) -> str | None:
    """Return why a device does not run all layers with experts by the kernels; None: it does.

    model: it may be on the meta device.
    """
    if device.type != "cuda":
        return "no GPU"
    if model.embedding.weight.element_size() != 2:
        return f"activations in {str(model.embedding.weight.dtype).removeprefix('torch.')}"
    if not gpu_of(device).runs_kernels:
        return str(gpu_of(device))
    return why_not_computed(model)


def why_not_computed(model: Transformer) -> str | None:
    """Return why the kernels do not compute all layers with experts, on any GPU; None: they do."""
    if changed := changed_forms():
        return f"{', '.join(changed)} in model.py changed: see runtime/plain_forms.py"
    sparse = [n for n, block in enumerate(model.layers) if isinstance(block.ffn, MoE)]
    for layer in sparse:
        try:
            fused_runner(model).make_layer(model.layers[layer])
        except ValueError as error:
            return f"layer {layer}: {error}"
    return None if sparse else "no layer has experts"


def why_never_ran(model: Transformer) -> str | None:
    """Return that the model has parts whose kernels no GPU has run (`kernels_ran`), or None."""
    ran = all(getattr(module, "kernels_ran", True) for module in model.modules())
    return None if ran else "no GPU has run its kernels"


def why_not_auto(model: Transformer, device: torch.device) -> str | None:
    """Return why "auto" does not take the fused kernels on a device; None: it does."""
    return why_not_fused(model, device) or why_never_ran(model)


def count_fused(model: Transformer, kernels: str = "auto") -> int:
    """Return in how many layers fused kernels run on a GPU that runs them.

    model: it may be on the meta device. kernels: of KERNELS.
    """
    is_ready = kernels == "fused" or (kernels == "auto" and not why_never_ran(model))
    if not is_ready or why_not_computed(model):
        return 0
    return len(fused_layers(model, fused_runner(model).make_layer))


def describe_kernels(model: Transformer, runner_class: type[CompiledRunner]) -> str:
    """Return which kernels decode a token, and why not the fused ones."""
    if issubclass(runner_class, FusedRunner):
        layers = fused_layers(model, runner_class.make_layer).values()
        attention = sum(not hasattr(layer.attention.attention, "takes") for layer in layers)
        by_inductor = [f"attention of {attention}"] if attention else []
        if any(layer.mixers for layer in layers):
            by_inductor.append("what is between sublayers")
        rest = f"; Inductor: {', '.join(by_inductor)}" if by_inductor else ""
        return f"fused ({len(layers)} of {len(model.layers)} layers{rest})"
    why = why_not_auto(model, model.norm.weight.device) or "the fused ones were not chosen"
    return f"Inductor ({why})"
