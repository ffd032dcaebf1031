"""Mamba-2: its forms against each other, its kernel, and latent experts beside it."""

import pytest
import torch
import transformers
from chunks import prompt, run
from conftest import FAMILIES as FIXTURES
from conftest import randomize
from without_gpu import run_without_gpu

from generate import load_model
from model import Transformer
from models.converter import convert
from ops.attention.delta_prompt import state_space_chunk
from ops.plain.mamba2 import ssm_chunk, ssm_step, time_steps
from runtime.sampling import Sampling
from tests.recurrent_without_gpu import after_tokens

GREEDY = Sampling(temperature=0)
FAMILIES = "nemotron_h", "granitemoehybrid"


@pytest.fixture(params=FAMILIES)
def made(request, make_family):
    return make_family(request.param)


@pytest.fixture
def model(made) -> Transformer:
    return load_model(made.directory, "cpu")


# Arithmetic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", (0, 1, 63, 64, 100))
def test_a_prompt_in_chunks_equals_its_tokens_one_by_one(cut):
    generator = torch.Generator().manual_seed(cut)
    x, b, c, dt = (
        torch.randn(2, 150, *shape, generator=generator)
        for shape in ((6, 8), (2, 16), (2, 16), (6,))
    )
    a_log, bias, skip = torch.randn(3, 6, generator=generator)
    dt, g = time_steps(dt, a_log, bias)
    state, tokens = torch.randn(2, 6, 8, 16, generator=generator), (x, b, c, dt, g)
    found = []
    first = state
    for part in (slice(0, cut), slice(cut, None)):
        if x[:, part].shape[1]:
            y, first = ssm_chunk(*(t[:, part] for t in tokens), skip, first)
            found.append(y)
    for n in range(150):
        y, state = ssm_step(*(t[:, n] for t in tokens), skip, state)
        torch.testing.assert_close(torch.cat(found, 1)[:, n], y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first, state, rtol=1e-4, atol=1e-4)


def test_a_prompt_compiles_without_a_loop():
    """Compiled code takes the operator's results as contiguous."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 64, 6, 8), (2, 64, 2, 16), (2, 64, 2, 16), (2, 64, 6), (2, 64, 6), (6,)
    x, b, c, dt, g, skip = (torch.randn(*shape, generator=generator) for shape in shapes)
    weights = g[0, 0], dt[0, 0], skip, torch.tensor([63, 40])
    given = x, b, c, dt, *weights, torch.zeros(2, 6, 8, 16)
    compiled = torch.compile(state_space_chunk, fullgraph=True, backend="aot_eager")
    found = (after_tokens(form, *given) for form in (compiled, state_space_chunk))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
        assert got.is_contiguous()


# The kernel ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_kernel_computes_what_the_plain_form_does():
    """Sequences with drafts that were accepted, with padding, and an idle one.

    tests/test_step_through.py has three of these cases.
    """
    errors = run_without_gpu("mamba_kernels_without_gpu.py", TRITON_INTERPRET="1")
    assert len(errors) == 16
    for case, found in errors.items():
        most = 1e-5 if "prompt" in case else 2e-6  # the order of sums of g differs
        assert max(found) < (2e-2 if case.endswith("bf16") else most), (case, found)


@pytest.mark.slow
def test_the_kernel_compiles_for_an_h200():
    found = run_without_gpu("mamba_kernels_without_gpu.py")
    prompts = [name for name in found if "in a prompt" in name]
    assert len(prompts) == 9 and len(found) == 16
    for name in prompts:
        counts = found.pop(name)
        # Triton 3.6 stores five numbers before a loop, and loads them after it; 3.9 28.
        assert counts["spills"] <= (30 if name.startswith("_scan") else 0), (name, counts)
        assert not counts["overwritten"] and counts["shared"] <= 227 << 10, (name, counts)
        assert not counts["narrow"], name
    for name, counts in found.items():
        assert counts["waits"] == counts["starts"] == 1 and counts["spills"] == 0, name
        assert counts["ahead"] >= 8, name  # the state is loaded before the wait
        assert counts["registers"] <= 128, name  # it starts beside programs of the product before
        assert counts["instructions"] < 3000 and counts["barriers"] < 25, (name, counts)


# Families -----------------------------------------------------------------------------------------


def test_experts_in_a_latent_space_are_transformers(tmp_path):
    """As Nemotron 3 Super has them: routed experts read and write fewer numbers than x has."""
    torch.manual_seed(0)
    config = FIXTURES["nemotron_h"]().config.to_dict() | {"moe_latent_size": 32}
    peer = transformers.NemotronHForCausalLM(transformers.NemotronHConfig.from_dict(config)).eval()
    randomize(peer)
    peer.save_pretrained(tmp_path / "hf")
    model = load_model(convert(tmp_path / "hf", dtype="fp32", progress=False), "cpu")
    assert model.args.latent_dim == 32
    model.setup_cache(1, 64)
    torch.testing.assert_close(run(model, prompt(40)), peer(prompt(40)).logits, rtol=0, atol=1e-4)
