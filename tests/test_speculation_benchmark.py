"""benchmarks/speculation.py: its tables, its options, and passes with random drafts."""

import pytest
import torch
from test_speculate import GREEDY, small_model

from benchmarks import speculation as benchmark
from generate import embedded_checkpoint
from models.random_weights import ARCHITECTURES
from runtime.batch import Batch
from runtime.draft_control import FixedDrafts
from runtime.drafting_batch import DraftingBatch
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation
from tokenizer import load_tokenizer


@pytest.mark.parametrize("acceptance", (0.0, 0.5, 0.9, 1.0))
@pytest.mark.parametrize("drafts", (0, 1, 3, 7))
def test_expected_tokens_of_a_pass(drafts, acceptance):
    """The sum over the number of accepted drafts, each with its probability."""
    chances = [acceptance**n * (1 - acceptance) for n in range(drafts)] + [acceptance**drafts]
    assert sum(chances) == pytest.approx(1)
    expected = sum((n + 1) * chance for n, chance in enumerate(chances))
    assert benchmark.expected_tokens(drafts, acceptance) == pytest.approx(expected)


def test_the_table_of_passes():
    header, plain, three = benchmark.pass_lines({3: (0.00165, 0.0014), 0: (0.001, 0.0009)})
    assert [float(word) for word in header.split()[-4:]] == list(benchmark.ACCEPTANCE)
    assert plain.split() == ["0", "1.000", "0.900", "1.00", *["1,000"] * 4]
    count, ms, graph, steps, *rates = three.split()
    assert (count, ms, graph, steps) == ("3", "1.650", "1.400", "1.65")
    assert rates[2] == f"{(1 + 0.8 + 0.64 + 0.512) / 0.00165:,.0f}"


def test_the_table_of_steps():
    one, four = (0.001, 8.0, 2_000_000_000), (0.0014, 30.5, 3_500_000_000)
    header, *rows = benchmark.step_lines({4: four, 1: one}, 4e12)
    assert header.split()[0] == "tokens" and len(rows) == 2
    assert rows[0].split() == ["1", "1.000", "1.00", "8.0", "2.000", "0.50"]
    assert rows[1].split() == ["4", "1.400", "1.40", "30.5", "3.500", "0.62"]


@pytest.mark.parametrize("drafts", (0, 1, 3))
def test_each_pass_has_the_drafts_that_are_measured(drafts):
    session = Session(small_model(0), 64)
    speculation = Speculation(session, 3)
    speculation.drafter = benchmark.RandomDrafter(session, 3)
    seconds = benchmark.pass_seconds(speculation, drafts, 20, 2, GREEDY)
    assert 0 < seconds < 1 and isinstance(speculation.control, FixedDrafts)
    assert speculation.drafted == drafts * speculation.passes
    assert speculation.delivered == 19


def test_answers_side_by_side(monkeypatch):
    """As many tokens as asked for, the same with drafts, in fewer steps."""
    monkeypatch.setattr(benchmark, "ANSWER", 20)
    session = Session(small_model(0), 64, SessionOptions(batch=3))
    prompts = [[n, 1, 2, n, 1, 2] for n in (3, 4, 5)]
    plain = benchmark.decode_side_by_side(Batch(session), prompts, GREEDY)
    drafting = DraftingBatch(Speculation(session, 3))
    found = benchmark.decode_side_by_side(drafting, prompts, GREEDY)
    assert found.tokens == plain.tokens and {len(tokens) for tokens in found.tokens} == {20}
    assert plain.steps > found.steps and plain.drafted == 0 < found.accepted <= found.drafted
    assert found.seconds > 0


def test_default_models_are_known():
    parser = benchmark.build_parser()
    options = parser.parse_args([])
    benchmark.check_options(options)
    assert {name.partition(":")[0] for name in options.arch} <= set(ARCHITECTURES)
    assert tuple(options.drafts) == tuple(range(8)) and tuple(options.tokens) == (1, 2, 4, 8, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ("--drafts 16", "--drafts: each must be from 0 to 15"),
        ("--tokens 0", "--tokens: each must be from 1 to 16"),
        ("--answers 5", "--answers: each must be from 1 to 4"),
        ("--new_tokens 1", "--new_tokens 1: it must be at least 2"),
        ("--layers 0", "--layers 0: it must be at least 1"),
        ("", "needs a CUDA GPU"),
    ),
)
def test_mistakes_are_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["speculation.py", *arguments.split()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit:
        benchmark.main()
    errors = capsys.readouterr().err
    assert exit.value.code == 2 and message in errors and errors.count("\n") == 1


def test_the_kinds_of_text():
    tokenizer = load_tokenizer(embedded_checkpoint())
    found = benchmark.texts(tokenizer)
    assert set(found) == {"held-out", "repeated", "random", "alternating"}
    longest = max(len(ids) for prompts in found.values() for ids in prompts)
    assert longest + benchmark.ANSWER < benchmark.MAX_SEQ_LEN
    repeated = found["repeated"][0]
    third = len(tokenizer.encode(benchmark.FUNCTION)) - 1
    assert repeated[1 : third // 2] == repeated[third + 1 : third + third // 2]
