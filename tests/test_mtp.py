"""Multi-token prediction: published heads are converted, and draft what transformers' layers do."""

import dataclasses
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import Family
from safetensors.torch import save_file
from test_speculate import chi_square, exact_answers, scramble, small_model
from torch import Tensor
from transformers.modeling_layers import MtpLayer

from checkpoint import Checkpoint
from formats.quantizer import plan_format, quantize
from generate import load_model
from models import args_of_checkpoint, build_model, head_args
from models.converter import convert
from models.family import APART, ONE_MORE_LAYER
from runtime.loading import load_head
from runtime.mtp import MTPDrafter
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation

GREEDY = Sampling(temperature=0)
PROMPT = [5, 17, 3, 99, 42, 8, 120, 5, 17, 3, 99, 11, 5, 17]
LAYOUTS = {
    "qwen3_next": APART,
    "qwen3_5_moe": APART,
    "glm4_moe": ONE_MORE_LAYER,
    "glm4_moe_lite": ONE_MORE_LAYER,
    "deepseek_v3": ONE_MORE_LAYER,
}
pytestmark = pytest.mark.usefixtures("few_threads")


@dataclass
class Headed:
    """A small model with a random head, published and converted."""

    family: Family
    layer: MtpLayer  # transformers' module of the head, with the same weights
    hf_directory: Path
    directory: Path

    def states(self, ids: list[int]) -> Tensor:
        """Return the target's hidden states after its last norm, [len(ids), D]."""
        return self.family.peer.model(torch.tensor([ids])).last_hidden_state[0]

    def run(self, states: Tensor, tokens: list[int]) -> Tensor:
        """Run the head over all pairs at once, without a cache -> its states, normed."""
        inputs = self.family.peer.get_input_embeddings()(torch.tensor([tokens]))
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        rope = self.family.peer.model.rotary_emb(inputs, positions)
        found = self.layer(inputs, states[None], rope, mask, positions, None)
        return found[0]

    def chain(self, ids: list[int], drafts: list[int]) -> Tensor:
        """Return the logits of a chain after the text: of each draft, given those before it."""
        states, tokens, logits = self.states(ids[:-1]), ids[1:], []
        for draft in drafts:
            own = self.run(states, tokens)[-1:]
            logits.append(self.family.peer.lm_head(own)[0])
            states, tokens = torch.cat((states, own)), [*tokens, draft]
        return torch.stack(logits)


def published_tensors(name: str, layer: MtpLayer, apart: bool) -> dict[str, Tensor]:
    """Return a head's tensors by their published names. apart: each expert has its own tensors."""
    at = LAYOUTS[name]
    prefix = at.layer.format(n=3)
    tensors = {
        at.fc.format(n=3): layer.eh_proj.weight,
        at.embedding_norm.format(n=3): layer.enorm.weight,
        at.hidden_norm.format(n=3): layer.hnorm.weight,
        at.norm.format(n=3): layer.post_norm.weight,
    }
    for leaf, value in layer.mtp_block.state_dict().items():
        if not apart or ".experts." not in leaf:
            tensors[prefix + leaf] = value
            continue
        for expert, weight in enumerate(value):
            own = f"{prefix}mlp.experts.{expert}."
            if leaf.endswith("down_proj"):
                tensors[own + "down_proj.weight"] = weight
            else:
                halves = weight.chunk(2)
                names = "gate_proj.weight", "up_proj.weight"
                tensors |= {own + n: half for n, half in zip(names, halves, strict=True)}
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def add_tensors(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Add a file with tensors to a Hugging Face directory."""
    save_file(tensors, directory / "model-mtp.safetensors")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(tensors, "model-mtp.safetensors")
    index.write_text(json.dumps(content))


def edit_config(directory: Path, **values) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module")
def make_headed(make_family, tmp_path_factory) -> Callable[..., Headed]:
    """(family, apart) -> a cached Headed; apart: as for `published_tensors`."""
    made = {}

    def make(name: str, apart: bool = False) -> Headed:
        if (name, apart) in made:
            return made[name, apart]
        family = make_family(name)
        torch.manual_seed(7)
        last = family.peer.model.layers[-1]
        norms = (type(module) for part, module in last.named_modules() if "norm" in part)
        config = family.peer.config
        layer = MtpLayer(config, type(last), next(norms), config.num_hidden_layers - 1).eval()
        with torch.no_grad():
            for part, parameter in layer.named_parameters():
                mean = parameter.mean() if "norm" in part else 0.0
                std = 0.2 if parameter.dim() > 1 else 0.1
                parameter.copy_(mean + torch.randn_like(parameter) * std)
            for part, buffer in layer.named_buffers():
                if part.endswith("e_score_correction_bias"):
                    buffer.normal_(0, 0.2)
        directory = tmp_path_factory.mktemp(f"mtp-{name}") / "hf"
        ignore = shutil.ignore_patterns("model_*")
        shutil.copytree(family.hf_directory, directory, ignore=ignore)
        add_tensors(directory, published_tensors(name, layer, apart))
        if LAYOUTS[name] is ONE_MORE_LAYER:
            edit_config(directory, num_nextn_predict_layers=1)
        converted = convert(directory, dtype="fp32", progress=False)
        made[name, apart] = Headed(family, layer, directory, converted)
        return made[name, apart]

    return make


def speculate(directory: Path, count: int, length: int = 128, **options) -> Speculation:
    """Return a Speculation by the checkpoint's head."""
    model = load_model(directory, "cpu")
    session = Session(model, length, SessionOptions(**options))
    return Speculation(session, count, head=load_head(directory, model))


@pytest.fixture(scope="module")
def plain(make_headed):
    """(ids, count, sampling, family) -> tokens of plain decoding, with an empty cache."""
    sessions = {}

    def tokens(ids, count: int, name: str, sampling: Sampling = GREEDY) -> list[int]:
        if name not in sessions:
            sessions[name] = Session(load_model(make_headed(name).directory, "cpu"), 256)
        sessions[name].reset()
        return list(sessions[name].stream(ids, count, sampling))

    return tokens


# The head -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("apart", (False, True))
def test_a_published_head_is_converted(name, apart, make_headed):
    headed = make_headed(name, apart)
    opened, reference = Checkpoint(headed.directory), Checkpoint(headed.family.directory)
    own = {n for n in opened.tensors if n.startswith("mtp.")}
    assert opened.tensors.keys() - own == reference.tensors.keys() and opened.args == reference.args
    assert opened.format == reference.format | {"mtp": {"name": "fp32"}}
    args = head_args(args_of_checkpoint(opened))
    shared = {"mtp.embedding.weight", "mtp.head.weight"}
    assert own == {f"mtp.{n}" for n, _ in build_model(args).named_parameters()} - shared
    assert torch.equal(opened.read("mtp.fc.weight"), headed.layer.eh_proj.weight)


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_those_of_transformers(name, make_headed, monkeypatch):
    """The logits of every chain, against the head run over the whole text without a cache."""
    headed, count = make_headed(name), 4
    speculation = speculate(headed.directory, count)
    drafter, logits = speculation.drafter, []
    choose, propose = drafter.choose_tokens, drafter.propose

    def choose_and_keep(state, found, candidates):
        logits.append(found[0].clone())
        choose(state, found, candidates)

    def propose_and_check(limit):
        logits.clear()
        assert propose(limit) == count
        ids = list(speculation.session.ids[0])
        want = headed.chain(ids, drafter.drafts[0].tolist())
        torch.testing.assert_close(torch.stack(logits), want, rtol=0, atol=2e-4)
        return count

    monkeypatch.setattr(drafter, "choose_tokens", choose_and_keep)
    monkeypatch.setattr(drafter, "propose", propose_and_check)
    answer = list(speculation.stream(PROMPT, 12, GREEDY))
    longer = PROMPT + answer + [9, 11, 4]  # goes on with the cache
    list(speculation.stream(longer, 8, GREEDY))
    is_recurrent = bool(speculation.session.snapshots.live[0])
    assert speculation.prefilled == (len(longer) - len(PROMPT) if is_recurrent else 4)
    if not is_recurrent:  # leaves the text in its middle
        list(speculation.stream([*longer[:9], 77, *PROMPT], 8, GREEDY))
        assert speculation.prefilled == 1 + 1 + len(PROMPT)
    speculation.reset()
    list(speculation.stream(PROMPT[:1], 5, GREEDY))


# Text ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_compiler(monkeypatch):
    """Sessions take their compiled paths (tensor positions, static shapes, warm-up), uncompiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr("runtime.session_steps.configure_inductor", lambda: None)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("compiled", (False, True))
def test_greedy_tokens_are_those_of_plain_decoding(no_compiler, name, compiled, make_headed, plain):
    for count in (1, 2, 7):
        speculation = speculate(make_headed(name).directory, count, compile=compiled)
        for ids in (PROMPT, PROMPT[:1], PROMPT * 3):
            assert list(speculation.stream(ids, 20, GREEDY)) == plain(ids, 20, name)
            found = speculation.statistics()
            assert found["drafted"] == count * found["passes"] > 0


class Oracle:
    """Wraps a drafter: its proposals become the target's own tokens, all but every `wrong`-th.

    limits: numbers of drafts of the passes, in turn.
    """

    def __init__(self, drafter: MTPDrafter, expected: list[int], limits, wrong: int = 5):
        self.drafter, self.expected, self.wrong = drafter, expected, wrong
        self.limits = itertools.cycle(limits)

    def __getattr__(self, name: str):
        return getattr(self.drafter, name)

    def propose(self, limit: int) -> int:
        found = self.drafter.propose(next(self.limits))
        at = len(self.drafter.target.ids[0])
        for n in range(found):
            token = self.expected[at + n] if at + n < len(self.expected) else 3
            wrong = (at + n) % self.wrong == 0
            self.drafter.drafts[0, n] = (token + wrong) % 160
        return found


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("compiled", (False, True))
def test_steps_without_drafts_between_accepted_drafts(
    no_compiler, name, compiled, make_headed, plain
):
    """The text is that of plain decoding, and the head's cache that of the text alone."""
    answer = plain(PROMPT, 40, name)
    directory = make_headed(name).directory
    speculation = speculate(directory, 3, compile=compiled)
    drafter = speculation.drafter
    speculation.drafter = Oracle(drafter, PROMPT + answer, (3, 0, 3, 3, 0, 0, 0))
    assert list(speculation.stream(PROMPT, 40, GREEDY)) == answer
    assert 0 < speculation.accepted < speculation.drafted
    filled, cache = drafter.filled, drafter.states[0].kv[:, 0].clone()
    assert filled > len(PROMPT) + 30
    fresh = speculate(directory, 3)
    list(fresh.stream(PROMPT + answer, 1, GREEDY))
    want = fresh.drafter.states[0].kv[:, 0]
    torch.testing.assert_close(cache[..., :filled, :], want[..., :filled, :], rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ("qwen3_5_moe", "glm4_moe_lite"))
def test_a_session_and_its_head_take_turns(name, make_headed, plain):
    speculation = speculate(make_headed(name).directory, 5)
    first = list(speculation.stream(PROMPT, 9, GREEDY))
    second = list(speculation.session.stream(PROMPT + first, 30, GREEDY))
    ids = PROMPT + first + second
    expected = plain(PROMPT, 48, name)
    assert first + second + list(speculation.stream(ids, 9, GREEDY)) == expected
    speculation.reset()
    for taken in (1, 2, 6, 7):  # a reader stops within a pass
        stream = speculation.stream(PROMPT, 20, GREEDY)
        answer = list(itertools.islice(stream, taken))
        stream.close()
        ids = [*PROMPT, *answer, 9, 11, 4]
        assert list(speculation.stream(ids, 9, GREEDY)) == plain(ids, 9, name)


@pytest.mark.parametrize("compiled", (False, True))
def test_a_session_is_used_to_its_last_position(no_compiler, make_headed, plain, compiled):
    """112 positions and 16 spare ones are the cache's 128."""
    directory = make_headed("glm4_moe").directory
    speculation = speculate(directory, 7, length=112, compile=compiled)
    assert speculation.cache_len == 128
    for length in range(105, 112):
        ids = (PROMPT * 10)[:length]
        want = plain(ids, 112 - length, "glm4_moe")
        assert list(speculation.stream(ids, 112 - length, GREEDY)) == want


@pytest.mark.parametrize("chunk", (3, 8, 64))
def test_a_prompt_in_chunks_fills_the_heads_cache(chunk, make_headed):
    directory = make_headed("glm4_moe").directory
    whole, parts = (speculate(directory, 2, prefill_chunk=size) for size in (2048, chunk))
    for speculation in (whole, parts):
        list(speculation.stream(PROMPT * 3, 1, GREEDY))
    filled = len(PROMPT * 3) - 1
    a, b = (s.drafter.states[0].kv[:, :, :, :filled] for s in (whole, parts))
    assert a.abs().amax((0, 1, 2, 4)).min() > 0
    torch.testing.assert_close(b, a, rtol=0, atol=1e-5)


# Sampling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", (True, False))
def test_answers_have_the_models_distribution(right, monkeypatch):
    """500 answers of 3 tokens have their exact probabilities; not so if every draft is accepted."""
    sampling, total = Sampling(temperature=0.35, top_k=3, repetition_penalty=1.2), 500
    ids, model = [0, 1, 2, 3, 4, 5, 6, 7, 2], small_model(0)
    expected = exact_answers(model, ids, 3, sampling)
    head = build_model(head_args(model.args)).to_empty(device="cpu")
    scramble(head, 3)
    head.embedding, head.head = model.embedding, model.head
    speculation = Speculation(Session(model, 32), 2, head=head)
    if not right:
        always = lambda seeds, position, index, stream: torch.zeros(1, len(index))  # noqa: E731
        monkeypatch.setattr("runtime.verification.uniform", always)
    found, accepted = Counter(), 0
    for seed in range(total):
        settings = dataclasses.replace(sampling, seed=seed)
        found[tuple(speculation.stream(ids, 3, settings))] += 1
        accepted += speculation.accepted
    assert 0 < accepted < 2 * total
    assert (chi_square(found, expected, total) <= 1) == right


# Formats and files --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ("int8", "int4", "fp8", "hqq4"))
def test_a_head_is_quantized_as_its_model_is(mode, make_headed, tmp_path):
    source = Checkpoint(make_headed("glm4_moe").directory)
    blank = build_model(args_of_checkpoint(source))
    format = plan_format(blank, mode, mode, group_size=None if mode in ("int8", "fp8") else 16)
    packed = Checkpoint(quantize(source, format, blank, tmp_path / mode, progress=False))
    modules = packed.format["mtp"]["modules"]
    assert {"fc", "layers.0.attention.wqkv", "layers.0.ffn.experts.w2"} <= modules.keys()
    assert "layers.0.ffn.router" not in modules
    size = lambda opened: sum(opened.nbytes(n) for n in opened.tensors if n[:4] == "mtp.")  # noqa: E731
    assert size(packed) < 0.6 * size(source)
    model = load_model(packed, "cpu")
    speculation = Speculation(Session(model, 128), 3, head=load_head(packed, model))
    answer = list(speculation.stream(PROMPT, 16, GREEDY))
    expected = list(Session(load_model(packed, "cpu"), 128).stream(PROMPT, 16, GREEDY))
    assert answer == expected


def test_a_head_shares_embedding_and_head(make_headed):
    directory = make_headed("deepseek_v3").directory
    model = load_model(directory, "cpu")
    head = load_head(directory, model)
    assert head.embedding is model.embedding and head.head is model.head
    alone = load_model(make_headed("deepseek_v3").family.directory, "cpu")
    names = [name for name, _ in alone.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
