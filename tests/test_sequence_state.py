"""The sequence-state protocol, driven by a model with a recurrent layer."""

import pytest
import torch
from torch import Tensor, nn

from formats.kv_cache import KV_CACHES, Int8KVCache
from generate import load_model
from model import Chunk, Context, KVCache, Linear, ModelArgs, Transformer
from models.latent_family import LatentArgs, LatentTransformer
from ops.plain.pending import MAX_TENTATIVE
from runtime.fused_attention import fuse_decode_attention
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.snapshots import Snapshots
from runtime.speculation import Speculation

WIDTH = 16
DECAY = 0.7
GREEDY = Sampling(temperature=0)
FRESH: dict[tuple, list[int]] = {}  # answers by kind and prompt
REGISTERED = "_parameters", "_buffers", "_modules"


def real_tokens(queries: int, context: Context, device: torch.device) -> Tensor:
    """Return which queries of a call are real tokens, bool [B, Q] or [1, Q]."""
    index = torch.arange(queries, device=device)
    if context.last is None:
        return torch.ones_like(index, dtype=torch.bool).unsqueeze(0)
    return index <= context.last.unsqueeze(1)


class RecurrentState:
    """h <- DECAY * h + v for each real token: the smallest state that a stray token spoils."""

    def __init__(self, batch: int, like: Tensor):
        self.h = torch.zeros(batch, WIDTH, dtype=like.dtype, device=like.device)
        # After a call of several tokens: the states after each, and 1 + the position of the first.
        self.tentative = self.h.unsqueeze(1).repeat(1, MAX_TENTATIVE + 1, 1)
        self.first = torch.zeros(batch, dtype=torch.int64, device=like.device)

    def append(self, values: Tensor, context: Context) -> Tensor:
        B, Q, _ = values.shape
        if context.chunk is None:
            rows, position = torch.arange(B), context.positions[:, 0]
        else:
            rows, position = context.chunk.row, torch.tensor([context.chunk.end - Q])
        real = real_tokens(Q, context, values.device)
        exists, first = real[:, 0].expand(B), self.first[rows]
        accepted = (position + 1 - first).clamp(0, MAX_TENTATIVE)
        is_pending = exists & (first > 0)
        h = torch.where(is_pending[:, None], self.tentative[rows, accepted], self.h[rows])
        states = [h]
        for n in range(Q):
            states.append(
                torch.where(real[:, n : n + 1], DECAY * states[-1] + values[:, n], states[-1])
            )
        several = 1 < Q <= MAX_TENTATIVE
        if several:
            padded = torch.stack(states + [h] * (MAX_TENTATIVE - Q), dim=1)
            self.tentative[rows] = torch.where(exists[:, None, None], padded, self.tentative[rows])
        self.h[rows] = torch.where(exists[:, None], h if several else states[-1], self.h[rows])
        self.first[rows] = torch.where(exists, position + 1 if several else 0, first)
        return torch.stack(states[1:], dim=1)

    def recurrent(self, row: int) -> list[Tensor]:
        return [self.h[row], self.tentative[row], self.first[row]]

    def row(self, row: int) -> list[Tensor]:
        return [part.view(1, -1) for part in self.recurrent(row)]

    def reset(self, row: int | None = None) -> None:
        for part in (self.h, self.tentative, self.first):
            (part if row is None else part[row]).zero_()

    @property
    def nbytes(self) -> int:
        return self.h.nbytes + self.tentative.nbytes


class RecurrentLayer(nn.Module):
    """In place of an attention layer."""

    window = None

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.wv, self.wo = Linear(args.dim, WIDTH), Linear(WIDTH, args.dim)

    def allocate(self, batch, length, cache_class, like) -> RecurrentState:
        self.state = RecurrentState(batch, like)
        return self.state

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.wo(self.state.append(self.wv(x), context))


SIZES = dict(dim=32, n_layer=2, n_head=4, intermediate=24, n_expert=6, n_active=2)
SIZES |= dict(vocab_size=64, max_position=4096)


def with_recurrence(model: Transformer, seed: int = 0) -> Transformer:
    """Replace the last layer, and draw all weights."""
    model.layers[1].attention = RecurrentLayer(model.args)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            size = parameter.shape[-1] ** -0.5
            parameter.data.normal_(0, 2 * size, generator=generator)
        else:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def make_model(kind: str = "plain", seed: int = 0) -> Transformer:
    if kind.startswith("latent"):
        latent = dict(n_kv_head=1, head_dim=16, rotary_dim=8, kv_rank=16, value_dim=8)
        args = LatentArgs("deepseek_v2", **SIZES, **latent)
        return with_recurrence(LatentTransformer(args), seed)
    args = ModelArgs("mixtral", **SIZES, n_kv_head=2, head_dim=8)
    return with_recurrence(Transformer(args), seed)


KINDS = {"plain": KVCache, "int8": Int8KVCache, "latent": KVCache, "latent-int8": Int8KVCache}
# `make test` runs each attention and each cache, `make test-all` all combinations.
EACH_KIND = [
    pytest.param(kind, marks=pytest.mark.slow if kind in ("int8", "latent") else ())
    for kind in KINDS
]


@pytest.fixture(params=EACH_KIND)
def kind(request) -> str:
    return request.param


def open_session(kind: str, **options) -> Session:
    return Session(make_model(kind), 128, SessionOptions(cache_class=KINDS[kind], **options))


def prompt(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(64, (length,), generator=generator).tolist()


def fresh_answer(kind: str, ids: list[int], count: int) -> list[int]:
    """The greedy answer, each token from a session that has seen nothing else. Kept."""
    session, answer = open_session(kind), FRESH.setdefault((kind, *ids), [])
    while len(answer) < count:
        session.reset()
        answer += session.stream(ids + answer, 1, GREEDY)
    return answer[:count]


def test_decoding_keeps_the_state(kind):
    ids = prompt(11)
    assert list(open_session(kind).stream(ids, 12, GREEDY)) == fresh_answer(kind, ids, 12)


def test_padding_of_a_prompt_is_not_taken_in(kind, no_compiler):
    ids = prompt(11)
    session = open_session(kind, compile_prefill=True)
    assert session.padded(0, len(ids), 0) == (64, False)
    assert list(session.stream(ids, 12, GREEDY)) == fresh_answer(kind, ids, 12)


def test_a_short_prompt_as_steps_of_many_tokens(kind):
    for count in (11, 40):
        session = open_session(kind)
        session.short_chunks = 8, 32  # as on a GPU
        ids = prompt(count)
        assert list(session.stream(ids, 12, GREEDY)) == fresh_answer(kind, ids, 12)


def test_a_prompt_in_chunks(kind):
    ids = prompt(30)
    session = open_session(kind, prefill_chunk=7)
    assert list(session.stream(ids, 6, GREEDY)) == fresh_answer(kind, ids, 6)


def test_warming_up_a_step_is_not_taken_in(kind, no_compiler):
    """Between two answers a step of another kind is warmed up, as before its capture."""
    session, ids = open_session(kind, compile=True), prompt(11)
    first = list(session.stream(ids, 6, GREEDY))
    before = session.states[1].h.clone()
    session.warm_up(session.candidates(Sampling(temperature=1.0)))
    assert torch.equal(session.states[1].h, before)
    more = [*ids, *first, *prompt(3, 2)]
    assert list(session.stream(more, 6, GREEDY)) == fresh_answer(kind, more, 6)


def test_idle_rows_of_a_batch(kind, no_compiler):
    session = open_session(kind, batch=3, compile=True)
    prompts = [prompt(9, 3), prompt(5, 4), prompt(7, 5)]
    list(session.stream_all(prompts, 4, GREEDY))
    before = session.states[1].h[1:].clone()
    alone = [tokens[0] for tokens in session.stream_all(prompts[1:2], 5, GREEDY)]
    assert alone == fresh_answer(kind, prompts[1], 5)
    assert torch.equal(session.states[1].h[1:], before)  # the idle rows took nothing in
    rows = list(zip(*session.stream_all(prompts, 4, GREEDY), strict=True))
    assert [list(row) for row in rows] == [fresh_answer(kind, ids, 4) for ids in prompts]


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("drafts", ("lookup", "model"))
def test_refused_drafts_are_not_taken_in(kind, compiled, drafts, no_compiler):
    ids = prompt(5) * 3
    draft = make_model(seed=1) if drafts == "model" else None
    speculation = Speculation(open_session(kind, compile=compiled), 4, draft)
    assert list(speculation.stream(ids, 20, GREEDY)) == fresh_answer(kind, ids, 20)
    assert speculation.statistics()["drafted"] > speculation.statistics()["accepted"]


def test_a_prefix_is_reused_from_the_snapshot_after_the_prompt(kind):
    session, ids = open_session(kind), prompt(20)
    answer = list(session.stream(ids, 6, GREEDY))
    more = [*ids, *answer, *prompt(3, 2)]
    assert list(session.stream(more, 6, GREEDY)) == fresh_answer(kind, more, 6)
    assert session.prefilled == len(more) - len(ids)
    other = [*ids[:10], *prompt(5, 6)]  # leaves the prefix before any snapshot
    assert list(session.stream(other, 6, GREEDY)) == fresh_answer(kind, other, 6)
    assert session.prefilled == len(other)


def test_a_first_token_is_read_before_recurrent_states_are_copied(kind, monkeypatch):
    """The copy may take as long as a layer."""
    session, ids, order = open_session(kind, prefill_chunk=8), prompt(20), []
    read, take = session.read_tokens, session.snapshots.take
    monkeypatch.setattr(session, "read_tokens", lambda **how: order.append("read") or read(**how))
    monkeypatch.setattr(session.snapshots, "take", lambda *at: order.append(at) or take(*at))
    assert list(session.stream(ids, 1, GREEDY)) == fresh_answer(kind, ids, 1)
    assert order == [(0, 8), (0, 16), "read", (0, 20)]


def test_a_prefix_ends_at_a_chunk(kind):
    session, ids = open_session(kind, prefill_chunk=8), prompt(20)
    list(session.stream(ids, 3, GREEDY))
    other = [*ids[:13], *prompt(5, 6)]
    assert list(session.stream(other, 6, GREEDY)) == fresh_answer(kind, other, 6)
    assert session.prefilled == len(other) - 8


def other_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors that a module, or a container in it, has beside parameters and buffers."""
    values, found = [v for name, v in vars(module).items() if name not in REGISTERED], []
    while values:
        value = values.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, dict):
            values += value.values()
        elif not isinstance(value, nn.Module | type) and not callable(value):
            values += vars(value).values() if hasattr(value, "__dict__") else ()
    return found


@pytest.mark.parametrize("name", KV_CACHES)
def test_everything_moves_with_a_model(family, name):
    """A tensor that is no buffer would stay behind: a kernel's scratch on the host, for one."""
    model = load_model(family.directory, "cpu")
    fuse_decode_attention(model)
    model.setup_cache(2, 64, KV_CACHES[name])
    model(torch.arange(20).unsqueeze(0), Chunk(torch.tensor([1]), 20))
    tokens = torch.arange(4).expand(2, -1)
    model(tokens, tokens + 20)
    model.to("meta")
    assert not [t for module in model.modules() for t in other_tensors(module) if not t.is_meta]


@pytest.mark.parametrize("cache_class", (KVCache, Int8KVCache))
def test_a_cache_implements_the_protocol(cache_class):
    cache = cache_class((2, 4, 32, 16), torch.bfloat16, torch.device("cpu"))
    context = Context(torch.empty(0), positions=torch.tensor([[0, 1], [5, 6]]))
    k, v = cache.append(torch.ones(2, 2, 2, 4, 16, dtype=torch.bfloat16), context)
    assert k.shape == v.shape == (2, 4, 32, 16)
    assert k[1, :, 5:7].eq(1).all() and k[0, :, :2].eq(1).all()
    assert not cache.recurrent(0)
    assert cache.nbytes == sum(buffer.nbytes for buffer in cache.buffers()) > 0
    cache.reset()
    assert not cache.stored()[0].any()


def test_without_recurrent_layers_a_row_goes_back_to_any_length():
    caches = [KVCache((2, 4, 32, 16), torch.bfloat16, torch.device("cpu")) for _ in range(3)]
    for states in (caches, []):
        snapshots = Snapshots(states, 2)
        snapshots.take(1, 9)
        assert snapshots.go_back(1, 7) == 7
