"""Attention to chosen blocks, beside transformers' and through sessions."""

from dataclasses import dataclass

import pytest
import torch
from conftest import smoke_diagonal
from torch import Tensor
from transformers import DynamicCache
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextAttention,
    Qwen4ExpTextRotaryEmbedding,
)

from benchmarks.decode_speed import cache_in_use
from formats.kv_cache import Int8KVCache
from model import Chunk, Context, KVCache, Transformer
from models.layers.gated_hybrid import HybridArgs, HybridTransformer
from models.layers.indexed_attention import (
    IndexedAttention,
    IndexSizes,
    best_blocks,
    indexed_attention_recipes,
    is_chosen,
)
from models.layers.joined_state import JoinedState
from models.tensors import Recipe
from ops.plain.attention import make_mask
from ops.plain.topk import largest_by_rank
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation

GREEDY = Sampling(temperature=0)
FRESH: dict[str, list[int]] = {}  # answers by all that they depend on
H, K, C, D, ROTATED = 6, 2, 32, 64, 8
SIZES = dict(dim=D, n_layer=2, n_head=H, n_kv_head=K, head_dim=C, intermediate=24, n_expert=6)
SIZES |= dict(n_active=2, vocab_size=64, max_position=4096, qk_norm="head", rotary_dim=ROTATED)


@dataclass(frozen=True)
class Args(HybridArgs):
    index: tuple[int, ...] = (8, 16, 24, 4)

    @property
    def index_sizes(self) -> IndexSizes:
        return IndexSizes(*self.index)


# A ratio that divides no length of the tests, one position a block, blocks of the whole budget
INDEXES = IndexSizes(8, 16, 24, 4), IndexSizes(8, 16, 21, 7), IndexSizes(8, 48, 6, 1)
INDEXES += (IndexSizes(8, 16, 9, 9),)


@pytest.fixture(params=INDEXES, ids=lambda sizes: f"{sizes.budget}of{sizes.ratio}")
def sizes(request) -> IndexSizes:
    return request.param


class Peers:
    """Transformers' layer and ours, of the same random weights."""

    def __init__(self, sizes: IndexSizes):
        self.config = Qwen4ExpTextConfig(
            hidden_size=D,
            num_hidden_layers=1,
            layer_types=["indexed_attention"],
            num_attention_heads=H,
            num_key_value_heads=K,
            head_dim=C,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": ROTATED / C,
                "mrope_section": [2, 1, 1],
            },
            indexer_n_heads=sizes.heads,
            indexer_kv_heads=1,
            indexer_head_dim=sizes.dim,
            indexer_budget=sizes.budget,
            indexer_compress_ratio=sizes.ratio,
        )
        self.config._attn_implementation = "sdpa"
        self.theirs = Qwen4ExpTextAttention(self.config, 0).eval()
        self.rope = Qwen4ExpTextRotaryEmbedding(self.config)
        generator = torch.Generator().manual_seed(0)
        for p in self.theirs.parameters():
            p.data.normal_(0, 0.3 if p.dim() == 1 else p.shape[-1] ** -0.5, generator=generator)
        args = Args("qwen3_next", **SIZES, index=sizes)
        self.ours = IndexedAttention(args)
        recipes, source = indexed_attention_recipes(args), self.theirs.state_dict()
        load_recipes(self.ours, recipes, ("attention.", "self_attn."), source)
        self.model = HybridTransformer(args)  # for its table of RoPE

    def expect(self, x: Tensor, padding: list[int] | None = None) -> Tensor:
        """x [B, Q, D], of which the first `padding` are none -> [B, Q, D]."""
        (B, Q, _), padding = x.shape, padding or [0] * len(x)
        positions = torch.stack([(torch.arange(Q) - n).clamp(min=0) for n in padding])
        rope = self.rope(x, positions.expand(3, -1, -1))
        mask = torch.ones(Q, Q, dtype=torch.bool).tril().expand(B, 1, -1, -1).clone()
        for row, count in enumerate(padding):
            mask[row, :, :, :count] = False
        with torch.no_grad():
            return self.theirs(x, rope, mask, DynamicCache(config=self.config))[0]

    def allocate(self, batch: int, length: int, cache_class=KVCache, device: str = "cpu"):
        self.model.setup_cache(0, length)
        self.rope_table = self.model.rope_table.to(device)
        return self.ours.to(device).allocate(
            batch, length, cache_class, torch.empty(0, device=device)
        )

    def step(self, x: Tensor, positions: Tensor, last: Tensor | None = None) -> Tensor:
        """Run x [B, Q, D] at positions [B, Q]."""
        rope = self.rope_table[positions].unsqueeze(2)
        mask = make_mask(positions, len(self.rope_table), None, x.dtype)
        return self.ours(x, Context(rope, positions=positions, masks={None: mask}, last=last))

    def chunk(self, x: Tensor, end: int, row: int = 0, last: Tensor | None = None) -> Tensor:
        """Run x [1, Q, D], which ends at position `end`, as a chunk."""
        rope = self.rope_table[end - x.shape[1] : end][None, :, None]
        span = Chunk(torch.tensor([row], device=x.device), end)
        return self.ours(x, Context(rope, span, last=last))


def load_recipes(
    module: torch.nn.Module, recipes: dict[str, Recipe], prefixes: tuple[str, str], source: dict
) -> None:
    """Fill a layer's parameters from published tensors. prefixes: of our names, and of theirs."""
    ours, theirs = prefixes
    parameters = dict(module.named_parameters())
    assert {ours + name for name in parameters} == recipes.keys()
    for name, recipe in recipes.items():
        whole = torch.empty(recipe.shape)
        for original, place in recipe.sources.items():
            whole[place] = source[original.removeprefix(theirs)]
        value = recipe.transform(whole) if recipe.transform else whole
        parameters[name.removeprefix(ours)].data.copy_(value)


def inputs(length: int, batch: int = 1, seed: int = 1) -> Tensor:
    return torch.randn(batch, length, D, generator=torch.Generator().manual_seed(seed))


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


# Beside transformers ------------------------------------------------------------------------------


@pytest.mark.parametrize("length", (3, 20, 27, 28, 33, 90, 301))
def test_a_prompt(monkeypatch, sizes, length):
    """Below, at and above the budget; more queries than are computed at once."""
    monkeypatch.setattr("models.layers.indexed_attention.PAIRS_AT_ONCE", 40 * length)
    peers, x = Peers(sizes), inputs(length)
    peers.allocate(1, 320)
    assert_close(peers.chunk(x, length), peers.expect(x))


@pytest.mark.parametrize("parts", ((1,) * 12, (5, 7, 1, 1, 30, 8), (26, 2, 2), (13,)))
def test_a_prompt_in_chunks(sizes, parts):
    x = inputs(70)
    peers, end, found = Peers(sizes), 0, []
    peers.allocate(2, 320)
    for count in (*parts, 70 - sum(parts)):
        end += count
        found.append(peers.chunk(x[:, end - count : end], end, row=1))
    assert_close(torch.cat(found, dim=1), peers.expect(x))


@pytest.mark.parametrize(
    ("sizes", "queries", "length"),
    smoke_diagonal(INDEXES, (1, 3, 16), (64, 320), also=[(INDEXES[2], 1, 320)]),
    ids=lambda value: None if isinstance(value, int) else f"{value.budget}of{value.ratio}",
)
def test_steps_of_one_token_and_of_several(sizes, queries, length):
    """Over a cache whose chosen blocks are gathered, and over one that is read as a whole."""
    x = inputs(61)
    peers, found = Peers(sizes), []
    peers.allocate(1, length)
    for part, at in zip(x.split(queries, 1), torch.arange(61).split(queries), strict=True):
        found.append(peers.step(part, at.unsqueeze(0)))
    assert_close(torch.cat(found, dim=1), peers.expect(x))


def test_the_budget_is_reached_in_a_step(sizes):
    """The last query that attends to all, and the next ones."""
    reach = sizes.reach
    x = inputs(reach + 3)
    peers = Peers(sizes)
    peers.allocate(1, 320)
    found = [peers.chunk(x[:, : reach - 2], reach - 2)]
    for at in range(reach - 2, reach + 3):
        found.append(peers.step(x[:, at : at + 1], torch.tensor([[at]])))
    assert_close(torch.cat(found, dim=1), peers.expect(x))


def test_a_short_cache_needs_no_index(sizes):
    peers, x = Peers(sizes), inputs(sizes.reach)
    assert isinstance(peers.allocate(1, sizes.reach), KVCache)
    assert_close(peers.chunk(x, sizes.reach), peers.expect(x))
    assert isinstance(peers.allocate(1, sizes.reach + 1), JoinedState)


@pytest.mark.parametrize("queries", (1, 4))
def test_padded_batches(sizes, queries):
    """Transformers pads at the left, and we at the right, so that the first calls are padded."""
    lengths, Q = (52, 37, 9), 60
    x = inputs(Q, 3)
    peers = Peers(sizes)
    want = peers.expect(x, [Q - n - 8 for n in lengths])
    peers.allocate(3, 320)
    first = torch.stack(
        [x[row, Q - n - 8 : Q - 8].new_zeros(52, D) for row, n in enumerate(lengths)]
    )
    for row, n in enumerate(lengths):
        first[row, :n] = x[row, Q - n - 8 : Q - 8]
    last = torch.tensor(lengths) - 1
    got = peers.step(first, torch.arange(52).expand(3, -1), last)
    for row, n in enumerate(lengths):
        assert_close(got[row, :n], want[row, Q - n - 8 : Q - 8])
    begin = torch.tensor(lengths).unsqueeze(1)
    for at in range(0, 8, queries):
        part = x[:, Q - 8 + at : Q - 8 + at + queries]
        got = peers.step(part, begin + at + torch.arange(queries))
        assert_close(got, want[:, Q - 8 + at : Q - 8 + at + queries])


@pytest.mark.parametrize("accepted", range(1, 9))
def test_refused_drafts_leave_no_trace(sizes, accepted):
    x, wrong = inputs(70), inputs(70, seed=2)
    peers = Peers(sizes)
    peers.allocate(1, 320)
    peers.chunk(x[:, :43], 43)
    drafts = torch.cat((x[:, 43 : 43 + accepted], wrong[:, 43 + accepted : 51]), dim=1)
    peers.step(drafts, torch.arange(43, 51).unsqueeze(0))
    at, found = 43 + accepted, []
    for part in x[:, at:].split(1, dim=1):
        found.append(peers.step(part, torch.tensor([[at]])))
        at += 1
    assert_close(torch.cat(found, dim=1), peers.expect(x)[:, 43 + accepted :])


def test_a_used_row_begins_another_sequence(sizes):
    peers, x = Peers(sizes), inputs(50, seed=2)
    peers.allocate(1, 320)
    peers.chunk(inputs(310), 310)
    parts = [peers.chunk(x[:, :33], 33)]
    parts += [peers.step(x[:, at : at + 1], torch.tensor([[at]])) for at in range(33, 50)]
    assert_close(torch.cat(parts, dim=1), peers.expect(x))


@pytest.mark.parametrize("length", (64, 320))
def test_idle_rows_and_padding_are_not_taken_in(sizes, length):
    peers, x = Peers(sizes), inputs(50, 2)
    state = peers.allocate(2, length)
    for row in range(2):
        peers.chunk(x[row : row + 1], 50, row, torch.tensor([47]))
    before = [view.clone() for view in state.row(1)[1:]]
    positions = torch.tensor([[48], [length - 1]])
    got = peers.step(x[:, 48:49], positions, torch.tensor([0, -1]))
    assert all(map(torch.equal, state.row(1)[1:], before))
    assert_close(got[:1], peers.expect(x[:1])[:, 48:49])
    assert_close(peers.step(x[:, 48:], torch.tensor([[48, 49]] * 2)), peers.expect(x)[:, 48:])


@pytest.mark.slow
@pytest.mark.parametrize("cache_class", (KVCache, Int8KVCache))
@pytest.mark.parametrize("length", (64, 320))
def test_compiled_steps_are_the_eager_ones(length, cache_class):
    """Reads of the ring, of block keys and of the cache come before or after their writes."""
    x, found = inputs(61), []
    for compiled in (False, True):
        peers = Peers(INDEXES[0])
        peers.allocate(1, length, cache_class)
        peers.chunk(x[:, :50], 50)
        if compiled:
            torch.compiler.reset()
            peers.ours.forward = torch.compile(peers.ours.forward, fullgraph=True, dynamic=False)
        parts = []
        for begin, end in ((50, 54), (52, 56), (55, 56), (56, 57), (57, 58), (58, 59)):
            positions = torch.arange(begin, end).unsqueeze(0)
            parts.append(peers.step(x[:, begin:end], positions))
        found.append(torch.cat(parts, dim=1))
    # A key between two codes of the int8 cache may get either: a step of it, times its weight.
    atol = 1e-5 if cache_class is KVCache else 5e-3
    torch.testing.assert_close(*found, rtol=0, atol=atol)


# Choosing -----------------------------------------------------------------------------------------


def test_ties_go_to_the_earlier_block():
    scores = torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0, 9.0]).view(1, 1, 6)
    chosen = best_blocks(scores, torch.tensor([[20]]), 4, 3)  # 5 blocks are complete
    assert sorted(chosen.flatten().tolist()) == [0, 1, 3]


def test_both_ways_of_choosing_agree():
    scores = torch.rand(3, 700, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[5], [1203], [2799]])
    chosen = best_blocks(scores.unsqueeze(1), positions, 4, 40)
    masked = torch.where(torch.arange(700) < (positions + 1) // 4, scores, -1.0)
    visible = [
        is_chosen(found, positions, 4, 2800)
        for found in (chosen, largest_by_rank(masked, 40)[1].unsqueeze(1))
    ]
    assert torch.equal(*visible)
    assert visible[0].sum(-1).flatten().tolist() == [6, 160, 160]


# Sessions -----------------------------------------------------------------------------------------


def make_model(sizes: IndexSizes, dtype: torch.dtype = torch.float32) -> Transformer:
    model = HybridTransformer(Args("qwen3_next", **SIZES, index=sizes, full_layers=(0,)))
    model.layers[0].attention = IndexedAttention(model.args)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            p.data.normal_(0, 2 * p.shape[-1] ** -0.5, generator=generator)
        else:
            p.data.fill_(0.0 if name.endswith(("bias", "a_log")) else 1.0)
    return model.to(dtype)


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def fresh_answer(sizes: IndexSizes, ids: list[int], count: int, **options) -> list[int]:
    """The greedy answer, each token from a session that has seen nothing else. Kept."""
    session = Session(make_model(sizes), 256, SessionOptions(**options))
    answer = FRESH.setdefault(repr((sizes, ids, options)), [])
    while len(answer) < count:
        session.reset()
        answer += session.stream(ids + answer, 1, GREEDY)
    return answer[:count]


@pytest.mark.parametrize("cache_class", (KVCache, Int8KVCache))
def test_decoding(sizes, cache_class):
    ids, options = prompt(50), dict(cache_class=cache_class)
    session = Session(make_model(sizes), 256, SessionOptions(**options))
    assert list(session.stream(ids, 12, GREEDY)) == fresh_answer(sizes, ids, 12, **options)


def test_several_sequences(sizes, no_compiler):
    prompts = [prompt(length, length) for length in (50, 7, 33)]
    session = Session(make_model(sizes), 256, SessionOptions(batch=3, compile=True))
    rows = list(zip(*session.stream_all(prompts, 6, GREEDY), strict=True))
    assert [list(row) for row in rows] == [fresh_answer(sizes, ids, 6) for ids in prompts]


def test_speculation_over_an_index(sizes):
    ids = prompt(11) * 4
    speculation = Speculation(Session(make_model(sizes), 256), 5)
    assert list(speculation.stream(ids, 12, GREEDY)) == fresh_answer(sizes, ids, 12)
    assert speculation.drafted > speculation.accepted


def test_a_prefix_is_reused(sizes):
    ids = prompt(60)
    session = Session(make_model(sizes), 256, SessionOptions(prefill_chunk=16))
    answer = list(session.stream(ids, 6, GREEDY))
    for kept, reused in (([*ids, *answer], 60), (ids[:40], 32)):
        more = [*kept, *prompt(3, 2)]
        assert list(session.stream(more, 6, GREEDY)) == fresh_answer(sizes, more, 6)
        assert session.prefilled == len(more) - reused


def test_a_token_reads_the_blocks_it_chooses_and_the_index():
    sizes = IndexSizes(8, 16, 24, 4)
    session = Session(make_model(sizes), 256)
    cache = session.states[0].states[0]
    near, far = (cache_in_use(session, position) for position in (100, 200))
    assert far - near == 25 * 16 * 4  # block keys of 16 numbers alone
    chosen = sizes.reach * cache.nbytes // session.cache_len
    assert near - cache_in_use(session, 0) == chosen + 25 * 16 * 4 + 4 * 16 * 4


def test_the_index_takes_few_bytes():
    """At the published sizes: keys and values of 2 heads of 256 in bf16 are 2048 bytes."""
    like = torch.empty(0, dtype=torch.bfloat16, device="meta")
    large = SIZES | dict(head_dim=256, rotary_dim=64)
    layer = IndexedAttention(Args("qwen3_next", **large, index=(4, 128, 2048, 4)))
    length = 1 << 16
    state = layer.allocate(1, length, KVCache, like)
    cache, ring, blocks = (part.nbytes for part in state.states)
    assert (cache / length, blocks / length, ring) == (2048, 64, 32 << 10)
    assert state.nbytes == cache + ring + blocks
