"""Logits that are not finite: generation stops with one line, and the next prompt works."""

import httpx
import pytest
import torch
from test_serve import Running

from generate import load_model
from model import Transformer
from ops.plain.topk import largest_by_rank
from runtime.drafters import IndexedText
from runtime.sampling import NOT_FINITE, Noise, NotFiniteError, Sampling, sample, shortlist
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation

GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=1.0, seed=3)
PROMPT = [5, 17, 3, 99, 42, 8, 120, 5, 17, 3]
NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.usefixtures("few_threads")


@pytest.fixture
def model(make_family) -> Transformer:
    return load_model(make_family("mixtral").directory, "cpu", torch.float32)


class Damage:
    """Writes a value into one weight, and restores it."""

    def __init__(self, model: Transformer, name: str = "layers.1.attention.wo.weight"):
        self.weight = model.get_parameter(name)
        self.saved = self.weight.clone()

    def write(self, value: float) -> None:
        self.weight.data[3, 5] = value

    def restore(self) -> None:
        self.weight.data.copy_(self.saved)


def answer(session, sampling: Sampling = GREEDY, count: int = 12) -> list[list[int]]:
    prompts = [PROMPT, PROMPT[:4]][: session.batch]
    return list(session.stream_all(prompts, count, sampling))


def check_stops(session, model: Transformer, sampling: Sampling, values=(NAN, INF, -INF)) -> None:
    """Each value stops an answer with one line; a repaired model answers as before."""
    expected, damage = answer(session, sampling), Damage(model)
    for value in values:
        session.reset()
        damage.write(value)
        for _ in range(2):  # the first failure leaves nothing behind
            with pytest.raises(NotFiniteError, match="check it with python checkpoint"):
                answer(session, sampling)
        damage.restore()
        assert answer(session, sampling) == expected


# Rules --------------------------------------------------------------------------------------------


def noise_of(rows: int, candidates: int) -> Noise:
    return Noise(torch.arange(rows), torch.zeros(rows, 1, dtype=torch.int64), candidates)


def rows(*changes: dict[int, float]) -> torch.Tensor:
    """Return fp32 logits [len(changes), 4000], each row with these values changed."""
    logits = torch.randn(len(changes), 4000, generator=torch.Generator().manual_seed(0))
    for row, change in zip(logits, changes, strict=True):
        for token, value in change.items():
            row[token] = value
    return logits


@pytest.mark.parametrize("ranked", (False, True))
@pytest.mark.parametrize("greedy", (False, True))
def test_a_row_without_a_finite_maximum_gives_no_token(monkeypatch, greedy, ranked):
    """ranked: by the GPU's ranking, whose indices must stay inside the vocabulary."""
    if ranked:
        monkeypatch.setattr("torch.topk", largest_by_rank)
    logits = rows({7: NAN}, {8: INF}, {}, {9: -INF}, {0: NAN, 3999: INF})
    logits = torch.cat((logits, torch.full((1, 4000), -INF), torch.full((1, 4000), NAN)))
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    seen[:, 5:10] = True
    controls = Sampling(repetition_penalty=1.3).controls(4000)[None]
    noise = None if greedy else noise_of(len(logits), 256)
    tokens = sample(logits, controls, seen, noise).flatten().tolist()
    assert [token == NOT_FINITE for token in tokens] == [True, True, False, False, True, True, True]
    assert all(0 <= token < 4000 for token in tokens if token != NOT_FINITE)


def test_a_rule_of_shortlist_gives_no_token():
    seen = torch.zeros(2, 4000, dtype=torch.bool)
    tokens, _ = shortlist(rows({7: NAN}, {}), Sampling().controls(4000)[None], seen, 256)
    assert (tokens[0] == NOT_FINITE).all() and (tokens[1] >= 0).all()


def test_a_tiny_temperature_is_no_damage():
    logits, seen = rows({7: 90.0}), torch.zeros(1, 4000, dtype=torch.bool)
    controls = Sampling(temperature=1e-38).controls(4000)[None]
    assert sample(logits, controls, seen, noise_of(1, 256)).item() == 7


@pytest.mark.parametrize("settings", (GREEDY, SAMPLED, Sampling(0.7, 40, 0.8, 0.02, 1.2)))
def test_finite_logits_give_the_tokens_of_plain_torch(settings):
    logits, generator = rows(*[{}] * 32), torch.Generator().manual_seed(1)
    seen = torch.rand(logits.shape, generator=generator) < 0.1
    count = settings.candidates(4000)
    noise = noise_of(32, count) if count else None
    tokens = sample(logits, settings.controls(4000)[None], seen, noise)
    scaled = torch.where(logits > 0, logits / settings.repetition_penalty, logits)
    scaled = torch.where(logits > 0, scaled, logits * settings.repetition_penalty)
    scaled = torch.where(seen, scaled, logits)
    if settings is GREEDY:
        assert torch.equal(tokens, scaled.argmax(dim=-1, keepdim=True))
        return
    values, order = scaled.topk(count)
    top_k = torch.arange(count) < (settings.top_k or 4000)
    p = torch.where(top_k, values / settings.temperature, -INF).softmax(dim=-1)
    top_p = (p.cumsum(dim=-1) - p < settings.top_p) | (settings.top_p == 1)
    p = torch.where(top_k & top_p & (p >= settings.min_p * p[:, :1]), p, 0.0)
    assert torch.equal(tokens, order.gather(1, (p / noise.of(order)).argmax(dim=-1, keepdim=True)))


# Sessions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED))
def test_a_session_stops_and_starts_anew(model, sampling, batch):
    check_stops(Session(model, 64, SessionOptions(batch=batch)), model, sampling)


def test_damage_after_the_first_token(model):
    session, damage = Session(model, 64), Damage(model)
    expected, stream = answer(session), session.stream(PROMPT, 12, GREEDY)
    assert [next(stream) for _ in range(5)] == [token for (token,) in expected[:5]]
    damage.write(NAN)
    with pytest.raises(NotFiniteError):
        list(stream)
    damage.restore()
    assert answer(session) == expected


def test_a_watched_session_stops(model):
    session = Session(model, 64)
    session.watch = True
    check_stops(session, model, SAMPLED)


def test_an_idle_row_does_not_stop_a_batch(model):
    session = Session(model, 64, SessionOptions(batch=2))
    expected = [token for (token,) in answer(Session(model, 64))]
    session = Session(model, 64, SessionOptions(batch=2))
    decode = session.decode

    def decode_with_damage(*args: int) -> None:
        decode(*args)
        session.token[1] = NOT_FINITE

    session.decode = decode_with_damage
    assert list(session.stream(PROMPT, 12, GREEDY)) == expected


def test_other_routers_and_caches_stop(make_family):
    for name in ("deepseek_v3", "gpt_oss", "granitemoe"):
        model = load_model(make_family(name).directory, "cpu", torch.float32)
        check_stops(Session(model, 64), model, GREEDY, (NAN,))


@pytest.mark.slow
def test_a_compiled_session_stops(model):
    torch._dynamo.reset()
    session = Session(model, 64, SessionOptions(compile=True, compile_prefill=True))
    check_stops(session, model, GREEDY, (NAN, INF))
    check_stops(session, model, SAMPLED, (NAN,))


# Speculation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", (False, True))
@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED))
def test_speculation_stops(no_compiler, model, sampling, compile):
    session = Session(model, 64, SessionOptions(compile=compile))
    speculation = Speculation(session, 3)
    speculation.overlaps = compile  # the next pass is in flight, as on a GPU
    check_stops(speculation, model, sampling)


@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED))
def test_damage_while_drafts_are_verified(monkeypatch, model, sampling):
    monkeypatch.setattr(IndexedText, "match", lambda self: (3, 1))
    speculation, damage = Speculation(Session(model, 64), 3), Damage(model)
    stream = speculation.stream([5, 6] * 8, 30, sampling)
    next(stream)
    damage.write(NAN)
    with pytest.raises(NotFiniteError):
        list(stream)
    assert speculation.drafted == 3 and speculation.accepted == 0


@pytest.mark.parametrize("sampling", (GREEDY, SAMPLED))
def test_a_damaged_draft_model_is_never_accepted(make_family, model, sampling):
    draft = load_model(make_family("mixtral").directory, "cpu", torch.float32)
    Damage(draft).write(NAN)
    speculation = Speculation(Session(model, 64), 3, draft)
    found = answer(speculation, sampling)
    assert len(found) == 12 and speculation.accepted == 0
    if sampling is GREEDY:
        assert found == answer(Session(model, 64))


# The server ---------------------------------------------------------------------------------------


def test_a_request_gets_the_cause_and_the_next_one_an_answer(directory, capfd):
    running = Running(directory)
    try:
        body = {"model": "any", "prompt": "def f", "max_tokens": 6, "temperature": 0}
        expected = running.post(json=body).json()["choices"][0]["text"]
        damage = Damage(running.session.model)
        damage.write(NAN)
        failed: httpx.Response = running.post(json=body)
        damage.restore()
        assert failed.status_code == 500
        assert "the logits are not finite: a weight is damaged" in failed.text
        assert running.post(json=body).json()["choices"][0]["text"] == expected
    finally:
        running.close()
