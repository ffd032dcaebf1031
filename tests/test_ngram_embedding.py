"""Embeddings of n-grams beside transformers', from the hashes to the layer."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_indexed_attention import load_recipes
from torch import Tensor
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextNGramEmbedding,
    Qwen4ExpTextPLELayer,
)

from formats import FORMATS
from formats.packed import PackedLinear, weight_bytes
from formats.words import bytes_to_words
from generate import load_model
from model import Chunk, Context, ModelArgs
from models.converter import convert
from models.layers.ngram_embedding import NgramEmbedding, NgramSizes, ngram_recipes
from models.layers.ngram_hash import head_primes, ngram_rows, within_segment
from models.layers.short_conv import ConvCache
from ops.plain.ring import Ring
from runtime.host_memory import Registered, in_host_memory
from runtime.memory import Shortage
from runtime.weights import bytes_per_token

S, D, VOCAB, END = 3, 16, 50, 7
SIZES = dict(dim=D, n_layer=1, n_head=2, n_kv_head=1, head_dim=8, intermediate=24, n_expert=6)
SIZES |= dict(n_active=2, vocab_size=VOCAB, max_position=4096)


@dataclass(frozen=True)
class Args(ModelArgs):
    streams: int = S
    ngrams: tuple[int, ...] = ()

    @property
    def ngram_sizes(self) -> NgramSizes:
        return NgramSizes(*self.ngrams)


# Longest n-gram, heads of each, numbers of all, least rows, what divides all rows, seed, vocabulary
PAIRS = NgramSizes(2, 3, 12, 11, 8, 1, VOCAB, END, 2)
TRIPLES = NgramSizes(3, 2, 32, 40, 128, 1234, VOCAB, END, 4)
LONG = NgramSizes(5, 2, 16, 300, 32, 99, VOCAB, END, 3)


@pytest.fixture(params=(PAIRS, TRIPLES, LONG), ids=("pairs", "triples", "long"))
def sizes(request) -> NgramSizes:
    return request.param


def peer_config(sizes: NgramSizes, layers: int = 1) -> Qwen4ExpTextConfig:
    return Qwen4ExpTextConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=D,
        num_hidden_layers=layers,
        layer_types=["linear_attention"] * layers,
        rms_norm_eps=1e-5,
        eos_token_id=sizes.end,
        hc_count=S,
        ple_layer_ids=[*range(1, layers + 1)],
        ple_embed_dim=sizes.dim,
        ple_conv_kernel_size=sizes.conv_width,
        ngram_size=sizes.order,
        heads_per_ngram=sizes.heads,
        ngram_vocab_size_base=sizes.base,
        make_ngram_vocab_size_divisible_by=sizes.multiple,
        seed=sizes.seed,
    )


class Peers:
    """Transformers' layer and ours, of the same random weights."""

    def __init__(self, sizes: NgramSizes, number: int = 0, parts: int = 4):
        config = peer_config(sizes, number + 1)
        self.theirs = Qwen4ExpTextPLELayer(config, number, number).eval()
        generator = torch.Generator().manual_seed(0)
        for p in self.theirs.parameters():
            p.data.normal_(0, 0.3 if p.dim() == 1 else p.shape[-1] ** -0.5, generator=generator)
        args = Args("mixtral", **SIZES, ngrams=tuple(sizes))
        self.ours = NgramEmbedding(args, number)
        source = self.theirs.state_dict()
        table = source["ple_embedding.ngram_embedding.weight"]
        for n, shard in enumerate(table.chunk(parts)):
            source[f"ple_embedding.ngram_embedding.shard_{n}.weight"] = shard
        recipes = ngram_recipes(args, number, parts)
        load_recipes(self.ours, recipes, ("ngrams.", "ple."), source)

    def expect(self, x: Tensor, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B, Q, S, D], tokens [B, Q], mask [B, Q]: 0 for padding -> [B, Q, S, D]."""
        if mask is not None:
            tokens = torch.where(mask, tokens, END)
        with torch.no_grad():
            return self.theirs(x.flatten(2), tokens, None, mask).view_as(x)

    def allocate(self, batch: int, length: int = 320):
        return self.ours.allocate(batch, length, torch.empty(0))

    def step(self, x: Tensor, tokens: Tensor, positions: Tensor, last: Tensor | None = None):
        self.ours.keep(tokens, positions)
        return self.ours(x, Context(torch.empty(0), positions=positions, last=last))

    def chunk(self, x: Tensor, tokens: Tensor, end: int, row: int = 0, last: Tensor | None = None):
        span = Chunk(torch.tensor([row]), end)
        self.ours.keep(tokens, span)
        return self.ours(x, Context(torch.empty(0), span, last=last))


def inputs(length: int, batch: int = 1, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Draw x [batch, length, S, D], and tokens of which every fifth or so ends a text."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, S, D, generator=generator)
    tokens = torch.randint(VOCAB, (batch, length), generator=generator)
    ends = torch.rand(batch, length, generator=generator) < 0.2
    return x, torch.where(ends, END, tokens)


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


# Hashes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", (0, 1234, 2**40))
@pytest.mark.parametrize("number", (0, 1, 3))
def test_hashes_are_those_of_transformers(sizes, number, seed):
    sizes = sizes._replace(seed=seed)
    config = peer_config(sizes, number + 1)
    theirs = Qwen4ExpTextNGramEmbedding(config, sizes.dim, number, number)
    ours = NgramEmbedding(Args("mixtral", **SIZES, ngrams=tuple(sizes)), number)
    ours.allocate(1, 64, torch.empty(0))
    assert torch.equal(ours.multipliers, theirs.layer_multipliers)
    assert torch.equal(ours.primes, theirs.ngram_heads_vocab_sizes)
    assert torch.equal(ours.begins, theirs.ngram_heads_offsets)
    assert ours.table.weight.shape == theirs.ngram_embedding.weight.shape


def test_published_sizes():
    """Qwen3.8-Flash-Next's table, as the header of its file says."""
    sizes = NgramSizes(3, 8, 2560, 20_000_000, 128, 1234, 248320, END, 4)
    assert (sizes.rows(0), sizes.dim // sizes.all_heads) == (320_001_536, 160)
    assert max(sizes.primes(0)) < min(sizes.primes(1))


def test_primes():
    assert head_primes(0, 6, 0) == (2, 3, 5, 7, 11, 13)
    assert head_primes(7, 2, 1) == (13, 17)


def test_an_n_gram_ends_where_a_text_ends():
    """The nearest token comes first."""
    ids = torch.tensor([[1, 2, 3, 4], [1, 9, 3, 4], [9, 2, 9, 4], [9, 9, 9, 9]])
    found = within_segment(ids, 9)
    assert found.tolist() == [[1, 2, 3, 4], [1, 9, 9, 9], [9, 2, 9, 9], [9, 9, 9, 9]]


def test_no_product_exceeds_63_bits():
    """A remainder of a negative hash would be another one in C."""
    sizes = NgramSizes(3, 1, 4, 20_000_000, 128, 1234, 248320, END, 4)
    layer = NgramEmbedding(Args("mixtral", **SIZES, ngrams=tuple(sizes._replace(base=11))), 0)
    layer.allocate(1, 64, torch.empty(0))
    ids = torch.full((1, 3), 248319)
    assert (ids * layer.multipliers > 0).all()
    exact = [248319 * m for m in layer.multipliers.tolist()]
    want = [(exact[0] ^ exact[1]) % 11, (exact[0] ^ exact[1] ^ exact[2]) % 13 + 11]
    assert ngram_rows(ids, layer.multipliers, layer.primes, layer.begins).tolist() == [want]


# The layer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", (0, 2))
@pytest.mark.parametrize("length", (1, 2, 3, 40, 150))
def test_a_prompt(sizes, number, length):
    peers, (x, tokens) = Peers(sizes, number), inputs(length)
    peers.allocate(1)
    assert_close(peers.chunk(x, tokens, length), peers.expect(x, tokens))


@pytest.mark.parametrize("parts", ((1,) * 20, (2, 1, 5, 30), (149,), (64, 64)))
def test_a_prompt_in_chunks(sizes, parts):
    x, tokens = inputs(150)
    peers, end, found = Peers(sizes), 0, []
    peers.allocate(2)
    for count in (*parts, 150 - sum(parts)):
        end += count
        own = slice(end - count, end)
        found.append(peers.chunk(x[:, own], tokens[:, own], end, row=1))
    assert_close(torch.cat(found, dim=1), peers.expect(x, tokens))


@pytest.mark.parametrize("queries", (1, 3, 16))
def test_steps_of_one_token_and_of_several(sizes, queries):
    """Longer than the convolution's ring."""
    x, tokens = inputs(200)
    peers, found = Peers(sizes), []
    state = peers.allocate(1)
    assert isinstance(state.states[1], Ring) and isinstance(state.states[1], ConvCache)
    for at in torch.arange(200).split(queries):
        found.append(peers.step(x[:, at], tokens[:, at], at.unsqueeze(0)))
    assert_close(torch.cat(found, dim=1), peers.expect(x, tokens))


@pytest.mark.parametrize("queries", (1, 4))
def test_padded_batches(sizes, queries):
    """Transformers pads at the left, and we at the right."""
    lengths = torch.tensor([30, 17, 2])
    x, tokens = inputs(38, 3)
    mask = torch.arange(38) >= 30 - lengths.unsqueeze(1)
    peers = Peers(sizes)
    want = peers.expect(x, tokens, mask)
    peers.allocate(3)
    index = (torch.arange(30) + 30 - lengths.unsqueeze(1)) % 38
    rows = torch.arange(3).unsqueeze(1)
    got = peers.step(
        x[rows, index], tokens[rows, index], torch.arange(30).expand(3, -1), lengths - 1
    )
    for row, n in enumerate(lengths.tolist()):
        assert_close(got[row, :n], want[row, 30 - n : 30])
    for at in range(30, 38, queries):
        own, positions = slice(at, at + queries), torch.arange(at, at + queries) - 30
        got = peers.step(x[:, own], tokens[:, own], lengths.unsqueeze(1) + positions)
        assert_close(got, want[:, own])


@pytest.mark.parametrize("accepted", (1, 2, 5, 8))
def test_refused_drafts_leave_no_trace(sizes, accepted):
    (x, tokens), (other_x, others) = inputs(60), inputs(60, seed=2)
    peers = Peers(sizes)
    peers.allocate(1)
    peers.chunk(x[:, :40], tokens[:, :40], 40)
    kept = torch.arange(40, 48) < 40 + accepted
    drafts = torch.where(kept, tokens[:, 40:48], others[:, 40:48])
    states = torch.where(kept[:, None, None], x[:, 40:48], other_x[:, 40:48])
    peers.step(states, drafts, torch.arange(40, 48).unsqueeze(0))
    found = []
    for at in range(40 + accepted, 60):
        own = slice(at, at + 1)
        found.append(peers.step(x[:, own], tokens[:, own], torch.tensor([[at]])))
    assert_close(torch.cat(found, dim=1), peers.expect(x, tokens)[:, 40 + accepted :])


def test_idle_rows_and_padding_are_not_taken_in(sizes):
    peers, (x, tokens) = Peers(sizes), inputs(50, 2)
    state = peers.allocate(2)
    for row in range(2):
        peers.chunk(x[row : row + 1], tokens[row : row + 1], 50, row, torch.tensor([47]))
    before = [view.clone() for view in state.row(1)]
    positions = torch.tensor([[48], [319]])
    peers.step(x[:, 48:49], tokens[:, 48:49], positions, torch.tensor([0, -1]))
    (ids, ring), (old_ids, old_ring) = state.row(1), before
    assert torch.equal(ring, old_ring) and torch.equal(ids[..., :48, :], old_ids[..., :48, :])
    got = peers.step(x[:, 48:], tokens[:, 48:], torch.tensor([[48, 49]] * 2))
    assert_close(got, peers.expect(x, tokens)[:, 48:])


def test_a_row_is_copied_with_its_ids(sizes):
    """As a prefix that another row takes over."""
    peers, (x, tokens) = Peers(sizes), inputs(50)
    state = peers.allocate(2)
    peers.chunk(x[:, :40], tokens[:, :40], 40)
    for one, other in zip(state.row(0), state.row(1), strict=True):
        other[..., :40, :] = one[..., :40, :]
    assert_close(peers.chunk(x[:, 40:], tokens[:, 40:], 50, 1), peers.expect(x, tokens)[:, 40:])
    state.reset(1)
    assert not any(view.any() for view in state.row(1))
    assert_close(peers.chunk(x, tokens, 50, 1), peers.expect(x, tokens))


def test_a_used_row_begins_another_sequence(sizes):
    peers, (x, tokens) = Peers(sizes), inputs(300)
    peers.allocate(1)
    peers.chunk(x, tokens, 300)
    x, tokens = inputs(20, seed=2)
    parts = [peers.chunk(x[:, :9], tokens[:, :9], 9)]
    for at in range(9, 20):
        own = slice(at, at + 1)
        parts.append(peers.step(x[:, own], tokens[:, own], torch.tensor([[at]])))
    assert_close(torch.cat(parts, dim=1), peers.expect(x, tokens))


def test_a_token_that_is_none_is_looked_up_as_0(sizes):
    """The host reads a step later that no logit was finite."""
    peers, (x, tokens) = Peers(sizes), inputs(5)
    peers.allocate(1)
    tokens[0, 3] = 0
    want = peers.expect(x, tokens)
    tokens[0, 3] = -1
    assert_close(peers.chunk(x, tokens, 5), want)


def test_compiled_code_unpacks_fp8_by_its_bits(monkeypatch):
    """Every finite e4m3 number, in the order of its code."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes).view(4, 64)  # 0x7F and 0xFF are NaN
    for group in (16, 32):
        words = bytes_to_words(codes, group)
        parts = {"codes": words, "scale": torch.rand(4, 1) + 0.5}
        plain = FORMATS["fp8"].unpack(parts, group)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert torch.equal(FORMATS["fp8"].unpack(parts, group), plain)
        monkeypatch.undo()
        want = codes.view(torch.float8_e4m3fn).float() * parts["scale"]
        assert torch.equal(plain, want)


@pytest.mark.slow
def test_compiled_steps_are_the_eager_ones():
    (x, tokens), found = inputs(61), []
    for compiled in (False, True):
        peers = Peers(TRIPLES)
        peers.allocate(1)
        peers.chunk(x[:, :50], tokens[:, :50], 50)
        if compiled:
            torch.compiler.reset()
            peers.step = torch.compile(peers.step, fullgraph=True, dynamic=False)
        parts = []
        for begin, end in ((50, 54), (52, 56), (55, 56), (56, 57), (57, 58)):
            own, positions = slice(begin, end), torch.arange(begin, end).unsqueeze(0)
            parts.append(peers.step(x[:, own], tokens[:, own], positions))
        found.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


# The table ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ("fp8", "int8", "int4"))
def test_a_packed_table(format):
    """The rows that are looked up are those of the unpacked table."""
    peers, (x, tokens) = Peers(TRIPLES._replace(dim=128)), inputs(30)
    table = peers.ours.table
    group = FORMATS[format].default_group(32)
    packed = PackedLinear(table, format, group)
    for name, part in FORMATS[format].pack(table.weight, group).items():
        setattr(packed, name, torch.nn.Parameter(part, requires_grad=False))
    weight = peers.theirs.ple_embedding.ngram_embedding.weight
    weight.data.copy_(packed.unpack())
    assert not torch.equal(weight, table.weight)
    peers.ours.table = packed
    peers.allocate(1)
    assert_close(peers.chunk(x, tokens, 30), peers.expect(x, tokens))


def test_a_table_in_fp8_without_its_scale_is_refused(make_family, tmp_path):
    source = make_family("qwen4_exp").hf_directory
    index = json.loads((source / "model.safetensors.index.json").read_text())
    for file in {*index["weight_map"].values()}:
        tensors = load_file(source / file)
        for name in [name for name in tensors if ".shard_" in name]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    with pytest.raises(ValueError, match=r"shard_0\.weight \[102, 32\] .*fetch the original"):
        convert(tmp_path, progress=False)


# Host memory --------------------------------------------------------------------------------------


class Runtime:
    """Stands for CUDA's runtime."""

    def __init__(self, error: int = 0):
        self.error, self.registered = error, {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        del self.registered[address]


def test_a_table_is_registered_while_its_module_lives(monkeypatch):
    runtime, weight = Runtime(), torch.randn(50, 4)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr("runtime.host_memory.device_view", lambda host, device: host)
    owner = torch.nn.Module()
    found = in_host_memory(weight, owner, torch.device("cpu"))
    assert torch.equal(found, weight) and found.data_ptr() != weight.data_ptr()
    assert runtime.registered == {found.data_ptr(): weight.nbytes}
    del owner
    assert not runtime.registered


def test_a_table_that_host_memory_cannot_hold_is_refused(monkeypatch):
    weight, owner, cpu = torch.empty(1000, 1000), torch.nn.Module(), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    with pytest.raises(Shortage, match="cannot be registered with CUDA: raise ulimit -l"):
        in_host_memory(weight, owner, cpu)
    monkeypatch.setattr("runtime.host_memory.free_host_memory", lambda: 10**6)
    with pytest.raises(Shortage, match=r"host memory, of which 0\.0 GB are free"):
        in_host_memory(weight, owner, cpu)


def test_registered_memory_is_a_tensor_of_the_gpu_at_its_address():
    """NumPy's interface has the same fields, and a CPU to try it with."""
    host = torch.arange(12, dtype=torch.int32)
    fields = Registered(host.view(torch.uint8)).__cuda_array_interface__
    holder = SimpleNamespace(__array_interface__=fields, host=host)
    found = torch.as_tensor(numpy.asarray(holder))
    assert torch.equal(found.view(torch.int32), host) and found.data_ptr() == host.data_ptr()


def test_the_bytes_of_weights_leave_the_table_out(make_family):
    model = load_model(make_family("qwen4_exp").directory, "cpu")
    table = model.layers[1].ngrams.table.weight
    everything = sum(p.nbytes for p in model.parameters())
    assert weight_bytes(model, torch.float32) == everything - table.nbytes
    model.host_modules = ()
    assert weight_bytes(model, torch.float32) == everything
    assert bytes_per_token(model) > table.nbytes
