"""Choose what runs a compiled step: the fused kernels, Inductor's, or those of offloaded experts.

`python generate.py --compile`, the server and a `Session` from Python all choose here. The fused
kernels (runtime/fused_decode.py) run on NVIDIA GPUs from compute capability 8.0 on, for models that
they compute. Everything else runs the blocks as torch.compile makes them (runtime/runner.py).
"""

import torch

from model import MoE, Transformer
from ops.gpu import gpu_of
from runtime.fused_decode import FusedRunner
from runtime.fused_layer import fused_layers
from runtime.plain_forms import changed_forms
from runtime.runner import CompiledRunner

KERNELS = "auto", "fused", "inductor"  # --decode_kernels


def choose_runner(model: Transformer, kernels: str = "auto") -> type[CompiledRunner]:
    """Return what runs a compiled model's calls.

    kernels: of KERNELS. "auto": the fused ones if `why_not_fused` has nothing against them, and a
    GPU has run them: a model whose `kernels_ran` is False has parts of which none has. A model may
    have a `runner_class` and a `fused_runner_class` of its own (offload/plan.py). An unknown name
    raises ValueError.
    """
    if kernels not in KERNELS:
        raise ValueError(f"decode_kernels {kernels!r}: it must be one of {', '.join(KERNELS)}")
    fused = kernels == "fused"
    if kernels == "auto":
        has_kernels = why_not_fused(model, model.norm.weight.device) is None
        fused = has_kernels and getattr(model, "kernels_ran", True)
    return fused_runner(model) if fused else getattr(model, "runner_class", CompiledRunner)


def fused_runner(model: Transformer) -> type[FusedRunner]:
    """Return what runs the fused kernels of this model."""
    return getattr(model, "fused_runner_class", FusedRunner)


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
    if changed := changed_forms():
        return f"{', '.join(changed)} in model.py changed: see runtime/plain_forms.py"
    sparse = [n for n, block in enumerate(model.layers) if isinstance(block.ffn, MoE)]
    for layer in sparse:
        try:
            fused_runner(model).make_layer(model.layers[layer])
        except ValueError as error:
            return f"layer {layer}: {error}"
    return None if sparse else "no layer has experts"


def describe_kernels(model: Transformer, runner_class: type[CompiledRunner]) -> str:
    """Return which kernels decode a token, and why not the fused ones."""
    if issubclass(runner_class, FusedRunner):
        layers = fused_layers(model, runner_class.make_layer)
        return f"fused ({len(layers)} of {len(model.layers)} layers)"
    why = why_not_fused(model, model.norm.weight.device) or "the fused ones were not chosen"
    return f"Inductor ({why})"
