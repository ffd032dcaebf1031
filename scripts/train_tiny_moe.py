"""Train the embedded checkpoint: a small MoE language model on Python's standard library.

    python scripts/train_tiny_moe.py --output_dir new/tiny-moe          # one GPU, minutes
    python scripts/train_tiny_moe.py --output_dir /tmp/smoke --smoke    # CPU, seconds, reproducible

The model is transformers' own class of `--family`, in sizes that fit into the repository. The
output folder has Hugging Face layout: two bf16 safetensors shards, config.json, a sentencepiece
tokenizer, heldout.txt (text excluded from training) and a README.md with the measurements.
`tiny_moe_heldout.txt` lists the excluded modules; `tiny_moe_readme.md` is the README's template.

Shapes: B sequences, S positions, V vocabulary, L layers, E experts, A active experts.
"""

from cli.ctrl_c import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import argparse
import copy
import importlib
import io
import itertools
import json
import math
import platform
import sys
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from unittest import mock

from cli.command import command
from cli.startup import check_arguments
from cli.train_options import SETTINGS, build_parser

if __name__ == "__main__":
    check_arguments(build_parser)

import sentencepiece
import torch
import torch.nn.functional as F
import transformers  # loads a class when it is first used: types are texts
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm
from transformers.modeling_layers import MtpLayer

from ops.plain.gated_delta import chunk_in_torch

BOS, EOS = 1, 2  # sentencepiece's default ids, and Mixtral's
PROMPT = 'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self'
SPLIT_FILE = Path(__file__).with_name("tiny_moe_heldout.txt")
HEAD_FILE, DEPTH = "model-mtp.safetensors", 3  # drafts of a chain that a head is trained for
README_FILE = Path(__file__).with_name("tiny_moe_readme.md")

# fmt: off
SIZES = dict(  # config.json's fields for every family
    vocab_size=4096, hidden_size=256, intermediate_size=128, num_hidden_layers=8, head_dim=32,
    num_attention_heads=8, num_key_value_heads=4, num_experts_per_tok=2, rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=4096,
    tie_word_embeddings=True, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=None,
)
SMOKE_SIZES = dict(vocab_size=1024, hidden_size=128, head_dim=16, num_hidden_layers=2)
LOCAL = dict(num_local_experts=8, sliding_window=None)
QWEN = dict(num_experts=8, moe_intermediate_size=128, norm_topk_prob=True)
ROUTED = dict(n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=128, n_group=1,
              topk_group=1, routed_scaling_factor=1.0, first_k_dense_replace=0, num_mtp_layers=0)
LATENT = dict(num_key_value_heads=8, kv_lora_rank=64, q_lora_rank=None, head_dim=16,
              qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32)
FAMILIES = {  # transformers' model_type -> the fields that SIZES lacks
    "mixtral": LOCAL,
    "qwen2_moe": QWEN | dict(shared_expert_intermediate_size=128),
    "qwen3_moe": QWEN,
    "olmoe": dict(num_experts=8, norm_topk_prob=True),
    "granitemoe": LOCAL | dict(attention_multiplier=32**-0.5),
    "phimoe": LOCAL,
    "glm4_moe": ROUTED,
    "deepseek_v2": ROUTED | LATENT,
    "deepseek_v3": ROUTED | LATENT,
    "gpt_oss": LOCAL | dict(sliding_window=128),
    "qwen3_5_moe": dict(
        hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        linear_num_key_heads=2, linear_num_value_heads=8, linear_key_head_dim=32,
        linear_value_head_dim=32, full_attention_interval=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0,
                         "partial_rotary_factor": 0.5},
    ),
}
MODEL_TYPES = {"qwen3_5_moe": "qwen3_5_moe_text"}  # where transformers names the text part apart
# fmt: on


# ------------------------------------------------------------------------------------------- corpus


@dataclass
class Corpus:
    """Documents by their path in the library. The three parts share no file."""

    train: dict[str, str]
    validation: dict[str, str]
    heldout: dict[str, str]
    missing: list[str]  # held-out modules that this version of the library lacks


def read_library(stdlib: Path) -> dict[str, str]:
    """Read the library's UTF-8 Python files, without installed packages, by sorted path."""
    documents = {}
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib)
        if {"site-packages", "dist-packages", "__pycache__"} & set(name.parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8")  # read_text() would turn CRLF into LF
        except UnicodeDecodeError:
            continue  # some of the library's tests have other encodings
        if "\0" not in text and text.strip():
            documents[name.as_posix()] = text
    return documents


def read_split() -> tuple[dict[str, list[str]], list[str]]:
    """Return the modules listed in each section of the split file, and all of its patterns."""
    sections, patterns = {}, []
    for line in SPLIT_FILE.read_text(encoding="utf-8").splitlines():
        words = line.split("#")[0].split()
        if words and words[0].startswith("["):
            modules = sections.setdefault(words[0].strip("[]"), [])
        elif words:
            modules.append(words[0])
            patterns += words[1:]
    return sections, patterns


def split_corpus(documents: dict[str, str]) -> Corpus:
    """Separate the listed modules from the training text, and drop what matches a pattern.

    Raises ValueError if no listed module is in `documents`.
    """
    sections, patterns = read_split()
    heldout, validation = (
        {name: documents[name] for name in sections[part] if name in documents}
        for part in ("heldout", "validation")
    )
    if not heldout or not validation:
        raise ValueError("no held-out module found: name the folder of the library with --stdlib")
    patterns += sections["unused"]  # this section lists patterns only
    train = {
        name: text
        for name, text in documents.items()
        if name not in heldout
        and name not in validation
        and not any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    missing = [name for name in sections["heldout"] if name not in documents]
    return Corpus(train, validation, heldout, missing)


def smoke_corpus(corpus: Corpus) -> Corpus:
    """Reduce each part: four held-out and four validation modules, 60 short documents."""
    short = [name for name, text in corpus.train.items() if 500 < len(text) < 20_000]
    train = {name: corpus.train[name] for name in short[:: max(1, len(short) // 60)][:60]}
    heldout, validation = (
        dict(itertools.islice(part.items(), 4)) for part in (corpus.heldout, corpus.validation)
    )
    return replace(corpus, train=train, validation=validation, heldout=heldout)


def is_test(name: str) -> bool:
    """Return whether a path belongs to the library's tests, two thirds of its text."""
    return any(part.startswith(("test", "idle_test")) for part in name.split("/"))


def long_lines(text: str) -> set[str]:
    """Return the stripped lines of at least 20 characters."""
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= 20}


def shingles(text: str) -> set[str]:
    """Return the substrings of 200 characters that start at a line's start."""
    lengths = (len(line) for line in text.splitlines(keepends=True))
    starts = itertools.accumulate(lengths, initial=0)
    return {text[i : i + 200] for i in starts if i + 200 <= len(text)}


def check_leaks(corpus: Corpus) -> dict[str, float]:
    """Search the training text for held-out text.

    Return the fraction of long held-out lines, and of 200-character substrings, that occur in the
    training text, idioms and license notices included. Raises ValueError for a near-copy: a
    training document and a held-out module that share half of the long lines of either.
    """
    modules_with = defaultdict(list)
    for name, text in corpus.heldout.items():
        for line in long_lines(text):
            modules_with[line].append(name)
    substrings = set().union(*map(shingles, corpus.heldout.values()))
    seen_lines, seen_substrings = set(), set()
    for name, text in corpus.train.items():
        lines = long_lines(text)
        seen_lines |= lines & modules_with.keys()
        seen_substrings |= shingles(text) & substrings
        shared = Counter(module for line in lines for module in modules_with.get(line, ()))
        for module, count in shared.items():
            share = count / min(len(lines), len(long_lines(corpus.heldout[module])))
            if share >= 0.5 and count >= 8:
                raise ValueError(
                    f"{name} is {share:.0%} the held-out module {module}: "
                    f"add it to that line of {SPLIT_FILE.name}"
                )
    return {
        "lines": len(seen_lines) / max(1, len(modules_with)),
        "stretches": len(seen_substrings) / max(1, len(substrings)),
    }


# ---------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(documents: dict[str, str], vocab_size: int) -> bytes:
    """Train a sentencepiece BPE model for code and return the bytes of `tokenizer.model`.

    One thread, so the result is reproducible. It uses every fourth test and all other documents.
    Decoding restores every byte, because nothing is normalized. A line break is always one token:
    if it were merged with the indentation after it, a prompt that ends in a line break would look
    like the end of a file. Indentation of 4, 8, ... 24 spaces is one token. Pieces may cross
    spaces and punctuation (`if not self.`, `):`).
    """
    space = "\u2581"  # sentencepiece's symbol for a space
    tests = [name for name in documents if is_test(name)]
    names = [name for name in documents if not is_test(name)] + tests[::4]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # By line: sentencepiece counts positions in 16 bits, and no piece crosses a line break.
        sentence_iterator=(line for name in names for line in documents[name].splitlines(True)),
        model_writer=out,
        model_type="bpe",
        vocab_size=vocab_size,
        user_defined_symbols=["\n"] + [space * count for count in range(4, 25, 4)],
        byte_fallback=True,
        character_coverage=0.9999,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_by_whitespace=False,
        split_by_unicode_script=False,
        max_sentence_length=1 << 24,
        num_threads=1,
        minloglevel=2,
    )
    return out.getvalue()


@dataclass
class Data:
    """The corpus, its tokenizer, and the token ids of the training documents."""

    corpus: Corpus
    leaks: dict[str, float]
    tokenizer: sentencepiece.SentencePieceProcessor
    ids: list[list[int]]


def load_data(options: argparse.Namespace, vocab_size: int) -> Data:
    """Read and check the corpus, train the tokenizer unless `--tokenizer` names one, and encode."""
    corpus = split_corpus(read_library(options.stdlib))
    corpus = smoke_corpus(corpus) if options.smoke else corpus
    if corpus.missing:
        print(
            f"warning: this library lacks {len(corpus.missing)} held-out modules, so heldout.txt "
            "differs from that of other versions",
            file=sys.stderr,
        )
    leaks = check_leaks(corpus)
    print("tokenizer ...", file=sys.stderr)
    given = options.tokenizer
    proto = given.read_bytes() if given else train_tokenizer(corpus.train, vocab_size)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=proto)
    if tokenizer.get_piece_size() != vocab_size:
        raise ValueError(f"{given} has {tokenizer.get_piece_size()} pieces, not {vocab_size}")
    ids = [tokenizer.encode(text) for text in tqdm(corpus.train.values(), desc="encode")]
    return Data(corpus, leaks, tokenizer, ids)


# -------------------------------------------------------------------------------------------- model


def build_model(family: str, dropout: float = 0.0, **sizes) -> "transformers.PreTrainedModel":
    """Build transformers' model of `family` in fp32, with dropout on each residual branch."""
    fields = copy.deepcopy(SIZES | sizes | FAMILIES[family])  # a config changes its rope_parameters
    config = transformers.AutoConfig.for_model(MODEL_TYPES.get(family, family), **fields)
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="grouped_mm"
    )
    outputs = "o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight"
    for name, parameter in model.named_parameters():
        if name.endswith(outputs):  # GPT-2's init: 2L branches add up in the residual stream
            parameter.data /= math.sqrt(2 * config.num_hidden_layers)

    def drop(module: nn.Module, _, output):
        first, *rest = output if isinstance(output, tuple) else (output,)
        first = F.dropout(first, dropout, module.training)
        return (first, *rest) if isinstance(output, tuple) else first

    branches = [child for layer in model.model.layers for child in layer.children()]
    for module in (model.get_input_embeddings(), *branches):
        if "Norm" not in type(module).__name__:
            module.register_forward_hook(drop)
    return model


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_) -> tuple:
    """Compute transformers' chunk_gated_delta_rule from an empty state, in fp32.

    transformers' own solves the systems row by row, in 64 steps a layer, and keeps each for the
    backward pass. q, k [B, S, K, Ck], v [B, S, H, Cv], g and beta [B, S, H] -> out [B, S, H, Cv]
    and no state.
    """
    with torch.autocast(v.device.type, enabled=False):
        state = torch.zeros(len(v), v.shape[2], k.shape[3], v.shape[3], device=v.device)
        return chunk_in_torch(q, k, v, g.float(), beta.float(), state)[0], None


@contextmanager
def own_delta_rule(family: str) -> Iterator[None]:
    """Let transformers' class of a hybrid family compute `delta_rule`."""
    if family not in MODEL_TYPES:
        yield
        return
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    rule = torch.compiler.disable(delta_rule)  # its loop would be unrolled in every layer
    with mock.patch.object(module, "torch_chunk_gated_delta_rule", rule):
        yield


def predict(model: nn.Module, tokens: Tensor, weights: dict | None = None) -> tuple[Tensor, ...]:
    """Run the model on tokens [B, S], with some of its `weights` replaced.

    Return fp32 logits [B, S, V], the load-balancing loss [] and the used experts [L, B, S, E].
    The loss is that of the Switch Transformer (arXiv 2101.03961, section 2.2), as a mean over
    layers; an even load gives 1. transformers' own `aux_loss` pools the layers, so that a busy
    expert in one layer compensates for an unused one in another.
    """
    arguments = {"output_router_logits": True, "use_cache": False}
    output = functional_call(model, weights or {}, (tokens,), arguments)
    if output.get("router_logits") is None:
        family = model.config.model_type
        raise ValueError(
            f"transformers {transformers.__version__} reports no router logits of {family}: "
            "install a newer release, or choose another --family"
        )
    probs = torch.stack(output.router_logits).float().softmax(-1).unflatten(1, tokens.shape)
    n_active, n_expert = model.config.num_experts_per_tok, probs.shape[-1]
    used = torch.zeros_like(probs).scatter(-1, probs.topk(n_active).indices, 1.0)
    balance = (used.mean((1, 2)) / n_active * probs.mean((1, 2))).sum(-1).mean() * n_expert
    return output.logits.float(), balance, used


@torch.inference_mode()
def score(
    model: "transformers.PreTrainedModel", ids: list[int], window: int
) -> tuple[float, Tensor]:
    """Return the nats of `ids[1:]` and each expert's load [L, E], 1 for an even load.

    Windows of `window` tokens advance by half of that. Each token is scored once, in the first
    window that holds it, so all but the first tokens have at least `window / 2` tokens of context.
    """
    tokens = torch.tensor(ids, device=model.device)
    nats, load = 0.0, 0.0
    for start in range(0, max(1, len(ids) - 1 - window // 2), window // 2):
        part = tokens[start : start + window + 1]
        new = slice(window // 2 if start else 0, None)  # the previous window scored the others
        logits, _, used = predict(model, part[None, :-1])
        nats += F.cross_entropy(logits[0, new], part[1:][new], reduction="sum").double().item()
        load += used[:, 0, new].sum(1).double().cpu()
    return nats, load / load.mean(1, keepdim=True)


# ----------------------------------------------------------------------------------------- training


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for stacks of matrices: parameters [..., rows, columns].

    torch.optim.Muon takes one matrix at a time. For hundreds of small experts that is a hundred
    thousand kernels a step, and most of the training's time. Updates have AdamW's size, so both
    share one learning rate (arXiv 2502.16982, 2.2).
    """

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p.grad)
                average = state["momentum"].lerp_(p.grad, 1 - momentum)
                update = orthogonalize(p.grad.lerp(average, momentum))
                p.mul_(1 - rate * group["weight_decay"])
                p.add_(update, alpha=-rate * 0.2 * math.sqrt(max(p.shape[-2:])))


def orthogonalize(x: Tensor, steps: int = 5) -> Tensor:
    """[..., rows, columns] -> about U V^T of each matrix's SVD, bf16, by Newton-Schulz."""
    if x.shape[-2] > x.shape[-1]:
        return orthogonalize(x.mT, steps).mT
    x = x.bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):  # Jordan's coefficients: singular values end between 0.7 and 1.2
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def matrices(name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter as a stack of matrices [..., rows, columns] that shares its memory.

    It shares the gradient too. `gate_up_proj` is a stack of two matrices an expert.
    """
    if not name.endswith("gate_up_proj"):
        return parameter
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    stack = nn.Parameter(parameter.data.unflatten(-2, (2, -1)))
    stack.grad = parameter.grad.unflatten(-2, (2, -1))
    return stack


def build_optimizers(model: "transformers.PreTrainedModel", options: argparse.Namespace) -> list:
    """Return Muon for the layers' matrices, AdamW for embeddings, routers, norms and biases."""
    by_muon, decayed, others = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("bias"):
            others.append(parameter)
        elif "layers" not in name or any(part in name for part in ("router", "gate.w", "conv1d")):
            decayed.append(parameter)
        else:
            by_muon.append(matrices(name, parameter))
    decay = {"lr": options.lr, "weight_decay": options.weight_decay}
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return [Muon(by_muon, **decay), torch.optim.AdamW(groups, **decay, betas=(0.9, 0.95))]


def batches(
    documents: list[Tensor], keep: Tensor, batch: int, length: int, seed: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (epoch, inputs [B, S], targets [B, S]) without end, on the documents' device.

    Each epoch draws document i with probability keep[i], concatenates the documents in a new order,
    cuts windows from a new offset and shuffles them. It drops incomplete windows and batches.
    """
    generator = torch.Generator().manual_seed(seed)
    for epoch in itertools.count():
        order = torch.randperm(len(documents), generator=generator)
        order = order[torch.rand(len(documents), generator=generator) < keep[order]].tolist()
        stream = torch.cat([documents[i] for i in order])
        stream = stream[int(torch.randint(length, (1,), generator=generator)) :]
        count = (len(stream) - 1) // length
        if count < batch:
            text = f"the training text fills {count} windows of {length}"
            raise ValueError(f"{text}: less than one batch of {batch}")
        inputs, targets = (stream[i : i + count * length].view(count, length) for i in (0, 1))
        rows = torch.randperm(count, generator=generator).to(stream.device)
        for i in range(0, count - batch + 1, batch):
            yield epoch, inputs[rows[i : i + batch]], targets[rows[i : i + batch]]


def build_loss(
    model: "transformers.PreTrainedModel",
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a function from inputs and targets to the loss and the load-balancing loss.

    On a GPU it is compiled and runs in bf16. The experts' weights are cast by hand, because
    autocast does not cover grouped_mm, and Inductor compiles that for bf16 only.
    """
    cuda = model.device.type == "cuda"

    def loss_of(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        experts = {n: p.bfloat16() for n, p in model.named_parameters() if cuda and p.dim() == 3}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=cuda):
            logits, balance, _ = predict(model, inputs, experts)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), balance

    return torch.compile(loss_of) if cuda else loss_of


def update(
    model: nn.Module, average: nn.Module, optimizers: list, step: int, options: argparse.Namespace
) -> None:
    """Step the weights by their gradients, which become zero, and their moving average.

    The learning rate rises for `--warmup` steps, then falls linearly to zero.
    """
    rate = options.lr * min(1.0, step / options.warmup, 1 - (step - 1) / options.steps)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    model.zero_grad(set_to_none=False)  # Muon's stacks are views of these gradients
    # Decay the poor weights of the first steps faster.
    fresh = 1 - min(options.ema, step / (step + 9))
    with torch.no_grad():
        torch._foreach_lerp_([*average.parameters()], [*model.parameters()], fresh)


def train(
    model: "transformers.PreTrainedModel",
    stream: Iterator[tuple[int, Tensor, Tensor]],
    evaluate: "Callable[[transformers.PreTrainedModel], float]",
    options: argparse.Namespace,
) -> "tuple[transformers.PreTrainedModel, dict]":
    """Train for `--steps`. Return the averaged weights that validate best, and statistics.

    `evaluate` gives validation bits per byte of the averaged weights, `--evals` times.
    """
    average = copy.deepcopy(model).eval()
    optimizers = build_optimizers(model.train(), options)
    loss_of, best, evals, started = build_loss(model), {}, 0, None
    bar = tqdm(range(1, options.steps + 1), desc="train", unit="step")
    for step in bar:
        epoch, inputs, targets = next(stream)
        loss, balance = loss_of(inputs, targets)
        (loss + options.balance * balance).backward()
        update(model, average, optimizers, step, options)
        if started is None or step % 20 == 0:  # the only synchronization with the GPU
            bar.set_postfix_str(f"epoch {epoch}, loss {loss:.3f}, balance {balance:.3f}")
            started = started or time.perf_counter()  # exclude compilation
        if step * options.evals >= (evals + 1) * options.steps:
            evals, bits = evals + 1, evaluate(average)
            tqdm.write(f"step {step}: {bits:.4f} validation bits per byte", file=sys.stderr)
            if bits < best.get("bits", math.inf):
                best = {"bits": bits, "step": step, "weights": copy.deepcopy(average.state_dict())}
    average.load_state_dict(best["weights"])
    return average, {
        "validation_bits_per_byte": best["bits"],
        "chosen_step": best["step"],
        "steps": step,
        "epochs": epoch + 1,
        "train_seconds": time.perf_counter() - started,
    }


# --------------------------------------------------------------------------------------------- head


class Head(nn.Module):
    """A head for multi-token prediction beside a frozen model, in transformers' own module.

    Its layer begins as the model's last one, which has attention.
    """

    def __init__(self, model: "transformers.PreTrainedModel"):
        super().__init__()
        last, config = model.model.layers[-1], model.config
        norm = type(last.input_layernorm)
        layer = MtpLayer(config, type(last), norm, config.num_hidden_layers - 1)
        layer.mtp_block.load_state_dict(last.state_dict())
        nn.init.normal_(layer.eh_proj.weight, std=0.02)
        self.layers, self.model = nn.ModuleList([layer]), (model,)  # hidden from nn.Module

    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        """states [B, S, D] and the tokens [B, S] after theirs -> states of the tokens after."""
        (model,) = self.model
        embedded = model.get_input_embeddings()(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rope = model.model.rotary_emb(embedded, positions)
        return self.layers[0](embedded, states, rope, None, positions, None)


def head_loss(model: "transformers.PreTrainedModel", head: Head, inputs: Tensor) -> list[Tensor]:
    """Return the cross-entropies of a chain of DEPTH drafts with the model's own distributions.

    inputs [B, S]. A draft after the first reads the head's states of all earlier positions, where
    decoding has the model's: one pass for all positions is worth that.
    """
    with torch.no_grad():
        states = model.model(inputs, use_cache=False).last_hidden_state
        wanted = model.lm_head(states).softmax(-1)
    states, losses = states[:, :-1], []
    for depth in range(1, DEPTH + 1):
        states = head(states, inputs[:, depth:])
        logits = model.lm_head(states).flatten(0, 1)
        losses.append(F.cross_entropy(logits, wanted[:, depth:].flatten(0, 1)))
        states = states[:, :-1]
    return losses


def train_head(
    model: "transformers.PreTrainedModel",
    stream: Iterator[tuple[int, Tensor, Tensor]],
    options: argparse.Namespace,
) -> tuple[Head, dict]:
    """Train a head for `--steps`. Return it with averaged weights, and statistics."""
    head, started = Head(model), time.perf_counter()
    average, optimizers = copy.deepcopy(head), build_optimizers(head, options)
    bar = tqdm(range(1, options.steps + 1), desc="train", unit="step")
    for step in bar:
        _, inputs, _ = next(stream)
        losses = head_loss(model, head, inputs)
        sum(losses).backward()
        update(head, average, optimizers, step, options)
        if step % 20 == 0:
            bar.set_postfix_str(", ".join(f"{loss:.3f}" for loss in losses))
    return average, {
        "losses": [loss.item() for loss in losses],
        "seconds": time.perf_counter() - started,
    }


def save_head(head: Head, folder: Path) -> int:
    """Add a head to a published folder: HEAD_FILE in bf16, and its names in the index.

    Return the number of its parameters. The other files stay as they are.
    """
    layer = head.layers[0]
    tensors = {f"mtp.layers.0.{name}": t for name, t in layer.mtp_block.state_dict().items()}
    outer = layer.enorm, layer.hnorm, layer.eh_proj, layer.post_norm
    names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
    tensors |= {f"mtp.{n}.weight": module.weight for n, module in zip(names, outer, strict=True)}
    tensors = {name: t.detach().bfloat16().contiguous() for name, t in tensors.items()}
    save_file(tensors, folder / HEAD_FILE, metadata={"format": "pt"})
    (folder / HEAD_FILE).chmod(0o644)  # safetensors lets only the owner read its files
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"] |= dict.fromkeys(tensors, HEAD_FILE)
    write_json(path, index)
    return sum(tensor.numel() for tensor in tensors.values())


def run_head(options: argparse.Namespace, device: torch.device) -> dict:
    """Train a head for the model in `--head`, and add it there. Raises ValueError for no model."""
    folder = options.head
    options.tokenizer = folder / "tokenizer.model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(device).requires_grad_(False)
    if model.config.model_type not in MODEL_TYPES.values():
        raise ValueError(
            f"--head {folder}: only {', '.join(MODEL_TYPES.values())} has a head here, name one"
        )
    data = load_data(options, model.config.vocab_size)
    documents = [torch.tensor([BOS, *ids, EOS], device=device) for ids in data.ids]
    keep = torch.tensor([options.test_share if is_test(n) else 1.0 for n in data.corpus.train])
    stream = batches(documents, keep, options.batch_size, options.seq_len, options.seed)
    torch.manual_seed(options.seed)
    with own_delta_rule(next(iter(MODEL_TYPES))):
        head, facts = train_head(model, stream, options)
    return facts | {"parameters": save_head(head, folder)}


# --------------------------------------------------------------------------------------- checkpoint


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_model(model: "transformers.PreTrainedModel", folder: Path) -> None:
    """Write the configs, two bf16 shards of about equal size, and their index."""
    model = copy.deepcopy(model).bfloat16()
    # Save one file first: most families store each expert apart, which the model does not show.
    # The first shard ends before the tensor that would exceed the limit, so with half of the bytes
    # and the largest such tensor as the limit, the rest always fits into the second shard.
    model.save_pretrained(folder)
    whole = folder / "model.safetensors"
    sizes = {name: weight.nbytes for name, weight in load_file(whole).items()}
    whole.unlink()
    largest = max(size for name, size in sizes.items() if ".layers." in name)
    model.save_pretrained(folder, max_shard_size=sum(sizes.values()) // 2 + largest)
    for shard in folder.glob("*.safetensors"):
        shard.chmod(0o644)  # safetensors lets only the owner read its files
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # Readers of transformers 4's config.json expect these fields outside rope_parameters.
    names = "rope_theta", "partial_rotary_factor"
    rope = {name: value for name, value in config["rope_parameters"].items() if name in names}
    config |= {"torch_dtype": config["dtype"]} | rope
    write_json(folder / "config.json", config)


def save_tokenizer(tokenizer: sentencepiece.SentencePieceProcessor, folder: Path) -> None:
    """Write the sentencepiece model and the config with which transformers loads it."""
    (folder / "tokenizer.model").write_bytes(tokenizer.serialized_model_proto())
    config = {"add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False}
    config |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config |= {"model_max_length": SIZES["max_position_embeddings"]}
    write_json(folder / "tokenizer_config.json", {**config, "tokenizer_class": "LlamaTokenizer"})


@torch.inference_mode()
def sample(model: "transformers.PreTrainedModel", tokenizer, prompt: str, new_tokens: int) -> str:
    """Continue the prompt at temperature 0.8, seed 0."""
    torch.manual_seed(0)
    ids = torch.tensor([[BOS, *tokenizer.encode(prompt)]], device=model.device)
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 0, "pad_token_id": EOS}
    ids = model.generate(ids, max_new_tokens=new_tokens, **settings)[0].tolist()
    return tokenizer.decode([i for i in ids if i > EOS]).rstrip()


def unigram_bits(documents: list[list[int]], heldout: list[int], vocab_size: int) -> float:
    """Return the bits of `heldout` in a unigram model: training token counts, plus one."""
    ids = torch.tensor([*itertools.chain(*documents)])
    counts = torch.bincount(ids, minlength=vocab_size).double() + 1
    return -(counts / counts.sum()).log2()[torch.tensor(heldout)].sum().item()


def write_checkpoint(
    folder: Path,
    model: "transformers.PreTrainedModel",
    data: Data,
    facts: dict,
    options: argparse.Namespace,
) -> dict:
    """Write the checkpoint, measure it as saved on the held-out text, and write its README.

    `facts` are the statistics of `train`. Returns the summary that the command prints.
    """
    tokenizer, config, text = data.tokenizer, model.config, "".join(data.corpus.heldout.values())
    (folder / "heldout.txt").write_bytes(text.encode())
    save_tokenizer(tokenizer, folder)
    save_model(model, folder)

    saved = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(
        model.device
    )
    tokens, size = tokenizer.encode(text), len(text.encode())
    nats, load = score(saved, [BOS, *tokens], options.seq_len)
    summary = facts | {
        "bits_per_byte": nats / math.log(2) / size,
        "perplexity": math.exp(nats / len(tokens)),
        "unigram_bits_per_byte": unigram_bits(data.ids, tokens, config.vocab_size) / size,
        "tokens": len(tokens),
        "bytes": size,
        "min_load": load.min().item(),
        "max_load": load.max().item(),
        "parameters": sum(parameter.numel() for parameter in saved.parameters()),
    }
    hardware = torch.cuda.get_device_name() if model.device.type == "cuda" else "the CPU"
    duration = f"{facts['train_seconds']:.0f} s of training on {hardware}"
    rows = (f"| {i} | {row.min():.2f} | {row.max():.2f} |" for i, row in enumerate(load))
    flags = [f"--{name} {getattr(options, name)}" for name in ("family", *SETTINGS)]
    readme = README_FILE.read_text(encoding="utf-8").format(
        **summary,
        options=options,
        config=config,
        leaks=data.leaks,
        experts=load.shape[1],
        time="a smoke run" if options.smoke else duration,  # a smoke run is reproducible
        torch=torch.__version__,
        train_files=len(data.ids),
        train_tokens=sum(map(len, data.ids)),
        missing=", ".join(data.corpus.missing) or "none",
        name=options.output_dir.name,
        flags=" ".join(["--smoke"] * options.smoke + flags),
        load_table="\n".join(rows),
        prompt=PROMPT,
        sample=sample(saved, tokenizer, PROMPT, options.sample_tokens),
    )
    (folder / "README.md").write_text(readme, encoding="utf-8")
    return summary


# ------------------------------------------------------------------------------------------ command


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the options. --smoke changes the defaults of those in SETTINGS."""
    parser = build_parser()
    if parser.parse_known_args(arguments)[0].smoke:
        parser.set_defaults(**{name: smoke for name, (_, smoke, _) in SETTINGS.items()})
    return parser.parse_args(arguments)


def check_options(options: argparse.Namespace) -> torch.device:
    """Return the device; set `stdlib_version` if it is known. Raises ValueError for a mistake."""
    own = options.stdlib == Path(sysconfig.get_path("stdlib"))
    options.stdlib_version = options.stdlib_version or (platform.python_version() if own else None)
    cuda, device = torch.cuda.is_available(), options.device
    counts = "steps", "batch_size", "seq_len", "evals", "warmup"
    small = [name for name in counts if getattr(options, name) < 1]
    mistakes = {
        f"{options.output_dir} exists: replace it with --force, or choose another --output_dir": (
            options.output_dir.exists() and not options.force and not options.head
        ),
        f"--head {options.head}: no model with a tokenizer is there, name a folder of one": (
            options.head and not (options.head / "tokenizer.model").is_file()
        ),
        f"{options.stdlib} is not Python's library (no abc.py): name its folder with --stdlib": (
            not (options.stdlib / "abc.py").is_file()
        ),
        "--stdlib needs --stdlib_version (such as 3.11.7) for the README": (
            options.stdlib_version is None
        ),
        f"{options.tokenizer} does not exist: leave --tokenizer out to train one": (
            options.tokenizer and not options.tokenizer.is_file()
        ),
        f"--{' and --'.join(small)} must be at least 1": small,
        "no CUDA device is available: use --device cpu": device == "cuda" and not cuda,
    }
    for mistake, made in mistakes.items():
        if made:
            raise ValueError(mistake)
    return torch.device("cuda" if cuda and device != "cpu" and not options.smoke else "cpu")


def run(options: argparse.Namespace) -> dict:
    """Train, write the checkpoint, return its summary. Raises ValueError for a user's mistake."""
    device, started = check_options(options), time.perf_counter()
    if options.smoke:
        torch.set_num_threads(1)  # a fixed order of summation
    if options.head:
        return run_head(options, device)
    sizes = SMOKE_SIZES if options.smoke else {}
    data = load_data(options, (SIZES | sizes)["vocab_size"])
    torch.manual_seed(options.seed)
    model = build_model(options.family, options.dropout, **sizes).to(device)

    documents = [torch.tensor([BOS, *ids, EOS], device=device) for ids in data.ids]
    keep = torch.tensor([options.test_share if is_test(n) else 1.0 for n in data.corpus.train])
    stream = batches(documents, keep, options.batch_size, options.seq_len, options.seed)
    text = "".join(data.corpus.validation.values())
    ids = [BOS, *data.tokenizer.encode(text)]

    def evaluate(model: "transformers.PreTrainedModel") -> float:
        return score(model, ids, options.seq_len)[0] / math.log(2) / len(text.encode())

    with own_delta_rule(options.family):
        model, facts = train(model, stream, evaluate, options)
    options.output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.output_dir.parent, prefix=".tiny-moe-") as scratch:
        folder = Path(scratch) / "new"
        folder.mkdir()
        summary = write_checkpoint(folder, model, data, facts, options)
        if options.output_dir.exists():
            options.output_dir.rename(Path(scratch) / "old")
        folder.rename(options.output_dir)
    return {**summary, "seconds": time.perf_counter() - started}


@command(out_of_memory="use a smaller --batch_size")
def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    print(json.dumps(run(parse_options())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
