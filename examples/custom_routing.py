"""Try another router in the embedded model: its perplexity, its speed, and the fused kernels.

    PYTHONPATH=. python examples/custom_routing.py

The idea here: experts' outputs count `factor` times. Every path of PyTorch runs a changed `route`
as it is. The fused kernels do not, and leave the layer to PyTorch, until the class declares by
`fused_decode_settings` what they have to compute in its place (runtime/fused_layer.py).
"""

from torch import Tensor

from eval import perplexity
from generate import EMBEDDED, embedded_checkpoint, generate
from model import MoE
from ops.declared import ExpertAdditions, Routing
from runtime.fused_layer import fused_layers
from runtime.loading import load_model
from runtime.sampling import Sampling
from runtime.session import Session
from tokenizer import load_tokenizer

TEXT = (EMBEDDED / "heldout.txt").read_text()[:8_000]


class ScaledMoE(MoE):
    factor = 1.0

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        experts, weights = super().route(scores)
        return experts, weights * self.factor


class DeclaredMoE(ScaledMoE):
    def fused_decode_settings(self) -> ExpertAdditions:
        return ExpertAdditions(routing=Routing(self.n_active, self.norm_topk, self.factor))


def main() -> None:
    path = embedded_checkpoint()
    model, tokenizer = load_model(path), load_tokenizer(path)
    for kind, factor in ((MoE, 1.0), (ScaledMoE, 0.8), (DeclaredMoE, 0.8)):
        for block in model.layers:
            block.ffn.__class__, block.ffn.factor = kind, factor  # it has the same parameters
        fused = f"fused kernels for {len(fused_layers(model))} of {len(model.layers)} layers"
        found = perplexity(model, tokenizer, TEXT, 256, progress=False)["perplexity"]
        session = Session(model, 256)
        speed = generate(session, tokenizer, "import os\n", 60, Sampling(seed=1))["decode_tok_s"]
        print(f"{kind.__name__:11} factor {factor}: perplexity {found:.3f}, {speed:.1f} tokens/s")
        print(f"            {fused}")


if __name__ == "__main__":
    main()
