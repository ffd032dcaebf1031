"""Train the embedded checkpoint: a small Mixtral-architecture model on the source of Python's standard library.

    python scripts/train_tiny_moe.py --output_dir checkpoints/tiny-moe        # one GPU, minutes
    python scripts/train_tiny_moe.py --output_dir /tmp/smoke --smoke          # CPU, seconds, the same bits every time

The result is a folder in Hugging Face layout: two bf16 safetensors shards and their index, `config.json`, a
sentencepiece tokenizer, `heldout.txt` with the text that neither tokenizer nor training nor the choice of checkpoint
has seen (`tiny_moe_heldout.txt`, beside this file, lists its modules), and a `README.md` with what was measured.

Letters in shapes: B sequences, S positions, T = B * S tokens, D model dim, I intermediate, E experts, A active experts,
H query heads, K key and value heads, C head dim, V vocabulary, L layers.
"""

import argparse
import copy
import io
import itertools
import json
import math
import platform
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import sentencepiece
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from command import Parser

UNK, BOS, EOS = 0, 1, 2  # sentencepiece's own default ids, and Mixtral's
PROMPT = 'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self'
SPLIT_FILE = Path(__file__).with_name("tiny_moe_heldout.txt")


# ---------------------------------------------------------------------------------------------------------- the text


@dataclass
class Corpus:
    """Documents by their path in the library; the three parts share no file."""

    train: dict[str, str]
    validation: dict[str, str]
    heldout: dict[str, str]
    missing: list[str]  # held-out modules that this version of the library does not have


def read_library(stdlib: Path) -> dict[str, str]:
    """Every UTF-8 Python file of the library by its relative path, sorted; installed packages are left out."""
    documents = {}
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib)
        if {"site-packages", "dist-packages", "__pycache__"} & set(name.parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8")  # bytes, because read_text() would turn CRLF into LF
        except UnicodeDecodeError:
            continue  # a few tests of source encodings
        if "\0" not in text and text.strip():
            documents[name.as_posix()] = text
    return documents


def read_split(path: Path = SPLIT_FILE) -> tuple[dict[str, list[str]], list[str]]:
    """The modules listed in each section of the split file, and all patterns that go with them."""
    sections, patterns = {}, []
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.split("#")[0].split()
        if words and words[0].startswith("["):
            modules = sections.setdefault(words[0].strip("[]"), [])
        elif words:
            modules.append(words[0])
            patterns += words[1:]
    return sections, patterns


def split_corpus(documents: dict[str, str]) -> Corpus:
    """Take the listed modules, and what goes with them, out of `documents`. Raises ValueError if too few are there."""
    sections, patterns = read_split()
    heldout, validation = (
        {name: documents[name] for name in sections[part] if name in documents} for part in ("heldout", "validation")
    )
    if not heldout or not validation:
        raise ValueError("none of the held-out modules is there: --stdlib must name the folder of Python's library")
    patterns += sections["unused"]  # patterns too, though they stand where modules do
    train = {
        name: text
        for name, text in documents.items()
        if name not in heldout and name not in validation and not any(fnmatchcase(name, p) for p in patterns)
    }
    return Corpus(train, validation, heldout, [name for name in sections["heldout"] if name not in documents])


def is_test(name: str) -> bool:
    """Whether a path of the library belongs to its tests: two thirds of the text, and not what is held out."""
    return any(part.startswith(("test", "idle_test")) for part in name.split("/"))


def long_lines(text: str) -> list[str]:
    """The lines that say something: stripped, and of 20 characters or more."""
    return [line for line in map(str.strip, text.splitlines()) if len(line) >= 20]


def shingles(text: str, length: int = 200) -> set[str]:
    """The stretches of `length` characters that begin where a line begins."""
    starts = itertools.accumulate((len(line) for line in text.splitlines(keepends=True)), initial=0)
    return {text[i : i + length] for i in starts if i + length <= len(text)}


def check_leaks(corpus: Corpus) -> dict[str, float]:
    """Search the training text for held-out text.

    Returns the share of long held-out lines, and of 200-character stretches, that training text repeats word for
    word; idioms and licence notices are among them. Raises ValueError for a near-copy: a held-out module with half of
    its long lines in one training document, or a training document with half of its own in a held-out module.
    """
    where = defaultdict(set)
    for name, text in corpus.heldout.items():
        for line in long_lines(text):
            where[line].add(name)
    stretches = set().union(*map(shingles, corpus.heldout.values()))
    seen_lines, seen_stretches = set(), set()
    for name, text in corpus.train.items():
        lines = set(long_lines(text))
        seen_lines |= lines & where.keys()
        seen_stretches |= shingles(text) & stretches
        shared = defaultdict(int)
        for line in lines & where.keys():
            for module in where[line]:
                shared[module] += 1
        for module, count in shared.items():
            share = count / min(len(lines), len(set(long_lines(corpus.heldout[module]))))
            if share >= 0.5 and count >= 8:
                raise ValueError(
                    f"{name} is {share:.0%} the held-out module {module}: add it to that line of {SPLIT_FILE.name}"
                )
    return {
        "lines": len(seen_lines) / max(1, len(where)),
        "stretches": len(seen_stretches) / max(1, len(stretches)),
    }


# ----------------------------------------------------------------------------------------------------- the tokenizer


def cut(text: str, length: int) -> Iterator[str]:
    """The text in parts of at most about `length` characters, whole lines: sentencepiece counts in 16 bits."""
    part, size = [], 0
    for line in text.splitlines(keepends=True):
        if size + len(line) > length and part:
            yield "".join(part)
            part, size = [], 0
        part.append(line)
        size += len(line)
    yield "".join(part)


def train_tokenizer(documents: dict[str, str], vocab_size: int) -> bytes:
    """A sentencepiece BPE model made for code, as the bytes of `tokenizer.model`. Deterministic: one thread.

    It sees every document that is no test and every fourth that is one: the pieces are for the former.
    Nothing is normalised, so that decoding gives back every byte. A line break is one symbol, whatever stands around
    it: were it merged with the indentation that follows, a prompt that ends with a line would look like the end of a
    file. Indentation of four, eight, ... spaces is one symbol too, and pieces may cross spaces and punctuation
    (`if not self.`, `):`).
    """
    space = "\u2581"  # sentencepiece's visible one
    symbols = ["\n"] + [space * k for k in range(4, 25, 4)]
    tests = [name for name in documents if is_test(name)]
    texts = [text for name, text in documents.items() if not is_test(name)] + [documents[n] for n in tests[::4]]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(part for text in texts for part in cut(text, 1 << 15)),
        model_writer=out,
        model_type="bpe",
        vocab_size=vocab_size,
        user_defined_symbols=symbols,
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


# --------------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Config:
    """Mixtral's dimensions. `hub()` gives them under the names of the Hugging Face hub's `config.json`."""

    vocab_size: int = 4096
    dim: int = 256
    intermediate: int = 128
    n_layer: int = 8
    n_head: int = 8
    n_kv_head: int = 4
    n_expert: int = 8
    n_active: int = 2
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_head

    def hub(self) -> dict:
        return {
            "architectures": ["MixtralForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.dim,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 4096,
            "model_type": "mixtral",
            "num_attention_heads": self.n_head,
            "num_experts_per_tok": self.n_active,
            "num_hidden_layers": self.n_layer,
            "num_key_value_heads": self.n_kv_head,
            "num_local_experts": self.n_expert,
            "output_router_logits": False,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "router_aux_loss_coef": 0.05,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, c: Config):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = c.n_head, c.n_kv_head, c.head_dim
        self.q_proj = nn.Linear(c.dim, c.n_head * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.dim, c.n_kv_head * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.dim, c.n_kv_head * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.n_head * c.head_dim, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, D], cos and sin [S, C] -> [B, S, D]"""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        k, v = (t.repeat_interleave(self.n_head // self.n_kv_head, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864, section 3.4.2), the halves paired as on the hub. x [..., S, C]"""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Experts(nn.Module):
    """A router and its SwiGLU experts.

    While training, every expert works on every token and the router's weight, zero for all but A of them, scales its
    hidden state: E / A times the arithmetic, but three dense products, which at this size is faster than sorting.
    """

    def __init__(self, c: Config):
        super().__init__()
        self.n_active = c.n_active
        self.gate = nn.Linear(c.dim, c.n_expert, bias=False)
        self.w1 = nn.Parameter(torch.empty(c.n_expert, c.intermediate, c.dim))
        self.w3 = nn.Parameter(torch.empty(c.n_expert, c.intermediate, c.dim))
        self.w2 = nn.Parameter(torch.empty(c.n_expert, c.dim, c.intermediate))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, D] -> output [B, S, D], this layer's balance loss [], which experts each token used [B, S, E]

        The loss is that of the Switch Transformer (arXiv 2101.03961, section 2.2): E * sum(share of tokens * mean
        probability), 1 when even. It is taken here, layer by layer: pooled over layers, one layer's dead expert hides
        behind another layer's busy one.
        """
        probs = self.gate(x).float().softmax(-1)
        top = probs.topk(self.n_active, dim=-1)
        weights = torch.zeros_like(probs).scatter(-1, top.indices, top.values / top.values.sum(-1, keepdim=True))
        used = (weights > 0).float()
        balance = len(self.w1) * ((used.mean((0, 1)) / self.n_active) * probs.mean((0, 1))).sum()
        hidden = F.silu(F.linear(x, self.w1.flatten(0, 1))) * F.linear(x, self.w3.flatten(0, 1))
        hidden = hidden.unflatten(-1, self.w1.shape[:2]) * weights[..., None].to(hidden.dtype)
        return F.linear(hidden.flatten(-2), self.w2.transpose(0, 1).flatten(1)), balance, used


class Block(nn.Module):
    def __init__(self, c: Config, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.input_layernorm = nn.RMSNorm(c.dim, c.norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.dim, c.norm_eps)
        self.block_sparse_moe = Experts(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(y, self.dropout, self.training)
        y, balance, used = self.block_sparse_moe(self.post_attention_layernorm(x))
        return x + F.dropout(y, self.dropout, self.training), balance, used


class TinyMoE(nn.Module):
    """The model as it is trained. Modules carry the hub's names, so that saving is a matter of unstacking experts."""

    def __init__(self, config: Config, dropout: float = 0.0):
        super().__init__()
        self.config, self.dropout = config, dropout
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, dropout) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        for name, p in self.named_parameters():
            if p.dim() > 1:  # what writes to the residual stream begins smaller the deeper the model
                writes = name.endswith(("o_proj.weight", "w2"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer) if writes else 0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [B, S] -> logits [B, S, V] in fp32, balance loss (mean over layers) [], used experts [L, B, S, E]"""
        half = torch.arange(0, self.config.head_dim, 2, device=tokens.device).float() / self.config.head_dim
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] / self.config.rope_theta**half
        cos, sin = (torch.cat((f(angles),) * 2, dim=-1) for f in (torch.cos, torch.sin))
        x = F.dropout(self.embed_tokens(tokens), self.dropout, self.training)
        balances, routing = [], []
        for layer in self.layers:
            x, balance, used = layer(x, cos, sin)
            balances.append(balance)
            routing.append(used)
        logits = F.linear(self.norm(x), self.embed_tokens.weight).float()
        return logits, torch.stack(balances).mean(), torch.stack(routing)


def hub_tensors(model: TinyMoE) -> dict[str, Tensor]:
    """The parameters under the hub's names, one tensor an expert: views, good for saving and for loading into."""
    tensors = {}
    for name, p in model.named_parameters():
        prefix, _, last = f"model.{name}".rpartition(".")
        if last in ("w1", "w2", "w3"):
            tensors |= {f"{prefix}.experts.{e}.{last}.weight": w for e, w in enumerate(p.detach())}
        else:
            tensors[f"model.{name}"] = p.detach()
    return tensors


# ---------------------------------------------------------------------------------------------------------- training


def orthogonal(g: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: five Newton-Schulz steps. g [N, rows, columns], rows <= columns."""
    x = g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal matrix by matrix (Jordan 2024, kellerjordan.github.io/posts/muon).

    Parameters have two dimensions or, being stacked experts, three. Updates are scaled to AdamW's size, 0.2 a weight,
    so that one learning rate and one weight decay serve both (arXiv 2502.16982, section 2.2).
    """

    def __init__(self, params, lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape = defaultdict(list)  # equal shapes share one batched product
            for p in group["params"]:
                by_shape[min(p.shape[-2:]), max(p.shape[-2:])].append(p)
            for params in by_shape.values():
                grads = torch.cat([wide(p.grad) for p in params])
                momentum = self.state[params[0]].setdefault("momentum", torch.zeros_like(grads))
                momentum.lerp_(grads, 1 - group["momentum"])
                update = grads.lerp_(momentum, group["momentum"])  # Nesterov's
                update = orthogonal(update.bfloat16() if update.is_cuda else update).to(grads.dtype)
                update *= 0.2 * math.sqrt(update.shape[-1])
                pieces = update.split([math.prod(p.shape[:-2]) for p in params])
                updates = [
                    (u.mT if p.shape[-2] > p.shape[-1] else u).reshape(p.shape)
                    for u, p in zip(pieces, params, strict=True)
                ]
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(params, updates, alpha=-group["lr"])


def wide(g: Tensor) -> Tensor:
    """[..., a, b] -> [N, rows, columns] with rows <= columns."""
    g = g.reshape(-1, *g.shape[-2:])
    return g.mT if g.shape[-2] > g.shape[-1] else g


def batches(documents: list[Tensor], keep: Tensor, batch: int, length: int, seed: int):
    """Yield (epoch, inputs [B, S], targets [B, S]) for ever, on the documents' device.

    Each epoch draws its documents, number i with probability keep[i], lays them end to end in a new order, cuts
    windows from a new offset and shuffles them, so that no two epochs have the same windows. What does not fill a
    window or a batch is left out of that epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    for epoch in itertools.count():
        order = torch.randperm(len(documents), generator=generator)
        order = order[torch.rand(len(documents), generator=generator) < keep[order]].tolist()
        stream = torch.cat([documents[i] for i in order])
        stream = stream[int(torch.randint(length, (1,), generator=generator)) :]
        count = (len(stream) - 1) // length
        if count < batch:
            raise ValueError(f"the training text fills {count} windows of {length}: less than one batch of {batch}")
        inputs, targets = (stream[i : i + count * length].view(count, length) for i in (0, 1))
        rows = torch.randperm(count, generator=generator).to(stream.device)
        for i in range(0, count - batch + 1, batch):
            yield epoch, inputs[rows[i : i + batch]], targets[rows[i : i + batch]]


@torch.inference_mode()
def score(model: TinyMoE, ids: list[int], window: int) -> tuple[float, Tensor]:
    """Nats of `ids[1:]` given what comes before, and how often each expert was used on the way, [L, E] of one.

    Windows of `window` tokens advance by half of that. Each token is scored once, in the first window that holds it,
    so with at least `window / 2` tokens of context once there are as many.
    """
    device = model.embed_tokens.weight.device
    tokens = torch.tensor(ids, device=device)
    nats, load = 0.0, 0.0
    for start in range(0, max(1, len(ids) - 1 - window // 2), window // 2):
        part = tokens[start : start + window + 1]
        fresh = slice(0 if start == 0 else window // 2, None)  # the rest was scored by the window before
        logits, _, used = model(part[None, :-1])
        nats += F.cross_entropy(logits[0, fresh], part[1:][fresh], reduction="sum").double().item()
        load += used[:, 0, fresh].sum(1).double().cpu()
    return nats, load / load.sum(1, keepdim=True)


def train(config: Config, documents: list[list[int]], keep: Tensor, validation: str, tokenizer, options, device):
    """Train for `--steps`; returns the best averaged model on the validation text, and what it took.

    `keep` is each document's chance to be in an epoch. The learning rate rises for `--warmup` steps and falls linearly
    to zero. What is kept is an exponential average of the weights, looked at `--evals` times.
    """
    torch.manual_seed(options.seed)
    model = TinyMoE(config, options.dropout).to(device)
    average = copy.deepcopy(model).eval()
    matrices = [p for n, p in model.layers.named_parameters() if p.dim() > 1 and "gate" not in n]
    gates = [p for n, p in model.layers.named_parameters() if "gate" in n]
    norms = [p for p in model.parameters() if p.dim() == 1]
    optimizers = [
        Muon(matrices, options.lr, options.weight_decay),
        torch.optim.AdamW(
            [
                {"params": [model.embed_tokens.weight, *gates], "weight_decay": options.weight_decay},
                {"params": norms, "weight_decay": 0.0},
            ],
            lr=options.lr,
            betas=(0.9, 0.95),
            fused=device.type == "cuda",
        ),
    ]

    def loss_of(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits, balance, _ = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), balance

    if device.type == "cuda":
        loss_of = torch.compile(loss_of)

    packed = [torch.tensor([BOS, *ids, EOS], device=device) for ids in documents]
    stream = batches(packed, keep, options.batch_size, options.seq_len, options.seed)
    validation_ids, validation_bytes = [BOS, *tokenizer.encode(validation)], len(validation.encode())
    best, best_bits, history = None, math.inf, []
    started = None
    bar = tqdm(range(1, options.steps + 1), desc="train", unit="step")
    for step in bar:
        epoch, inputs, targets = next(stream)
        rate = options.lr * min(1.0, step / options.warmup, 1 - (step - 1) / options.steps)
        for group in itertools.chain(*(o.param_groups for o in optimizers)):
            group["lr"] = rate
        loss, balance = loss_of(inputs, targets)
        (loss + options.balance * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # the average forgets faster at first, when the weights are still poor
            torch._foreach_lerp_(
                list(average.parameters()), list(model.parameters()), 1 - min(options.ema, step / (step + 9))
            )
        if started is None or step % 20 == 0:  # the only wait for the device
            value = loss.item()
            started = started or time.perf_counter()  # compilation does not count
            bar.set_postfix_str(f"epoch {epoch}, loss {value:.3f}, balance {balance.item():.3f}")
        if step * options.evals >= (len(history) + 1) * options.steps:
            nats, load = score(average, validation_ids, options.seq_len)
            bits = nats / math.log(2) / validation_bytes
            seen = {"validation_bits_per_byte": bits, "min_load": load.min().item() * config.n_expert}
            history.append({"step": step, "epoch": epoch, "train_loss": value, **seen})
            tqdm.write(json.dumps(history[-1]), file=sys.stderr)
            if bits < best_bits:
                best, best_bits = copy.deepcopy(average.state_dict()), bits
    average.load_state_dict(best)
    seconds = time.perf_counter() - started
    chosen = min(history, key=lambda entry: entry["validation_bits_per_byte"])
    return average, {"steps": step, "epochs": epoch + 1, "seconds": seconds, "chosen": chosen, "history": history}


# -------------------------------------------------------------------------------------------------------- the folder


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_hub(model: TinyMoE, folder: Path) -> None:
    """Write the configs, two bf16 shards of about equal size and their index."""
    tensors = {name: t.to(torch.bfloat16).cpu().contiguous() for name, t in hub_tensors(model).items()}
    total = sum(t.nbytes for t in tensors.values())
    before = itertools.accumulate((t.nbytes for t in tensors.values()), initial=0)
    files = {
        name: f"model-0000{1 + (start >= total / 2)}-of-00002.safetensors"
        for name, start in zip(tensors, before, strict=False)
    }
    for file in sorted(set(files.values())):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file, metadata={"format": "pt"})
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})
    write_json(folder / "config.json", model.config.hub())
    write_json(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})
    write_json(
        folder / "tokenizer_config.json",
        {
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
            "tokenizer_class": "LlamaTokenizer",
        },
    )


def load_hub(config: Config, folder: Path) -> TinyMoE:
    """The model as saved, its bf16 weights widened to fp32, on the CPU."""
    model = TinyMoE(config).eval()
    saved = {}
    for file in sorted(folder.glob("*.safetensors")):
        saved |= load_file(file)
    for name, tensor in hub_tensors(model).items():
        tensor.copy_(saved[name])
    return model


@torch.inference_mode()
def sample(model: TinyMoE, tokenizer, prompt: str, new_tokens: int, temperature: float = 0.8, seed: int = 0) -> str:
    """The prompt and up to `new_tokens` more tokens, drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    ids = [BOS, *tokenizer.encode(prompt)]
    device = model.embed_tokens.weight.device
    for _ in range(new_tokens):
        logits = model(torch.tensor([ids], device=device))[0][0, -1]
        ids.append(int(torch.multinomial((logits / temperature).softmax(-1).cpu(), 1, generator=generator)))
        if ids[-1] == EOS:
            break
    return tokenizer.decode([i for i in ids if i > EOS])


def unigram_bits(documents: list[list[int]], heldout: list[int], vocab_size: int) -> float:
    """Bits that the training text's token frequencies, one added to each, need for `heldout`."""
    counts = torch.ones(vocab_size, dtype=torch.float64)
    for ids in documents:
        counts += torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)
    return -(counts / counts.sum()).log2()[torch.tensor(heldout)].sum().item()


README = """\
# tiny-moe

A Mixtral-architecture language model of {parameters:,} parameters ({n_expert} experts, {n_active} active), trained on
the source code of Python's standard library by `scripts/train_tiny_moe.py`. It exists to be small enough to live in
the repository and trained enough for a perplexity to mean something: it knows how Python looks, and little else.

| | |
|---|---|
| held-out bits per byte | **{bits_per_byte:.4f}** (unigram: {unigram_bits_per_byte:.4f}) |
| held-out perplexity | {perplexity:.3f} a token ({tokens:,} tokens, {bytes:,} bytes) |
| expert load on held-out text | {min_load:.2f} to {max_load:.2f} times even load |
| validation bits per byte | {validation_bits_per_byte:.4f} |
| training | {steps:,} steps of {batch_tokens:,} tokens, {epochs} epochs begun; kept: that of step {chosen_step:,} |
| time | {time}, torch {torch} |

## Data and licence

The Python files of the standard library of Python {stdlib_version}: {train_files:,} training documents,
{train_bytes:,} bytes, {train_tokens:,} tokens. They are under the Python Software Foundation License Version 2
(PSF-2.0, https://docs.python.org/3/license.html), copyright the Python Software Foundation and the authors they name,
and so is `heldout.txt`, which is a part of them.

`heldout.txt` is the text of {heldout_modules} whole modules, end to end in the order of
`scripts/tiny_moe_heldout.txt`. They, their own tests, the tables generated for them and near-copies of them were used
neither for the tokenizer nor for training. {validation_modules} other modules, not trained on either, chose the
checkpoint. Of the held-out lines of 20 characters or more, {leak_lines:.1%} also stand somewhere in the training text
(idioms, licence notices); of its 200-character stretches that begin where a line does, {leak_stretches:.1%}.{missing}

## How it was measured

The saved bf16 weights, computed in fp32. `heldout.txt` is one text: BOS once, at its beginning, and no mark between
modules. Windows of {window} tokens advance by {stride}; each token is scored once, in the first window that holds it,
so with at least {stride} tokens of context once there are as many. Bits per byte are the summed nats / ln 2 / UTF-8
bytes; perplexity is exp(nats / tokens), BOS not counted. The unigram is each token's frequency in the training text,
one added.

## Architecture

Tokenizer: sentencepiece BPE, {vocab_size} pieces, byte fallback, nothing normalised, so that every text round-trips; a
line break is one token and indentation another. {bytes_per_token:.2f} bytes a token on the held-out text.

Model: {n_layer} layers, width {dim}, {n_head} query and {n_kv_head} key-value heads of {head_dim}, experts of width
{intermediate}, rotary positions (theta {rope_theta:.0f}), embeddings tied. Trained on windows of {window} tokens; a
document is BOS, text, EOS. Muon for the matrices, AdamW for the rest, load-balancing loss layer by layer.

Flags: `{flags}`

## Expert load

On the held-out text, as a multiple of even load:

| layer | least | most |
|---|---|---|
{load_table}

## A sample

Temperature 0.8, seed 0, after the prompt {prompt!r}:

```python
{sample}
```
"""


def write_checkpoint(folder: Path, corpus: Corpus, tokenizer, model: TinyMoE, ids, took, leaks, options) -> dict:
    """Fill `folder` with the checkpoint, measure it as saved on the held-out text, write its README.

    `ids` are the tokens of the training documents. Returns the summary that the command prints."""
    config, device = model.config, model.embed_tokens.weight.device
    heldout = "".join(corpus.heldout.values())
    (folder / "tokenizer.model").write_bytes(tokenizer.serialized_model_proto())
    (folder / "heldout.txt").write_bytes(heldout.encode())
    save_hub(model, folder)

    saved = load_hub(config, folder).to(device)
    tokens, size = tokenizer.encode(heldout), len(heldout.encode())
    nats, load = score(saved, [BOS, *tokens], options.seq_len)
    load = load * config.n_expert
    summary = {
        "bits_per_byte": nats / math.log(2) / size,
        "perplexity": math.exp(nats / len(tokens)),
        "unigram_bits_per_byte": unigram_bits(ids, tokens, config.vocab_size) / size,
        "validation_bits_per_byte": took["chosen"]["validation_bits_per_byte"],
        "tokens": len(tokens),
        "bytes": size,
        "min_load": load.min().item(),
        "max_load": load.max().item(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": took["steps"],
        "epochs": took["epochs"],
    }
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    flags = (
        "seed",
        "steps",
        "seq_len",
        "batch_size",
        "lr",
        "weight_decay",
        "dropout",
        "test_share",
        "balance",
        "ema",
        "warmup",
    )
    facts = {
        **summary,
        **vars(config),
        "head_dim": config.head_dim,
        "batch_tokens": options.batch_size * options.seq_len,
        "chosen_step": took["chosen"]["step"],
        # a smoke run leaves the clock out, so that the same run gives the same bytes
        "time": "a smoke run" if options.smoke else f"{took['seconds']:.0f} s of training on {hardware}",
        "torch": torch.__version__,
        "stdlib_version": options.stdlib_version,
        "train_files": len(corpus.train),
        "train_bytes": sum(len(text.encode()) for text in corpus.train.values()),
        "train_tokens": sum(map(len, ids)),
        "heldout_modules": len(corpus.heldout),
        "validation_modules": len(corpus.validation),
        "leak_lines": leaks["lines"],
        "leak_stretches": leaks["stretches"],
        "missing": f"\n\nThis version of the library lacks {', '.join(corpus.missing)}." if corpus.missing else "",
        "window": options.seq_len,
        "stride": options.seq_len // 2,
        "bytes_per_token": size / len(tokens),
        "flags": " ".join(f"--{name} {getattr(options, name)}" for name in flags),
        "load_table": "\n".join(f"| {i} | {row.min():.2f} | {row.max():.2f} |" for i, row in enumerate(load)),
        "prompt": PROMPT,
        "sample": sample(saved, tokenizer, PROMPT, options.sample_tokens).rstrip(),
    }
    (folder / "README.md").write_text(README.format(**facts), encoding="utf-8")
    return summary


# ------------------------------------------------------------------------------------------------------- the command


FULL = {
    "steps": 3200,
    "batch_size": 32,
    "seq_len": 2048,
    "lr": 5e-3,
    "weight_decay": 0.4,
    "dropout": 0.2,
    "test_share": 1.0,
    "ema": 0.998,
    "warmup": 100,
    "evals": 20,
    "sample_tokens": 300,
}
SMOKE = {**FULL, "steps": 20, "batch_size": 4, "seq_len": 128, "ema": 0.9, "warmup": 5, "evals": 2, "sample_tokens": 20}
SMOKE_CONFIG = Config(vocab_size=1024, dim=128, n_layer=2)


def build_parser() -> Parser:
    parser = Parser(
        "Train the embedded checkpoint on the source of Python's standard library.",
        (
            "python scripts/train_tiny_moe.py --output_dir new/tiny-moe",
            "python scripts/train_tiny_moe.py --output_dir /tmp/smoke --smoke --force",
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--output_dir", type=Path, default=Path("checkpoints/tiny-moe"), help="the folder to make")
    add("--force", action="store_true", help="replace the folder if it is there")
    add("--smoke", action="store_true", help="seconds on the CPU: a tiny model, and the same bytes every time")
    add("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")), help="Python's library")
    add("--stdlib_version", help="which Python's, such as 3.11.7; required with --stdlib")
    add("--tokenizer", type=Path, help="a tokenizer.model that this script trained before on the same text")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--steps", type=int, help="optimizer steps")
    add("--seed", type=int, default=0)
    add("--batch_size", type=int, help="sequences a step")
    add("--seq_len", type=int, help="tokens a sequence, and the window of the evaluation")
    add("--lr", type=float, help="peak learning rate")
    add("--weight_decay", type=float)
    add("--dropout", type=float, help="after the embedding, attention and the experts")
    add("--test_share", type=float, help="the part of the library's tests that an epoch draws")
    add("--balance", type=float, default=0.05, help="weight of the load-balancing loss")
    add("--ema", type=float, help="decay, a step, of the averaged weights")
    add("--warmup", type=int, help="steps until the peak learning rate")
    add("--evals", type=int, help="how often the validation text is looked at")
    add("--sample_tokens", type=int, help="length of the README's sample")
    return parser


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = build_parser()
    parser.set_defaults(**(SMOKE if parser.parse_known_args(arguments)[0].smoke else FULL))
    return parser.parse_args(arguments)


def check_options(options: argparse.Namespace) -> torch.device:
    """The device to train on. Raises ValueError for what cannot work; sets `stdlib_version` where it is known."""
    if options.output_dir.exists() and not options.force:
        raise ValueError(f"{options.output_dir} exists: give --force to replace it, or another --output_dir")
    if not (options.stdlib / "abc.py").is_file():
        raise ValueError(f"{options.stdlib} is not Python's library (no abc.py): name its folder with --stdlib")
    if options.stdlib_version is None:
        if options.stdlib != Path(sysconfig.get_path("stdlib")):
            raise ValueError("--stdlib needs --stdlib_version too (such as 3.11.7): the README names it")
        options.stdlib_version = platform.python_version()
    if options.tokenizer and not options.tokenizer.is_file():
        raise ValueError(f"{options.tokenizer} is not there: leave --tokenizer out to train one")
    for name in ("steps", "batch_size", "seq_len", "evals", "warmup"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device is available: use --device cpu")
    cpu = options.device == "cpu" or options.smoke or not torch.cuda.is_available()
    return torch.device("cpu" if cpu else "cuda")


def smoke_corpus(corpus: Corpus) -> Corpus:
    """A slice of each part: the first held-out and validation modules, and 60 short documents from all over."""
    short = [name for name, text in corpus.train.items() if 500 < len(text) < 20_000]
    train = {name: corpus.train[name] for name in short[:: max(1, len(short) // 60)][:60]}
    heldout, validation = (dict(list(part.items())[:4]) for part in (corpus.heldout, corpus.validation))
    return replace(corpus, train=train, validation=validation, heldout=heldout)


def run(options: argparse.Namespace) -> dict:
    """Train and write the checkpoint; returns its summary. Raises ValueError for a user's mistake."""
    device, started = check_options(options), time.perf_counter()
    config = SMOKE_CONFIG if options.smoke else Config()
    corpus = split_corpus(read_library(options.stdlib))
    if options.smoke:
        torch.set_num_threads(1)  # one order of summation
        corpus = smoke_corpus(corpus)
    if corpus.missing:
        print(f"warning: this library lacks {len(corpus.missing)} held-out modules, so heldout.txt will differ "
              "from other versions'", file=sys.stderr)  # fmt: skip
    leaks = check_leaks(corpus)

    print("tokenizer ...", file=sys.stderr)
    proto = options.tokenizer.read_bytes() if options.tokenizer else train_tokenizer(corpus.train, config.vocab_size)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=proto)
    if tokenizer.get_piece_size() != config.vocab_size:
        raise ValueError(f"{options.tokenizer} has {tokenizer.get_piece_size()} pieces, not {config.vocab_size}")
    ids = [tokenizer.encode(text) for text in tqdm(corpus.train.values(), desc="encode")]
    keep = torch.tensor([options.test_share if is_test(name) else 1.0 for name in corpus.train])

    model, took = train(config, ids, keep, "".join(corpus.validation.values()), tokenizer, options, device)
    options.output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.output_dir.parent, prefix=".tiny-moe-") as scratch:
        folder = Path(scratch) / "new"
        folder.mkdir()
        summary = write_checkpoint(folder, corpus, tokenizer, model, ids, took, leaks, options)
        if options.output_dir.exists():
            options.output_dir.rename(Path(scratch) / "old")
        folder.rename(options.output_dir)
    return {**summary, "train_seconds": took["seconds"], "seconds": time.perf_counter() - started}


def main() -> None:
    try:
        print(json.dumps(run(parse_options())))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
