"""What only a GPU can show: the same tokens there, eager, compiled and recorded; weights streamed past the host."""

import pytest
import torch
from conftest import FAMILIES
from torch._dynamo.utils import counters

from generate import EMBEDDED, embedded_checkpoint, load_model
from model import Experts
from session import Sampling, Session
from tokenizer import load_tokenizer

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
GREEDY = Sampling(temperature=0)


def prompt(length: int = 40) -> torch.Tensor:
    return torch.randint(160, (1, length), generator=torch.Generator().manual_seed(1))


def logits(directory, device: str, dtype: torch.dtype, tokens: torch.Tensor) -> torch.Tensor:
    model = load_model(directory, device, dtype)
    model.setup_cache(1, 64)
    return model(tokens.to(device), torch.arange(tokens.shape[1], device=device).unsqueeze(0), all_positions=True).cpu()


@pytest.mark.parametrize("limit", (0, 64), ids=("grouped", "gathered"))
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, limit, make_family, monkeypatch):
    monkeypatch.setattr(Experts, "gather_tokens", limit)
    family = make_family(name)
    want = family.peer(prompt()).logits[0]
    got = logits(family.directory, "cuda", torch.float32, prompt())[0]
    assert ((got - want).norm() / want.norm()).item() < 1e-4
    for dtype, tolerance in ((torch.bfloat16, 4e-2), (torch.float16, 2e-2)):
        got = logits(family.directory, "cuda", dtype, prompt())[0]
        # The median over positions: in 16 bits a near-tie of the router sends a token to another expert.
        errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
        assert errors.median().item() < tolerance, dtype


def embedded_session(device: str, dtype: torch.dtype, compile: bool) -> Session:
    return Session(load_model(embedded_checkpoint(), device, dtype), 512, compile=compile, compile_prefill=compile)


def embedded_prompt(characters: int) -> list[int]:
    tokenizer = load_tokenizer(embedded_checkpoint())
    return tokenizer.encode((EMBEDDED / "heldout.txt").read_text()[:characters])


def test_greedy_text_in_fp32_is_the_cpus_eager_and_compiled():
    ids = embedded_prompt(600)
    want = list(embedded_session("cpu", torch.float32, False).stream(ids, 100, GREEDY))
    for compile in (False, True):
        assert list(embedded_session("cuda", torch.float32, compile).stream(ids, 100, GREEDY)) == want


def test_the_first_difference_in_bf16_is_a_near_tie():
    ids = embedded_prompt(600)
    eager = list(embedded_session("cuda", torch.bfloat16, False).stream(ids, 100, GREEDY))
    compiled = list(embedded_session("cuda", torch.bfloat16, True).stream(ids, 100, GREEDY))
    at = next((n for n, (a, b) in enumerate(zip(eager, compiled, strict=True)) if a != b), None)
    if at is not None:
        model = load_model(embedded_checkpoint(), "cuda", torch.float32)
        model.setup_cache(1, 512)
        tokens = torch.tensor([ids + eager[:at]], device="cuda")
        row = model(tokens, torch.arange(tokens.shape[1], device="cuda").unsqueeze(0))[0]
        assert (row[eager[at]] - row[compiled[at]]).abs() < 0.02 * row.abs().max()


def test_one_recorded_step_serves_every_prompt_and_setting():
    session = embedded_session("cuda", torch.bfloat16, True)
    settings = Sampling(temperature=1.0, seed=5)
    first = list(session.stream(embedded_prompt(200), 40, settings))
    list(session.stream(embedded_prompt(40), 5, GREEDY))
    before, steps = counters["stats"]["unique_graphs"], dict(session.steps)
    for characters in range(1, 900, 60):
        session.reset()
        list(session.stream(embedded_prompt(characters), 5, Sampling(temperature=0.1 + characters / 500, top_p=0.9)))
    assert counters["stats"]["unique_graphs"] == before and session.steps == steps
    session.reset()
    assert list(session.stream(embedded_prompt(200), 40, settings)) == first
