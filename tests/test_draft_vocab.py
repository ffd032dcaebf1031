"""Drafts over a part of the vocabulary: which ids, the head's rows, and the text that results."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import tokenizers
import torch
from test_speculate import GREEDY, PROMPT, chi_square, exact_answers, small_model

from formats import FORMATS, PLAIN
from formats.packed import PackedLinear
from generate import EMBEDDED, embedded_checkpoint, load_model
from model import Linear
from runtime.draft_vocab import part_of_head, rows_of_ids, spread_logits
from runtime.sampling import Sampling
from runtime.session import Session
from runtime.speculation import Speculation
from tokenizer import load_tokenizer

V, D = 256, 256
IDS = [n for n in range(V) if n % 3 == 1]
WHOLE_ROWS = [name for name, format in FORMATS.items() if name != "fp8b"]


def make_head(format: str, bias: bool = False):
    """Return a head of random weights in a format."""
    generator = torch.Generator().manual_seed(0)
    head = Linear(D, V, bias)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if format == PLAIN:
        return head
    packed = PackedLinear(head, format, FORMATS[format].choose_group(D, FORMATS[format].group))
    for name, part in FORMATS[format].pack(head.weight, packed.group).items():
        getattr(packed, name).copy_(part)
    if bias:
        packed.bias.copy_(head.bias)
    return packed


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("format", (PLAIN, *WHOLE_ROWS))
def test_the_part_has_the_heads_logits_and_the_others_are_impossible(format, bias):
    head = make_head(format, bias)
    before = {name: part.clone() for name, part in head.named_parameters()}
    part, rows = part_of_head(head, IDS, V), rows_of_ids(IDS, V, torch.device("cpu"))
    assert type(part) is type(head)
    x = torch.randn(3, D, generator=torch.Generator().manual_seed(1))
    whole, found = head(x), spread_logits(part(x), rows)
    torch.testing.assert_close(found[:, IDS], whole[:, IDS])
    others = [n for n in range(V) if n not in IDS]
    assert (found[:, others] == float("-inf")).all()
    torch.testing.assert_close(found.softmax(-1).sum(-1), torch.ones(3))
    for name, parameter in head.named_parameters():  # the head itself is as it was
        assert torch.equal(parameter, before[name])
    size = sum(p.nbytes for p in part.parameters())
    assert size == sum(p.nbytes for p in head.parameters()) * len(IDS) // V


def test_a_head_that_cannot_be_cut_is_kept():
    head = make_head("fp8b")
    assert part_of_head(head, IDS, V) is head
    plain = make_head(PLAIN)
    assert part_of_head(plain, list(range(V)), V) is plain


# Ids ----------------------------------------------------------------------------------------------


def save_json(tmp_path, model) -> None:
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def test_merges_rank_the_tokens_of_byte_pair_encoding(tmp_path):
    """The ids are in another order than the merges."""
    vocab = {"a": 0, "b": 1, "c": 2, "cab": 3, "ca": 4, "ab": 5}
    save_json(tmp_path, tokenizers.models.BPE(vocab, [("a", "b"), ("c", "a"), ("ca", "b")]))
    tokenizer = load_tokenizer(tmp_path)
    end = tokenizer.token_id("<end>")
    assert tokenizer.frequent_ids(4) == sorted([end, 0, 1, 2])
    assert tokenizer.frequent_ids(5) == sorted([end, 0, 1, 2, 5])
    assert tokenizer.frequent_ids(6) == sorted([end, 0, 1, 2, 5, 4])
    assert tokenizer.frequent_ids(99) == list(range(7))


def test_scores_rank_the_tokens_of_a_unigram_vocabulary(tmp_path):
    save_json(tmp_path, tokenizers.models.Unigram([("a", -3.0), ("b", -1.0), ("ab", -2.0)], 0))
    tokenizer = load_tokenizer(tmp_path)
    end = tokenizer.token_id("<end>")
    assert tokenizer.frequent_ids(3) == sorted([end, 1, 2])


@pytest.mark.slow
def test_the_embedded_vocabulary_covers_its_own_text_better_than_a_part_of_rare_ids():
    """SentencePiece: half of the ids make nearly all of the held-out text."""
    tokenizer = load_tokenizer(embedded_checkpoint())
    ids = tokenizer.encode((EMBEDDED / "heldout.txt").read_text())
    half = tokenizer.frequent_ids(tokenizer.vocab_size // 2)
    assert len(half) == tokenizer.vocab_size // 2 and set(tokenizer.stop_ids) <= set(half)
    kept = set(half)
    assert sum(id in kept for id in ids) > 0.8 * len(ids)


# Text ---------------------------------------------------------------------------------------------


def test_greedy_text_is_exact(make_family):
    directory = make_family("mixtral").directory
    target, draft = load_model(directory, "cpu"), load_model(directory, "cpu")
    expected = list(Session(load_model(directory, "cpu"), 128).stream(PROMPT, 40, GREEDY))
    speculation = Speculation(Session(target, 128), 4, draft, draft_ids=range(0, 160, 2))
    assert list(speculation.stream(PROMPT, 40, GREEDY)) == expected
    assert 0 < speculation.accepted < speculation.drafted
    assert all(token % 2 == 0 for token in speculation.drafter.drafts[0].tolist())


@pytest.mark.slow
def test_sampled_text_keeps_its_distribution():
    """500 answers of 3 tokens, with drafts from half of the vocabulary."""
    sampling, total, ids = Sampling(0.35, top_k=3, repetition_penalty=1.2), 500, [0, 1, 2, 3, 2]
    model, draft = small_model(0), small_model(1)
    expected = exact_answers(model, ids, 3, sampling)
    speculation = Speculation(Session(model, 32), 2, draft, draft_ids=[0, 2, 5, 7])
    found: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(total):
        found[tuple(speculation.stream(ids, 3, replace(sampling, seed=seed)))] += 1
        accepted += speculation.accepted
        q = speculation.drafter.q
        assert (q[:, [1, 3, 4, 6]] == 0).all()
    assert accepted > 0
    assert chi_square(found, expected, total) <= 1
