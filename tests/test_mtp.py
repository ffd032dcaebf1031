"""Multi-token prediction: published heads are converted, and draft what transformers' layers do."""

import dataclasses
import io
import itertools
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from conftest import Family, save_in_fp8
from gguf_checkpoint import write_gguf
from published_files import compressed_integers, fp8_tensor, write
from safetensors.torch import load_file, save_file
from test_speculate import chi_square, exact_answers, scramble, small_model
from test_tp import run_ranks
from torch import Tensor
from torch._dynamo.utils import counters
from transformers.modeling_layers import MtpLayer

import generate
from checkpoint import Checkpoint
from formats.quantizer import plan_format, quantize
from generate import load_model
from gguf_files.source import GGUFCheckpoint
from memory.commands import head_bytes, part_bytes, sizes_of
from models import ARCHITECTURES, args_of_checkpoint, build_model, head_args
from models.converter import convert
from models.family import APART, ONE_MORE_LAYER
from models.random_weights import RandomWeights, number_format
from ops.plain.pending import MAX_SNAPSHOTS
from runtime import session_steps
from runtime.draft_vocab import DRAFT_VOCAB, part_of_head
from runtime.fused_head import fused_head
from runtime.fused_layer import fused_layers
from runtime.loading import head_source, load_head
from runtime.mtp import RING, MTPDrafter
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation
from runtime.weights import bytes_per_token
from tokenizer import Tokenizer

GREEDY = Sampling(temperature=0)
PROMPT = [5, 17, 3, 99, 42, 8, 120, 5, 17, 3, 99, 11, 5, 17]
IN_GGUF = {
    "qwen3_next": APART,
    "qwen3_5_moe": APART,
    "glm4_moe": ONE_MORE_LAYER,
    "glm4_moe_lite": ONE_MORE_LAYER,
    "deepseek_v3": ONE_MORE_LAYER,
}
LAYOUTS = IN_GGUF | {"mellum": APART}
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
        seen = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        kinds = ()
        if self.family.name == "mellum":  # whose head has a window
            seen &= seen.triu(1 - self.family.peer.config.sliding_window)
            kinds = ("sliding_attention",)
        mask = torch.where(seen, 0.0, float("-inf"))[None, None]
        rope = self.family.peer.model.rotary_emb(inputs, positions, *kinds)
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


def speculate(
    directory: Path, count: int, length: int = 128, draft_ids: Sequence[int] = (), **options
) -> Speculation:
    """Return a Speculation by the checkpoint's head."""
    model = load_model(directory, "cpu")
    session = Session(model, length, SessionOptions(**options))
    return Speculation(session, count, head=load_head(directory, model), draft_ids=draft_ids)


@pytest.fixture(scope="module")
def plain(make_headed):
    """(ids, count, sampling, family) -> tokens of plain decoding, with an empty cache."""
    sessions, known = {}, {}

    def tokens(ids, count: int, name: str, sampling: Sampling = GREEDY) -> list[int]:
        if name not in sessions:
            sessions[name] = Session(load_model(make_headed(name).directory, "cpu"), 256)
        key = repr((name, ids, sampling))
        if count > len(known.get(key, ())):  # a shorter one is the beginning of a longer one
            sessions[name].reset()
            known[key] = list(sessions[name].stream(ids, count, sampling))
        return known[key][:count]

    return tokens


# The head -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_file_has_the_head(name, make_headed, tmp_path):
    """llama.cpp's converter has every head as one more layer, with the model's own changes."""
    headed = make_headed(name)
    head = {
        "model.layers.3.eh_proj.weight": headed.layer.eh_proj.weight,
        "model.layers.3.enorm.weight": headed.layer.enorm.weight,
        "model.layers.3.hnorm.weight": headed.layer.hnorm.weight,
        "model.layers.3.shared_head.norm.weight": headed.layer.post_norm.weight,
    }
    layer = headed.layer.mtp_block.state_dict().items()
    last = headed.family.peer.config.num_hidden_layers
    head = {n.replace(".3.", f".{last}."): tensor.detach() for n, tensor in head.items()}
    head |= {f"model.layers.{last}.{leaf}": tensor for leaf, tensor in layer}
    path = write_gguf(tmp_path / "a.gguf", headed.family.peer, head=head)
    opened, reference = GGUFCheckpoint(path), Checkpoint(headed.directory)
    assert "mtp" in opened.format
    model = load_model(opened, "cpu", torch.float32)
    names = [f"mtp.{n}" for n, _ in load_head(opened, model, torch.float32).named_parameters()]
    for tensor in reference.tensors.keys() & names:
        torch.testing.assert_close(opened.read(tensor), reference.read(tensor), rtol=0, atol=2e-7)


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
    # A ring has snapshots, too, but goes back by a few tokens without them.
    is_recurrent = bool(speculation.session.snapshots.live[0]) and name != "mellum"
    assert speculation.prefilled == (len(longer) - len(PROMPT) if is_recurrent else 4)
    if not is_recurrent:  # leaves the text in its middle
        list(speculation.stream([*longer[:9], 77, *PROMPT], 8, GREEDY))
        assert speculation.prefilled == 1 + 1 + len(PROMPT)
    speculation.reset()
    list(speculation.stream(PROMPT[:1], 5, GREEDY))


# Text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("draft_ids", ((), range(1, 160, 3)), ids=("all ids", "some ids"))
def test_greedy_tokens_are_those_of_plain_decoding(
    no_compiler, name, draft_ids, compiled, make_headed, plain
):
    for count in (1, 7):  # 1 makes no chain, 7 the longest
        directory = make_headed(name).directory
        speculation = speculate(directory, count, draft_ids=draft_ids, compile=compiled)
        for ids in (PROMPT, PROMPT[:1], PROMPT * 3):
            assert list(speculation.stream(ids, 12, GREEDY)) == plain(ids, 12, name)
            found = speculation.statistics()
            assert found["drafted"] == count * found["passes"] > 0
            assert not draft_ids or set(speculation.drafter.drafts[0].tolist()) <= {*draft_ids}


@pytest.mark.parametrize(
    "sampling", (pytest.param(GREEDY, marks=pytest.mark.slow), Sampling(1.0, seed=3))
)
def test_drafts_end_before_one_below_the_threshold(sampling, make_headed, plain):
    """The threshold is just above each draft's probability in turn. Text stays the plain one."""
    name, count = next(iter(LAYOUTS)), 5
    speculation = speculate(make_headed(name).directory, count)
    drafter, target = speculation.drafter, speculation.session
    drafter.least = 1e-9
    drafter.start_prompt(PROMPT, sampling)
    target.start_prompts([PROMPT], sampling)
    target.ids[0] += target.first_tokens()[:1]
    assert drafter.propose(count) == count
    chances = drafter.written.certainty[:count].tolist()
    assert all(0 < chance < 1 for chance in chances)
    for place, chance in enumerate(chances):
        drafter.least = chance * (1 + 1e-5)
        stops = next(n for n, other in enumerate(chances) if other < drafter.least)
        assert drafter.propose(count) == stops <= place
    drafter.least = min(chances) * (1 - 1e-5)
    assert drafter.propose(count) == count
    if not sampling.temperature:
        drafter.least = sorted(chances)[count // 2]
        assert list(speculation.stream(PROMPT, 20, GREEDY)) == plain(PROMPT, 20, name)
        assert speculation.drafted < count * speculation.passes


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_part_of_the_vocabulary_drafts_its_likeliest_ids(name, make_headed):
    """After the same text, the first draft is the id of the part with the largest logit."""
    directory, ids, logits = make_headed(name).directory, range(0, 160, 4), []
    for draft_ids in ((), ids):
        speculation = speculate(directory, 3, draft_ids=draft_ids)
        drafter, target = speculation.drafter, speculation.session
        choose = drafter.choose_tokens

        def keep(state, found, candidates, choose=choose):
            logits.append(found[0].clone())
            choose(state, found, candidates)

        drafter.start_prompt(PROMPT, GREEDY)
        target.start_prompts([PROMPT], GREEDY)
        target.ids[0].append(target.first_tokens()[0])
        drafter.choose_tokens = keep
        assert drafter.propose(3) == 3
    whole, part = logits[0], logits[3]
    assert len(part) == len(ids)
    torch.testing.assert_close(part, whole[torch.tensor(ids)], rtol=0, atol=1e-5)
    assert drafter.drafts[0, 0] == ids[int(part.argmax())]


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
        limit = next(self.limits)
        found = self.drafter.propose(limit) if limit else 0  # as another drafter served the step
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
    speculation.drafter = Oracle(drafter, PROMPT + answer, (3, 0, 3, 3, *[0] * 9, 3))
    assert list(speculation.stream(PROMPT, 40, GREEDY)) == answer
    assert 0 < speculation.accepted < speculation.drafted
    filled, cache = drafter.filled, drafter.states[0].kv[:, 0].clone()
    assert filled > len(PROMPT) + 20
    fresh = speculate(directory, 3)
    list(fresh.stream(PROMPT + answer, 1, GREEDY))
    want = fresh.drafter.states[0].kv[:, 0]
    torch.testing.assert_close(cache[..., :filled, :], want[..., :filled, :], rtol=0, atol=2e-4)


@pytest.mark.parametrize("sampling", (GREEDY, Sampling(seed=5)), ids=("greedy", "sampled"))
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_chain_behind_a_pass_has_the_drafts_of_one_after_it(
    name, sampling, make_headed, plain, monkeypatch
):
    """The host has not read the pass then. Numbers of drafts change, and plain steps come between.

    The next turn begins while a chain that nobody asked for has run.
    """
    found, behind = [], []
    for follows in (False, True):
        speculation, drafts = speculate(make_headed(name).directory, 3), []
        speculation.follows, drafter = follows, speculation.drafter
        propose = drafter.propose

        def note(limit, propose=propose, drafter=drafter, drafts=drafts):
            behind.append(drafter.ahead)
            count = propose(limit)
            drafts.append(drafter.drafts[0, :count].tolist())
            return count

        monkeypatch.setattr(drafter, "propose", note)
        text = PROMPT + plain(PROMPT, 60, name)
        limits = 3, 3, 3, 3, 0, 3, 3, 2, 2, 2, 3, 3, 1, 1, 1, 3
        speculation.drafter = Oracle(drafter, text, limits, wrong=7)
        answer = list(speculation.stream(PROMPT, 50, sampling))
        found.append((answer, drafts, speculation.statistics()))
        answer += speculation.stream([*PROMPT, *answer[:45], 7], 20, sampling)
        for _ in range(2):
            drafter.propose(0)  # other drafters serve these passes
            assert not drafter.repeats
    assert found[0] == found[1]
    assert found[0][2]["accepted"] and {0, 1, 2, 3} == {*behind} and behind.count(3) > 4


@pytest.mark.parametrize("name", ("qwen3_next", "deepseek_v3"))
def test_lost_states_cost_nothing_but_drafts(name, make_headed, plain, monkeypatch):
    """A short ring, and steps whose states leave it; the text, a seed's and the next turn's too."""
    monkeypatch.setattr("runtime.mtp.RING", 20)
    speculation = speculate(make_headed(name).directory, 3)
    limits = 3, *[0] * 30, 3, 3
    for sampling in (GREEDY, Sampling(seed=5)):
        answer = plain(PROMPT, 45, name, sampling)
        speculation.reset()
        speculation.drafter = Oracle(speculation.drafter, PROMPT + answer, limits)
        found = list(speculation.stream(PROMPT, 45, sampling))
        assert len(found) == 45 and (found == answer or sampling is not GREEDY)
        ids = [*PROMPT, *found[:40], 7, 9]
        assert list(speculation.stream(ids, 9, GREEDY)) == plain(ids, 9, name)
        speculation.drafter = speculation.drafter.drafter


@pytest.mark.parametrize("name", ("qwen3_5_moe", "glm4_moe_lite"))
def test_a_session_and_its_head_take_turns(name, make_headed, plain):
    speculation = speculate(make_headed(name).directory, 5)
    first = list(speculation.stream(PROMPT, 9, GREEDY))
    second = list(speculation.session.stream(PROMPT + first, 30, GREEDY))
    ids = PROMPT + first + second
    expected = plain(PROMPT, 48, name)
    assert first + second + list(speculation.stream(ids, 9, GREEDY)) == expected
    speculation.reset()
    for taken in (2, 7):  # a reader stops within a pass
        stream = speculation.stream(PROMPT, 20, GREEDY)
        answer = list(itertools.islice(stream, taken))
        stream.close()
        ids = [*PROMPT, *answer, 9, 11, 4]
        assert list(speculation.stream(ids, 9, GREEDY)) == plain(ids, 9, name)


@pytest.mark.parametrize("compiled", (pytest.param(False, marks=pytest.mark.slow), True))
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


@pytest.mark.slow
def test_chains_of_all_lengths_share_compiled_code(make_headed, plain):
    """All numbers of drafts, prompts and settings: nothing is compiled after the first chain."""
    torch._dynamo.reset()
    directory = make_headed("glm4_moe").directory
    speculation = speculate(directory, 3, draft_ids=range(0, 160, 2), compile=True)
    drafter = speculation.drafter
    for sampling in (GREEDY, Sampling(seed=1)):
        list(speculation.stream(PROMPT, 9, sampling))
        for drafts in (1, 2):  # passes of other numbers of tokens are other compiled code
            speculation.warm_up(drafts, speculation.candidates(sampling))()
    before = counters["stats"]["unique_graphs"]
    assert before > 0
    speculation.drafter = Oracle(drafter, PROMPT, (3, 0, 1, 2))
    for length in (1, 5, 40):
        ids = [i % 150 for i in range(length)]
        list(speculation.stream(ids, 12, Sampling(0.7, top_k=length, seed=length)))
        drafter.start_prompt(ids, GREEDY)
    for drafts in (1, 2, 3):
        drafter.warm_up_chain(drafts)()
    assert counters["stats"]["unique_graphs"] == before
    speculation.drafter = drafter
    assert list(speculation.stream(PROMPT, 20, GREEDY)) == plain(PROMPT, 20, "glm4_moe")


# Sampling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", (True, False))
@pytest.mark.parametrize("draft_ids", ((), (1, 3, 4, 6)), ids=("all ids", "some ids"))
def test_answers_have_the_models_distribution(draft_ids, right, monkeypatch):
    """300 answers of 3 tokens have their exact probabilities; not so if every draft is accepted."""
    sampling, total = Sampling(temperature=0.35, top_k=3, repetition_penalty=1.2), 300
    ids, model = [0, 1, 2, 3, 4, 5, 6, 7, 2], small_model(0)
    expected = exact_answers(model, ids, 3, sampling)
    head = build_model(head_args(model.args)).to_empty(device="cpu")
    scramble(head, 4)
    head.embedding, head.head = model.embedding, model.head
    speculation = Speculation(Session(model, 32), 2, head=head, draft_ids=draft_ids)
    if not right:
        always = lambda seeds, position, index, stream: torch.zeros(1, len(index))  # noqa: E731
        monkeypatch.setattr("runtime.verification.uniform", always)
    found, accepted = Counter(), 0
    for seed in range(total):
        settings = dataclasses.replace(sampling, seed=seed)
        found[tuple(speculation.stream(ids, 3, settings))] += 1
        accepted += speculation.accepted
        others = [token for token in range(8) if draft_ids and token not in draft_ids]
        assert (speculation.drafter.q[:, others] == 0).all()
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
    some = speculate(packed, 3, draft_ids=range(40, 140))  # rows of the packed head
    assert {len(part) for part in some.drafter.model.head.parameters()} == {100}
    assert list(some.stream(PROMPT, 16, GREEDY)) == expected


@pytest.mark.parametrize("mode", (pytest.param("bf16", marks=pytest.mark.slow), "int8"))
def test_random_weights_make_a_head(mode, make_headed):
    """For benchmarks at published shapes; with tied and packed heads of the vocabulary."""
    args = args_of_checkpoint(Checkpoint(make_headed("qwen3_5_moe").directory))
    args = dataclasses.replace(args, intermediate=128, shared_intermediate=128, dim=128)
    model = load_model(RandomWeights(args, number_format(mode, args)), "cpu")
    source = RandomWeights(head_args(args), number_format(mode, head_args(args)))
    head = load_model(source, "cpu", share=model)
    assert head.head is model.head
    speculation = Speculation(Session(model, 64), 3, head=head)
    assert len(list(speculation.stream(PROMPT, 20, GREEDY))) == 20


@pytest.mark.parametrize(
    "name", ("Qwen3.6-35B-A3B", "Qwen3-Next-80B-A3B", "GLM-4.5-Air", "GLM-4.7-Flash")
)
def test_the_fused_kernels_compute_published_heads(name):
    head = build_model(head_args(ARCHITECTURES[name])).to(torch.bfloat16)
    assert len(fused_layers(head)) == 1 and fused_head(head) is not None
    head.head = part_of_head(head.head, range(DRAFT_VOCAB), head.args.vocab_size)
    assert fused_head(head).weight.out == DRAFT_VOCAB


def test_a_head_shares_embedding_and_head(make_headed):
    directory = make_headed("deepseek_v3").directory
    model = load_model(directory, "cpu")
    head = load_head(directory, model)
    assert head.embedding is model.embedding and head.head is model.head
    alone = load_model(make_headed("deepseek_v3").family.directory, "cpu")
    names = [name for name, _ in alone.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names


# Ranks --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_ranks(make_headed, tmp_path_factory):
    """(ranks, case) -> what tests/mtp_worker.py found; each number of ranks is one launch."""
    folder = tmp_path_factory.mktemp("packed")
    directories = {name: make_headed(name).directory for name in LAYOUTS}
    source = Checkpoint(directories["glm4_moe"])
    blank = build_model(args_of_checkpoint(source))
    format = plan_format(blank, "int4", "int4", group_size=8)
    directories["int4"] = quantize(source, format, blank, folder / "int4", progress=False)
    cases = {
        f"{name} {parallel} {temperature}": [str(directory), parallel, PROMPT, temperature]
        for name, directory in directories.items()
        for parallel, temperature in (("tensor", 0.0), ("expert", 0.9))
    }

    @cache
    def launch(ranks: int) -> dict:
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        (folder / "cases.json").write_text(json.dumps(cases))
        process = run_ranks(ranks, "mtp_worker", folder)
        _, errors = process.communicate(timeout=600)
        if process.returncode:  # cached: the next test does not launch it again
            return {"failed": errors}
        return json.loads((folder / "found.json").read_text())

    def case(ranks: int, name: str) -> dict:
        found = launch(ranks)
        assert "failed" not in found, found["failed"][-4000:]
        return found[name]

    return case


@pytest.mark.slow
@pytest.mark.parametrize("case", ("tensor 0.0", "expert 0.9"))
@pytest.mark.parametrize("name", (*LAYOUTS, "int4"))
def test_two_ranks_draft_as_one_process(name, case, by_ranks):
    one, two = (by_ranks(ranks, f"{name} {case}") for ranks in (1, 2))
    assert two["tokens"] == one["tokens"] and two["drafts"] == one["drafts"]
    assert max(two["bytes_held"]) < 0.85 * one["bytes_held"][0]


# Files of other kinds -----------------------------------------------------------------------------


def test_a_head_that_cannot_be_converted_is_left_out(make_headed, tmp_path, capsys):
    """One tensor is missing, or has another shape: the model is converted without its head."""
    headed = make_headed("glm4_moe")
    for number, name in enumerate(("model.layers.3.eh_proj.weight", "model.layers.3.hnorm.weight")):
        directory = tmp_path / str(number)
        shutil.copytree(headed.hf_directory, directory, ignore=shutil.ignore_patterns("model_*"))
        tensors = load_file(directory / "model-mtp.safetensors")
        if number:
            tensors[name] = torch.ones(5)
        else:
            del tensors[name]
            index = directory / "model.safetensors.index.json"
            content = json.loads(index.read_text())
            del content["weight_map"][name]
            index.write_text(json.dumps(content))
        save_file(tensors, directory / "model-mtp.safetensors")
        opened = Checkpoint(convert(directory, dtype="fp32"))
        assert f"left out, as they are not run: model.layers.3.* ({len(tensors)} tensors)\n" in (
            capsys.readouterr().err
        )
        assert opened.tensors == Checkpoint(headed.family.directory).tensors
        assert "mtp" not in opened.format


def test_copies_of_the_models_embedding_and_head_are_not_stored(make_headed, tmp_path):
    headed = make_headed("glm4_moe_lite")
    directory = tmp_path / "hf"
    shutil.copytree(headed.hf_directory, directory, ignore=shutil.ignore_patterns("model_*"))
    tensors = load_file(directory / "model-mtp.safetensors")
    copies = "model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"
    add_tensors(directory, tensors | {name: torch.ones(160, 64) for name in copies})
    opened = Checkpoint(convert(directory, dtype="fp32", progress=False))
    assert opened.tensors == Checkpoint(headed.directory).tensors


@pytest.mark.parametrize("with_head", (True, False))
def test_a_head_published_in_fp8_keeps_its_codes(with_head, tmp_path):
    """with_head: its projection too is in fp8; else it is left in bf16, as most are published."""
    config = transformers.Glm4MoeConfig(
        vocab_size=160,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        intermediate_size=256,
        max_position_embeddings=256,
        n_group=1,
        topk_group=1,
    )
    torch.manual_seed(3)
    peer = transformers.Glm4MoeForCausalLM(config)
    directory = save_in_fp8(peer, tmp_path / "hf")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    own = {n: t for n, t in tensors.items() if n.startswith("model.layers.1.")}
    tensors |= {n.replace("layers.1.", "layers.2."): t.clone() for n, t in own.items()}
    at, D = ONE_MORE_LAYER, 128
    norms = at.embedding_norm, at.hidden_norm, at.norm
    tensors |= {name.format(n=2): torch.ones(D, dtype=torch.bfloat16) for name in norms}
    fc = torch.randn(D, 2 * D) * 0.05
    tensors[at.fc.format(n=2)] = fc.to(torch.float8_e4m3fn) if with_head else fc.bfloat16()
    if with_head:
        tensors[at.fc.format(n=2) + "_scale_inv"] = torch.ones(1, 2)
    save_file(tensors, path, metadata={"format": "pt"})
    edit_config(directory, num_nextn_predict_layers=1)
    opened = Checkpoint(convert(directory, tmp_path / "out", progress=False))
    modules = opened.format["mtp"]["modules"]
    assert {"layers.0.attention.wqkv", "layers.0.ffn.experts.w13"} <= modules.keys()
    assert ("fc" in modules) == with_head
    assert not any(path.startswith("mtp") for path in opened.format["modules"])
    model = load_model(opened, "cpu", torch.float32)
    head = load_head(opened, model, torch.float32)
    same = head.layers[0].attention.wqkv.codes, model.layers[1].attention.wqkv.codes
    assert torch.equal(*same)
    speculation = Speculation(Session(model, 64), 3, head=head)
    alone = Session(load_model(opened, "cpu", torch.float32), 64)
    assert list(speculation.stream(PROMPT, 12, GREEDY)) == list(alone.stream(PROMPT, 12, GREEDY))


HEAD_LAYOUTS = {
    "the model's": (compressed_integers(16), {"int4"}),
    "FP8": (fp8_tensor, {"fp8"}),
    "16 bits": (None, set()),
}


@pytest.mark.parametrize(
    "head",
    [pytest.param(name, marks=() if name == "FP8" else pytest.mark.slow) for name in HEAD_LAYOUTS],
)
def test_a_head_beside_a_model_in_4_bits_keeps_its_own_format(head, make_headed, tmp_path):
    layout, formats = HEAD_LAYOUTS[head]
    source = make_headed("qwen3_5_moe", True).hf_directory

    def function(name: str):
        return layout if name.startswith("mtp.") else compressed_integers(16)

    config = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    quantized, plain = write(source, tmp_path, function, config)
    opened = Checkpoint(convert(quantized, dtype="fp32", progress=False))
    assert {spec["format"] for spec in opened.format["modules"].values()} == {"int4"}
    modules = opened.format["mtp"]["modules"]
    assert {spec["format"] for spec in modules.values()} == formats
    drafts = []
    for directory in (opened.directory, convert(plain, dtype="fp32", progress=False)):
        speculation = speculate(directory, 3)
        text = list(speculation.stream(PROMPT, 12, GREEDY))
        drafts.append((text, speculation.passes, speculation.accepted))
    assert drafts[0] == drafts[1]


# Memory and the command ---------------------------------------------------------------------------


def test_the_plan_counts_a_head(make_headed):
    """Its bytes are those that a drafter allocates, and its model has none of them."""
    for name in LAYOUTS:
        directory = make_headed(name).directory
        model = load_model(directory, "cpu")
        before = {id(p) for p in model.parameters()}
        head = load_head(directory, model)
        for ids in (), range(50):
            drafter = Speculation(Session(model, 128), 3, head=head, draft_ids=ids).drafter
            own = sum(p.nbytes for p in head.parameters() if id(p) not in before)
            held = own + sum(state.nbytes for state in drafter.states)
            sizes = sizes_of(head_source(Checkpoint(directory)), torch.float32)
            planned = head_bytes(sizes, 128, "plain", 2048) + part_bytes(sizes, len(ids) or 160)
            most = held + 4 * 64 * (256 + RING) + drafter.states[0].nbytes
            kept = [t for state in drafter.states for t in state.recurrent(0)]  # of a ring
            assert held < planned <= most + MAX_SNAPSHOTS * sum(t.nbytes for t in kept)
            assert part_bytes(sizes, 50) == 50 * 64 * 4
        assert bytes_per_token(model) == bytes_per_token(load_model(directory, "cpu"))


def run_command(*arguments: str) -> tuple[int, str, str]:
    """Run generate.py in this process -> exit code, stdout, stderr."""
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["generate.py", *arguments])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", errors)
        try:
            code = generate.main()
        except SystemExit as exit:
            code = exit.code
    return code, out.getvalue(), errors.getvalue()


def test_mistakes_are_refused_before_weights_are_read(hybrid_directory, make_family, monkeypatch):
    monkeypatch.setattr(generate, "load_model", None)
    monkeypatch.setattr(Tokenizer, "check_ids", lambda *_: None)  # it is another model's
    without = make_family("mixtral").directory
    headless = "error: --speculate mtp: this checkpoint has no head for multi-token prediction: "
    for directory, drafts, message in (
        (without, "3", headless + "convert the published model again if that has one"),
        (hybrid_directory, "8", "error: --draft_tokens 8: --speculate mtp drafts 1 to 7"),
    ):
        shutil.copy(hybrid_directory / "tokenizer.model", tmp := without / "tokenizer.model")
        options = "--speculate", "mtp", "--draft_tokens", drafts
        code, out, errors = run_command("--checkpoint_path", str(directory), *options)
        tmp.unlink()
        assert code == 2 and out == "" and errors.startswith(message) and errors.count("\n") == 1


def test_a_head_has_the_stored_dtype_of_its_model(hybrid_directory):
    """Norms of Qwen3.5 are in fp32 beside weights in bf16."""
    model = load_model(hybrid_directory, "cpu")
    head = load_head(hybrid_directory, model)
    assert model.norm.weight.dtype == torch.float32
    assert head.fc.weight.dtype == model.embedding.weight.dtype == torch.bfloat16
    speculation = Speculation(Session(model, 64), 3, head=head)
    found = list(speculation.stream([1, 5, 9], 12, GREEDY))
    assert len(found) == 12 and speculation.statistics()["drafted"] > 0


def test_long_chunks_count_activations_in_the_models_dtype(hybrid_directory, monkeypatch):
    """A norm in fp32 says nothing of them."""
    asked = []
    monkeypatch.setattr(session_steps.EagerRunner, "runs_long_chunks", True)
    monkeypatch.setattr(session_steps, "free_gpu_memory", lambda device: 0)
    monkeypatch.setattr(session_steps, "choose_chunk", lambda *given: asked.append(given) or 2048)
    Session(load_model(hybrid_directory, "cpu"), 64)
    assert [dtype for _, dtype, _ in asked] == [torch.bfloat16]
