"""Reasoning blocks: split off by markers, in the library, the terminal and the server."""

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import AddedToken

from cli.answer_printer import AnswerPrinter
from generate import chat, generate, print_text
from runtime import reasoning
from runtime.reasoning import ANSWER, HARMONY, REASONING, make_splitter
from runtime.sampling import Sampling
from runtime.text import TextSettings, TextStream
from server.answers import Finished, ResponseBuilder
from server.clients import AnswerWriter, Client, QueuedRequest
from server.plan import Generation, GenerationRequest
from server.schema import ChatCompletionBody, CompletionBody
from tokenizer import Tokenizer, load_tokenizer

THINK = "<think>", "</think>"
# A template that opens the block, as GLM's and newer Qwen's; {} is what it ends with.
TEMPLATE = "{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}<|end|>{}"
EOS = "<|return|>"


def make_tokenizer(directory, markers=(), special=False, template="") -> Tokenizer:
    """A byte-level tokenizer whose only longer tokens are markers; EOS and <|end|> are special."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: n for n, letter in enumerate(alphabet)}, [])
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens([AddedToken(name, special=True) for name in (EOS, "<|end|>")])
    library.add_tokens([AddedToken(name, special=special) for name in markers])
    library.save(str(directory / "tokenizer.json"))
    config = {"eos_token": EOS, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(directory)


class Scripted:
    """A session that answers with given tokens."""

    prefilled = 0
    model, watch, max_seq_len = None, False, 4096

    def __init__(self, ids):
        self.script, self.ids = ids, [[]]

    def stream_all(self, prompts, max_new_tokens, sampling) -> Iterator[list[int]]:
        for id in self.script[:max_new_tokens]:
            self.ids[0].append(id)
            yield [id]


@pytest.fixture(autouse=True)
def without_weights(monkeypatch):
    monkeypatch.setattr("generate.expert_counters", lambda model: None)
    statistics = {"bytes_per_token": 1, "peak_bytes": 1}
    monkeypatch.setattr("generate.weight_statistics", lambda session: statistics)
    monkeypatch.setattr("parallel.process_group.check_same_tokens", lambda ids: None)


def ask(tokenizer, prompt: str, answer: str, count=1000, **options) -> tuple[dict, list]:
    """Return the result for a scripted answer, and the pieces as they came."""
    pieces: list[tuple[str, str]] = []
    ids = tokenizer.encode(answer, special=True)
    result = generate(
        Scripted(ids),
        tokenizer,
        tokenizer.encode(prompt, special=True),
        count,
        on_text=lambda piece: pieces.append((ANSWER, piece)),
        on_reasoning=lambda piece: pieces.append((REASONING, piece)),
        **options,
    )
    for kind, text in ((ANSWER, result["text"]), (REASONING, result.get("reasoning", ""))):
        assert "".join(piece for k, piece in pieces if k == kind) == text
    return result, [pair for pair in pieces if pair[1]]


def parts(result: dict) -> tuple[str, str]:
    return result["reasoning"], result["text"]


@pytest.fixture(params=("added", "special", "text"))
def thinker(request, tmp_path) -> Tokenizer:
    """<think> as an added token, as a special token, and as text."""
    markers = () if request.param == "text" else THINK
    return make_tokenizer(
        tmp_path, markers, request.param == "special", TEMPLATE.format("<think></think>")
    )


# <think> ------------------------------------------------------------------------------------------


def test_a_block_is_split_off(thinker):
    result, pieces = ask(thinker, "why?", f"\n<think>\nas é <b> </thin>\n</think>\n\nYes.{EOS}")
    assert parts(result) == ("as é <b> </thin>\n", "Yes.")
    assert result["finish_reason"] == "stop"
    kinds = [kind for kind, _ in pieces]
    assert kinds == sorted(kinds, reverse=True) and kinds.count(ANSWER) == 4
    assert "é" in [text for _, text in pieces]


@pytest.mark.parametrize("end", ("<think>", "<think>\n"))
def test_a_template_may_open_the_block(thinker, end):
    result, _ = ask(thinker, f"why?<|end|>{end}", f"so </think>Yes <think>.{EOS}")
    special = thinker.token_id("<think>") is not None and not thinker.token_bytes(
        thinker.token_id("<think>")
    )
    assert parts(result) == ("so ", "Yes ." if special else "Yes <think>.")


@pytest.mark.parametrize("prompt", ("why?", "why?<|end|><think></think>"))
def test_a_closing_marker_alone_is_an_empty_block(thinker, prompt):
    """Laguna's and GLM's templates write it before an answer without reasoning."""
    result, _ = ask(thinker, prompt, f"\n</think>\nYes </think>.{EOS}")
    id = thinker.token_id("</think>")
    special = id is not None and not thinker.token_bytes(id)
    assert parts(result) == ("", "Yes ." if special else "Yes </think>.")
    assert parts(ask(thinker, prompt, f"</b>{EOS}")[0]) == ("", "</b>")


@pytest.mark.parametrize("prompt", ("why?", "why?<|end|><think></think>", "a <think> b<|end|>"))
def test_an_answer_without_a_block(thinker, prompt):
    result, _ = ask(thinker, prompt, f" \nYes < no.{EOS}")
    assert parts(result) == ("", " \nYes < no.") and result["reasoning_tokens"] == 0


@pytest.mark.parametrize("count", range(1, 12))
def test_a_block_may_be_cut_by_the_length(thinker, count):
    ids = thinker.encode("<think>so it", special=True)[:count]
    text = "".join(map(thinker.stream().push, ids)) if thinker.token_id("<think>") is None else None
    result, _ = ask(thinker, "why?", "<think>so it", count)
    assert result["finish_reason"] == "length"
    if text is None:
        assert parts(result) == ("so it"[: count - 1], "")
    elif count < len("<think>"):
        assert parts(result) == ("", text)  # it never became a marker
    else:
        assert parts(result) == (text.removeprefix("<think>"), "")


def test_white_space_alone_is_the_answer(thinker):
    assert parts(ask(thinker, "why?", f" \n{EOS}")[0]) == ("", " \n")


def test_stop_texts_are_of_the_answer(thinker):
    answer = f"<think>one STOP two</think>three STOP four{EOS}"
    result, _ = ask(thinker, "why?", answer, stop=["STOP"])
    assert parts(result) == ("one STOP two", "three ") and result["finish_reason"] == "stop"


@pytest.mark.parametrize("end", (EOS, ""))
def test_a_stop_text_may_be_white_space_that_is_held_back(thinker, end):
    for answer in ("\n\n", "<think>so</think>\n\n", "<think>so</think>Yes.\n\n"):
        result, pieces = ask(thinker, "why?", answer + end, stop=["\n\n"])
        assert result["text"] == "".join(t for kind, t in pieces if kind == ANSWER)
        assert "\n" not in result["text"] and result["finish_reason"] in ("stop", "length")


def test_nothing_follows_a_stop_text(tmp_path):
    """White space of the token that has the stop text is held back, for ERNIE's closing tag."""
    tokenizer = make_tokenizer(tmp_path, (*TAGGED, "STOP \n"))
    result, pieces = ask(tokenizer, "why?", f"<response>Yes. STOP \nNo.{EOS}", stop=["STOP"])
    assert result["text"] == "".join(text for _, text in pieces) == "Yes. "


def test_a_spelled_marker_is_text(tmp_path):
    """With tokens of their own, markers are those alone."""
    tokenizer = make_tokenizer(tmp_path, THINK)
    letters = [tokenizer.encode(letter)[0] for letter in "<think>a</think>b"]
    settings = TextSettings((), False, True, print, lambda *_: None, print)
    stream = TextStream([], tokenizer, settings)
    for id in letters:
        stream.push(id)
    stream.end("length")
    assert (stream.reasoning, stream.text) == ("", "<think>a</think>b")


def test_tokens_are_counted(tmp_path):
    tokenizer = make_tokenizer(tmp_path, THINK)
    assert ask(tokenizer, "", f"<think>abc</think>de{EOS}")[0]["reasoning_tokens"] == 5
    assert ask(tokenizer, "<think>", f"abc</think>de{EOS}")[0]["reasoning_tokens"] == 4


def test_models_without_blocks_are_not_split(tmp_path):
    tokenizer = make_tokenizer(tmp_path, template=TEMPLATE.format(""))
    assert make_splitter(tokenizer, []) is None
    result, _ = ask(tokenizer, "", f"<think>a</think>b{EOS}")
    assert result["text"] == "<think>a</think>b" and "reasoning" not in result


def test_an_incomplete_character_before_a_marker_stays_in_its_part(tmp_path):
    tokenizer = make_tokenizer(tmp_path, THINK)
    ids = [*tokenizer.encode("<think>a€"), tokenizer.token_id("</think>"), *tokenizer.encode("b")]
    del ids[4]  # the last byte of the character
    splitter, stream, found = make_splitter(tokenizer, []), tokenizer.stream(), []
    for id in ids:
        found += splitter.push(id, stream.push(id))
    assert found == [(REASONING, "a"), (REASONING, "\ufffd"), (ANSWER, "b")]


TAGGED = *THINK, "<response>", "</response>"


@pytest.mark.parametrize("special", (True, False))
@pytest.mark.parametrize(
    ("prompt", "answer", "want"),
    (
        (
            "<think>",
            "so\n</think>\n\n<response>\nYes.\n\nNo.\n</response>\n",
            ("so\n", "Yes.\n\nNo."),
        ),
        ("<think>", "so</think>\n\nYes.\n", ("so", "Yes.\n")),
        ("<think>", "so</think><response>\nYes.\n", ("so", "Yes.\n")),
        ("<think>", "so</think><response></response>", ("so", "")),
        ("<think>", "so</think><response> Yes.</response>\n No.", ("so", "Yes.No.")),
        ("<think>", "so", ("so", "")),
        ("", "<response>\nYes. é\n</response>\n", ("", "Yes. é")),
        ("", "<think>so</think><response>a b", ("so", "a b")),
        ("", "Yes.", ("", "Yes.")),
    ),
)
def test_tags_of_the_answer_are_dropped(tmp_path, special, prompt, answer, want):
    """ERNIE 4.5 Thinking."""
    tokenizer = make_tokenizer(tmp_path, TAGGED, special)
    for end in ("", EOS):
        assert parts(ask(tokenizer, f"why?{prompt}", answer + end)[0]) == want


# Harmony ------------------------------------------------------------------------------------------

ASKED = "<|start|>user<|message|>why?<|end|><|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>so it <|end|>"
TOOL = ANALYSIS.replace("analysis", "commentary to=f")
HEADER = "<|start|>assistant<|channel|>final"
FINAL = f"{HEADER}<|message|>Yes."


@pytest.fixture
def harmony(tmp_path) -> Tokenizer:
    return make_tokenizer(tmp_path, [name for name in HARMONY if name != "<|end|>"], special=True)


@pytest.mark.parametrize(
    ("prompt", "answer", "want"),
    (
        (ASKED, ANALYSIS + FINAL + EOS, ("so it ", "Yes.")),
        (ASKED, ANALYSIS + TOOL + FINAL, ("so it so it ", "Yes.")),
        (ASKED, FINAL.removeprefix("<|start|>assistant"), ("", "Yes.")),
        (f"{ASKED}<|channel|>final<|message|>", "Yes.", ("", "Yes.")),
        (f"{ASKED}<|channel|>analysis<|message|>", f"so <|end|>{FINAL}", ("so ", "Yes.")),
        (ASKED, "<|channel|>analysis<|message|>cut", ("cut", "")),
        (ASKED, f"{ANALYSIS}<|start|>assistant<|channel|>fin", ("so it ", "")),
        (ASKED, "<|message|>Yes.", ("", "Yes.")),
    ),
)
def test_harmony_channels(harmony, prompt, answer, want):
    assert parts(ask(harmony, prompt, answer)[0]) == want


def test_harmony_counts_and_ignores_spelled_markers(harmony):
    result, _ = ask(harmony, ASKED, ANALYSIS + FINAL + EOS)
    assert result["reasoning_tokens"] == len("so it ") + 2
    stream = harmony.stream()
    splitter = make_splitter(harmony, harmony.encode(ASKED, special=True))
    ids = harmony.encode("<|channel|>final<|message|>", special=True)
    ids += harmony.encode("a <|end|>")
    found = [text for id in ids for _, text in splitter.push(id, stream.push(id))]
    assert "".join(found) == "a <|end|>"


@pytest.mark.parametrize(
    ("answer", "want"),
    (
        (f"{ANALYSIS}{HEADER}<|constrain|>json<|message|>{{}}", ("so it ", "{}")),
        (f"{ANALYSIS}{HEADER} <|constrain|>json<|message|>{{}}", ("so it ", "{}")),
        ("<|channel|>final <|constrain|> json <|message|>{}", ("", "{}")),
        ("<|constrain|>json<|message|>{}", ("", "{}")),
        ("Yes.", ("", "Yes.")),
        (" Yes.", ("", "Yes.")),
        ("to be", ("", "to be")),
        ("to", ("", "to")),
        (f"{ANALYSIS}<|start|>assistantYes.<|end|>", ("so it ", "Yes.")),
        (f"{ANALYSIS}Yes.", ("so it ", "Yes.")),
        (f"{ANALYSIS}<|start|>assistant<|message|>Yes.", ("so it ", "Yes.")),
        (f"{ANALYSIS}<|start|>assist", ("so it ", "")),
        (f"{ANALYSIS}<|start|>assistant to=functions.f<|channel|>commentary", ("so it ", "")),
        (f"{ANALYSIS}{ANALYSIS}{FINAL}<|end|>{ANALYSIS}", ("so it so it so it ", "Yes.")),
        ("<|channel|>analysis<|message|>so <|channel|>final<|message|>Yes.", ("so ", "Yes.")),
        ("<|channel|>analysis<|message|>so <|start|>assistant<|message|>Yes.", ("so ", "Yes.")),
        ("<|channel|>analysis<|channel|>final<|message|>Yes.", ("", "Yes.")),
        ("", ("", "")),
    ),
)
def test_harmony_headers_of_any_kind(tmp_path, answer, want):
    names = [name for name in (*HARMONY, "<|constrain|>") if name != "<|end|>"]
    tokenizer = make_tokenizer(tmp_path, names, special=True)
    assert parts(ask(tokenizer, ASKED, answer)[0]) == want
    assert parts(ask(tokenizer, ASKED, answer + EOS)[0]) == want


# Gemma --------------------------------------------------------------------------------------------

GEMMA_MARKERS = "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>"
TURN = "<|turn>user\nwhy?<turn|><|turn>model\n"
THOUGHT = "<|channel>thought\nso it\n<channel|>"


@pytest.mark.parametrize("special", (True, False))
@pytest.mark.parametrize(
    ("prompt", "answer", "want"),
    (
        (TURN, f"{THOUGHT}Yes.", ("so it\n", "Yes.")),
        (TURN, f"{THOUGHT}\n\nYes.", ("so it\n", "Yes.")),
        (TURN, f"{THOUGHT}Yes.{THOUGHT} No.", ("so it\nso it\n", "Yes.No.")),
        (TURN, f"Yes.{THOUGHT}", ("so it\n", "Yes.")),
        (TURN, "<|channel>thought\n<channel|>Yes.", ("", "Yes.")),
        (TURN, "<|channel><channel|>Yes.", ("", "Yes.")),
        (TURN, "<|channel>other\nso<channel|>Yes.", ("other\nso", "Yes.")),
        (TURN, "<|channel>thoughtful<channel|>Yes.", ("thoughtful", "Yes.")),
        (TURN, "<|channel>thought\nso it", ("so it", "")),
        (TURN, "<|channel>though", ("", "")),
        (TURN, "<|channel>thought\nso<|channel>thought\nit<channel|>Yes.", ("soit", "Yes.")),
        (TURN, "Yes.<channel|>", ("", "Yes.")),
        (TURN, " \nYes.", ("", " \nYes.")),
        (TURN, "thought\nYes.", ("", "thought\nYes.")),
        (f"{TURN}<|channel>thought\n<channel|>", "Yes.", ("", "Yes.")),
        (f"{TURN}<|channel>thought\n<channel|>", f"{THOUGHT}Yes.", ("so it\n", "Yes.")),
        (f"{TURN}<|channel>thought\n", "so<channel|>Yes.", ("so", "Yes.")),
        (f"{TURN}<|channel>", "thought\nso<channel|>Yes.", ("so", "Yes.")),
        (f"{THOUGHT}x{TURN}", "Yes.", ("", "Yes.")),
    ),
)
def test_gemma_channels(tmp_path, special, prompt, answer, want):
    tokenizer = make_tokenizer(tmp_path, GEMMA_MARKERS, special)
    if special or "Yes.<channel|>" not in answer:
        assert parts(ask(tokenizer, prompt, answer)[0]) == want


@pytest.mark.parametrize("count", range(1, 40))
def test_gemma_may_be_cut_anywhere(tmp_path, count):
    tokenizer = make_tokenizer(tmp_path, GEMMA_MARKERS, special=True)
    result, _ = ask(tokenizer, TURN, f"{THOUGHT}Yes.", count)
    assert "so it\n".startswith(result["reasoning"]) and "Yes.".startswith(result["text"])
    assert not result["text"] or result["reasoning"] == "so it\n"
    spelled = [id for letter in f"{THOUGHT}Yes." for id in tokenizer.encode(letter)][:count]
    stream = TextStream([], tokenizer, TextSettings((), False, True, print, print, print))
    for id in spelled:
        stream.push(id)
    stream.end("length")
    assert (stream.reasoning, stream.text) == ("", f"{THOUGHT}Yes."[:count])


def test_a_call_ends_a_thought_that_was_not_closed(tmp_path):
    tokenizer = make_tokenizer(tmp_path, GEMMA_MARKERS, special=True)
    splitter = make_splitter(tokenizer, tokenizer.encode(TURN, special=True))
    found = []
    for id in tokenizer.encode("<|channel>thought\nso<|tool_call>call:f{}", special=True):
        text = "CALL" if id == tokenizer.token_id("<|tool_call>") else tokenizer.decode([id])
        found += splitter.push(id, text)
    texts = {kind: "".join(t for k, t in found if k == kind) for kind in (REASONING, ANSWER)}
    assert texts == {REASONING: "so", ANSWER: "CALLcall:f{}"}


# Terminal -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", (False, True))
def test_no_answer_drives_a_terminal(monkeypatch, capsys, terminal):
    """A document that the model repeats could write the clipboard. Elsewhere a text stays exact."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    text = "a\x1b]52;c;eA==\x07\t\u0645\u200c\r\n\x9b2J\x7f\x00"
    want = "a\\x1b]52;c;eA==\\x07\t\u0645\u200c\\r\n\\x9b2J\\x7f\\x00" if terminal else text
    printer = AnswerPrinter(print)
    printer.answer(text)
    print_text(text, "|", sys.stdout)
    assert capsys.readouterr().out == f"{want}{want}|"
    assert printer.text == text


@pytest.mark.parametrize("terminal", (False, True))
def test_reasoning_is_folded_on_a_terminal_and_hidden_elsewhere(monkeypatch, capsys, terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    printer = AnswerPrinter(print)
    printer.reasoning("so")
    printer.answer("")
    printer.answer("Y")
    printer.answer("es")
    out, err = capsys.readouterr()
    line = "reasoning, 1 token: /reasoning shows it"
    if not terminal:
        assert (out, err) == ("Yes", line + "\n")
        return
    clear = "\r\x1b[K"
    assert out == f"{clear}\x1b[2mreasoning, 1 token ...\x1b[0m{clear}\x1b[2m{line}\x1b[0m\nYes"


def test_the_next_turn_has_the_answer_alone(tmp_path, monkeypatch, capsys):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}<think>"
    tokenizer = make_tokenizer(tmp_path, THINK, template=template)
    session, prompts = Scripted(tokenizer.encode(f"so</think>\n\nYes.{EOS}", special=True)), []
    stream_all = session.stream_all

    def recorded(ids, *arguments):
        prompts.append(tokenizer.decode(ids[0]))
        return stream_all(ids, *arguments)

    monkeypatch.setattr(session, "stream_all", recorded)
    monkeypatch.setattr("generate.read_requests", lambda last: iter([("", "a"), ("", "b")]))
    options = SimpleNamespace(system=None, max_new_tokens=100, stop=["o"], ignore_eos=False)
    chat(session, tokenizer, options, Sampling())
    assert prompts == ["[a]<think>", "[a][Yes.][b]<think>"]
    assert capsys.readouterr().out == "Yes.\n" * 2


# Server -------------------------------------------------------------------------------------------


def serve(tokenizer, prompt: str, answer: str, chat=True, **fields) -> list:
    """Return what the server sends for a scripted answer: events, then the ResponseBuilder."""
    body: ChatCompletionBody | CompletionBody = CompletionBody(prompt=prompt, **fields)
    if chat:
        messages = [{"role": "user", "content": prompt}]
        body = ChatCompletionBody(messages=messages, **fields)
    ids = tokenizer.encode(prompt, special=True)
    generation = Generation(ids, 1000, Sampling(), body.stop, chat, False)
    request, events = GenerationRequest(body, [generation]), []
    session = Scripted(tokenizer.encode(answer, special=True))
    writer = AnswerWriter(Client(QueuedRequest(request, events.append), 0))
    result = generate(
        session,
        tokenizer,
        ids,
        1000,
        stop=body.stop,
        reply=chat,
        on_text=writer.write,
        on_token=writer.add_token,
        on_reasoning=writer.write_reasoning if chat else None,
    )
    done = Finished(result | {"cached_tokens": 0}, writer.rest(result))
    return [*events, done, ResponseBuilder(request, "tiny", tokenizer)]


def test_a_message_has_its_reasoning_apart(tmp_path):
    tokenizer = make_tokenizer(tmp_path, THINK)
    *events, done, builder = serve(tokenizer, "why?<think>", f"so</think>\nYes.{EOS}")
    answer = builder.completion([done])
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "so") and not events
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_a_message_without_reasoning_is_as_before(tmp_path):
    tokenizer = make_tokenizer(tmp_path, THINK)
    *_, done, builder = serve(tokenizer, "why?", f"Yes.{EOS}")
    answer = builder.completion([done])
    assert answer["choices"][0]["message"].keys() == {"role", "content", "refusal"}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_stream_has_its_reasoning_apart(tmp_path):
    tokenizer = make_tokenizer(tmp_path, THINK)
    *events, done, builder = serve(tokenizer, "why?<think>", f"so</think>\nYes.{EOS}", stream=True)
    deltas = []
    for event in events:
        chunk = builder.chunk(event)
        deltas.append(json.loads(chunk.removeprefix(b"data: "))["choices"][0]["delta"])
    assert all(len(delta) == 1 for delta in deltas)
    for key, text in (("reasoning_content", "so"), ("content", "Yes.")):
        assert "".join(delta.get(key, "") for delta in deltas) == text
    assert builder.usage([done])["completion_tokens_details"]["reasoning_tokens"] == 3


def test_completions_keep_the_markers(tmp_path):
    tokenizer = make_tokenizer(tmp_path, THINK)
    *_, done, builder = serve(tokenizer, "why?", f"<think>so</think>Yes.{EOS}", chat=False)
    answer = builder.completion([done])
    assert answer["choices"][0]["text"] == "<think>so</think>Yes."
    assert "completion_tokens_details" not in answer["usage"]


def test_a_markers_beginning_is_found():
    assert reasoning.held_prefix("a <", "</think>") == 1
    assert reasoning.held_prefix("a </thin", "</think>") == 6
    assert reasoning.held_prefix("a b", "</think>") == 0
