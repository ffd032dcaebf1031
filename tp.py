"""Tensor and expert parallelism: which shard of the model each rank holds, and the sharded modules.

    torchrun --standalone --nproc_per_node=4 generate.py --checkpoint_path DIR ...

Tensor parallelism (Shoeybi et al. 2019) shards attention by heads, each expert along I, and the
head along V. A block then all-reduces [T, D] twice: after `wo`, and after the weighted sum over
experts. Expert parallelism gives a rank E / N whole experts instead. Each family has a shard table
(models/). parallel/ has the processes and collectives.

These modules replace the model's: ShardedExperts its experts, GatheredHead its head, FusedScores or
MeanScores its router, AllReduceAddNorm (AllReduceSandwich, AllReduceStreams) its AddNorm.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from formats import FORMATS
from formats.packed import Packed
from formats.quantizer import match_shared_experts, pack_modules
from formats.regroup import Regrouping
from model import AddNorm, Experts, Linear, ModelArgs, MoE, RMSNorm
from models import build_model, family_of
from models.family import Shard
from models.layers.hyper_connections import StreamAddNorm, Streams
from models.layers.mamba2 import GatedGroupNorm
from models.layers.sandwich import Branches, SandwichAddNorm
from models.row_shards import local_format, range_shards, shard_of
from ops.declared import NoAdditions, SumAdditions
from ops.products.join import Added
from parallel import process_group
from parallel.all_reduce import (
    all_gather,
    all_reduce_add,
    all_reduce_add_norm,
    all_reduce_add_router,
    all_reduce_sandwich,
    all_reduce_sum,
    inbox_of,
)

PARALLEL = "tensor", "expert"


# Sharded modules ----------------------------------------------------------------------------------


class GatheredHead(nn.Module):
    """A head sharded along V: [..., D] -> the logits of all ranks [..., V]."""

    def __init__(self, head: nn.Module, ranks: int):
        super().__init__()
        self.head, self.ranks = head, ranks

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        parts = all_gather(x.flatten(0, -2), self.ranks).unflatten(0, (self.ranks, -1))
        return parts.transpose(0, 1).flatten(1).unflatten(0, x.shape[:-1])


class ShardedRMSNorm(nn.Module):
    """RMSNorm over a last dimension that is sharded equally."""

    def __init__(self, norm: RMSNorm | GatedGroupNorm, ranks: int):
        super().__init__()
        self.weight, self.eps, self.ranks = norm.weight, norm.eps, ranks

    def forward(self, x: Tensor) -> Tensor:
        mean = all_reduce_sum(x.float().square().mean(dim=-1, keepdim=True)) / self.ranks
        return (x.float() * torch.rsqrt(mean + self.eps) * self.weight).to(x.dtype)


class ShardedGroupNorm(ShardedRMSNorm):
    """Mamba-2's gated norm over one group of heads, which are sharded equally."""

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        y = y.float() * F.silu(gate.float())
        mean = all_reduce_sum(y.square().mean(dim=-1, keepdim=True)) / self.ranks
        return (y * torch.rsqrt(mean + self.eps) * self.weight.float()).to(gate.dtype)


class AllReduceAddNorm(AddNorm):
    """All-reduce + residual add + norm + the scores of the router that follows.

    One fixed-shape kernel computes all but the all-reduce. So scores are bitwise identical on all
    ranks, and all choose the same experts. `FusedScores` passes the scores to MoE.
    """

    def __init__(self, scale: float, router: Linear | None = None):
        super().__init__()
        self.scale, self.router, self.scores = scale, router, None

    def forward(self, x: Tensor, y: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        rows = None if self.router is None else self.router.weight
        bias = getattr(norm, "bias", None)
        x, normed, scores = all_reduce_add_norm(
            x, y.view_as(x), self.scale, norm.weight, bias, norm.eps, rows
        )
        if self.router is not None:
            self.scores = scores
        return x, normed

    def fused_decode_settings(self) -> SumAdditions:
        """Return the additions: a rank's sublayer computes a part of the sum y."""
        return SumAdditions(self.scale, all_reduce=self)

    def fused_inbox(self, x: Tensor, branches: int = 1) -> list:
        """Return where kernels of products send branches of y, like x [1, D]; None: y is given."""
        return inbox_of(x, branches)

    def fused_add(self, x: Tensor, y: Tensor | None, norms: Added, eps: float) -> Tensor:
        """Do what `all_reduce_add` does."""
        return all_reduce_add(x, y, self.scale, norms, eps)

    def fused_add_router(self, x: Tensor, y: Tensor | None, *router_and_norms) -> tuple:
        """Do what `all_reduce_add_router` does, which has these arguments."""
        return all_reduce_add_router(x, y, self.scale, *router_and_norms)


class AllReduceSandwich(AllReduceAddNorm):
    """The same for SandwichAddNorm: its norms need the sum over the ranks."""

    def __init__(self, plain: SandwichAddNorm, router: Linear | None = None):
        super().__init__(1.0, router)
        self.plain = plain
        weights = [norm.weight for norm in plain.branch_norms]
        self.kernels_ran = not weights  # as in runtime/kernel_choice.py
        branches = torch.stack(weights) if weights else None
        self.register_buffer("branch_weights", branches, persistent=False)

    def forward(self, x: Tensor, y: Tensor | Branches, norm: nn.Module) -> tuple[Tensor, Tensor]:
        parts = y if isinstance(y, Branches) else (y,)
        y = torch.stack([part.view_as(x) for part in parts])  # one message
        rows = None if self.router is None else self.router.weight
        own = self.plain.norm
        weights = self.branch_weights, own.weight, self.plain.scalar, norm.weight
        x, normed, scores = all_reduce_sandwich(x, y, *weights, own.eps, rows)
        if self.router is not None:
            self.scores = scores
        return x, normed

    def fused_decode_settings(self) -> SumAdditions:
        return replace(self.plain.fused_decode_settings(), all_reduce=self)


class AllReduceStreams(StreamAddNorm):
    """All-reduce + StreamAddNorm. A mixer is between it and the router, so it has no scores."""

    def forward(self, x: Streams, y: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        return super().forward(x, all_reduce_sum(y.contiguous()), norm)


class MeanScores(nn.Module):
    """The mean of all ranks' router scores: they have the same bits, so all choose the same."""

    def __init__(self, router: Linear, ranks: int):
        super().__init__()
        self.router, self.ranks = router, ranks

    def forward(self, x: Tensor) -> Tensor:
        return all_reduce_sum(self.router(x).float()) / self.ranks


class FusedScores(nn.Module):
    """A router that returns the scores computed by the AllReduceAddNorm before it."""

    def __init__(self, add_norm: AllReduceAddNorm):
        super().__init__()
        self.add_norm = add_norm

    def forward(self, x: Tensor) -> Tensor:
        router = self.add_norm.router
        scores, self.add_norm.scores = self.add_norm.scores, None
        return scores if router.bias is None else scores + router.bias


def all_reduced(add_norm: AddNorm, router: Linear | None = None) -> AddNorm:
    """Return what replaces a block's AddNorm; router: of the FFN that follows it."""
    if isinstance(add_norm, StreamAddNorm):
        return AllReduceStreams()
    if isinstance(add_norm, SandwichAddNorm):
        return AllReduceSandwich(add_norm, router)
    return AllReduceAddNorm(getattr(add_norm, "scale", 1.0), router)


class ShardedExperts(Experts):
    """A rank's experts: a part of each (tensor parallel) or some whole ones (expert parallel).

    first, count: the experts of this rank.
    """

    def __init__(self, experts: Experts, first: int, count: int):
        nn.Module.__init__(self)
        self.w13, self.w2, self.activation = experts.w13, experts.w2, experts.activation
        self.kind = type(experts)  # its methods compute what is between the two products
        self.choose_from = experts.n_expert
        self.first, self.n_expert = first, count
        if count < experts.n_expert:
            for module in (self.w13, self.w2):
                for name, whole in module.named_parameters():
                    setattr(module, name, nn.Parameter(whole[:count], requires_grad=False))

    def per_expert(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        return self.kind.per_expert(self, x, expert_indices)

    def grouped(self, x: Tensor, group_ends: Tensor) -> Tensor:
        return self.kind.grouped(self, x, group_ends)

    def fused_decode_settings(self) -> NoAdditions | None:
        """Return None for some whole experts, which no kernel computes."""
        return NoAdditions() if self.n_expert == self.choose_from else None

    def forward(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor):
        if self.n_expert == self.choose_from:
            return super().forward(x, expert_indices, expert_weights)
        local = expert_indices - self.first
        mine = (local >= 0) & (local < self.n_expert)
        return self.forward_masked(x, local, mine, expert_weights)

    def forward_masked(self, x: Tensor, local: Tensor, mine: Tensor, expert_weights: Tensor):
        """Run the pairs [T, A] that are `mine` with the experts `local`; other pairs add 0."""
        expert_weights = torch.where(mine, expert_weights, 0.0)
        if x.shape[0] <= self.gather_max_tokens:
            # Remap other ranks' experts to a local one with weight 0, which may be in the L2 cache.
            one = torch.where(mine, local, 0).amax(dim=-1, keepdim=True)
            return super().forward(x, torch.where(mine, local, one), expert_weights)
        # Other pairs sort after the last group, and are not multiplied.
        return super().forward(x, torch.where(mine, local, self.n_expert), expert_weights)

    def combine(self, outputs: Tensor, expert_weights: Tensor) -> Tensor:
        """Combine without the pairs that were not multiplied: undefined, and NaN * 0 is NaN."""
        if self.n_expert == self.choose_from:
            return super().combine(outputs, expert_weights)
        weights = expert_weights.unsqueeze(-1)
        return torch.where(weights == 0, 0.0, outputs * weights).sum(1)


# The shard table ----------------------------------------------------------------------------------


def shard_table(args: ModelArgs, parallel: str) -> dict[str, Shard]:
    """Return module name (`shard_of`) -> Shard. Weights of other modules are replicated."""
    table = family_of(args).shard_table(args)
    if parallel == "expert":
        for name in ("ffn.experts.w13", "ffn.experts.w2"):
            table[name] = Shard(0, ((args.n_expert, 1),))
    return table


def shard_slices(shape: Sequence[int], shard: Shard, rank: int, ranks: int) -> list[tuple]:
    """Return the slices of a tensor that `rank` holds, to be concatenated along the shard's axis.

    The tensor may be packed (codes in words, scales in groups): the slices are proportional. An
    axis of size 1 is not sliced. If a segment has fewer pieces than ranks (KV heads), neighboring
    ranks share a piece.
    """
    axis, segments = shard
    if shape[axis] == 1:
        return [(slice(None),)]
    total, begin, slices = sum(count * width for count, width in segments), 0, []
    for count, width in segments:
        parts = min(count, ranks)
        part = rank * parts // ranks
        edges = [begin + count * width * (part + n) // parts for n in (0, 1)]
        assert all(edge * shape[axis] % total == 0 for edge in edges), (shape, shard, ranks)
        start, stop = (edge * shape[axis] // total for edge in edges)
        slices.append((slice(None),) * axis + (slice(start, stop),))
        begin += count * width
    return slices


def shard_problem(args: ModelArgs, format: dict, ranks: int, parallel: str) -> str | None:
    """Return why this model cannot be sharded over `ranks`, or None."""
    if ranks == 1:
        return None
    sizes = {"query heads": args.n_head, "the vocabulary's size": args.vocab_size}
    if parallel == "expert":
        sizes["experts"] = args.n_expert
    else:
        sizes["the experts' intermediate size"] = args.intermediate
    if args.dense_layers:
        sizes["the dense layers' intermediate size"] = args.dense_intermediate
    if shared := getattr(args, "shared_intermediate", 0):
        sizes["the shared expert's intermediate size"] = shared
    for name, size in (sizes | family_of(args).sharded_heads(args)).items():
        if size % ranks:
            return f"{size} ({name}) cannot be divided by {ranks}"
    for heads in (getattr(args, name) for name in family_of(args).kv_head_fields):
        if heads % ranks and ranks % heads:
            return f"{heads} key-value heads are neither a multiple nor a divisor of {ranks}"
    table = shard_table(args, parallel)
    ranges = range_shards(table, format)
    for path, spec in format.get("modules", {}).items():
        shard = ranges.get(path) or shard_of(table, path)
        if why := group_problem(path, spec, shard, ranks):
            return why
    return None


def group_problem(path: str, spec: dict, shard: Shard | None, ranks: int) -> str | None:
    """Return why a packed module's groups cannot be sharded, or None."""
    least = FORMATS[spec["format"]].min_group
    lengths = grouped_lengths(path, spec, shard, ranks)
    short = next((n for n in lengths if gcd(n, spec["group_size"]) % least), None)
    if short is None:
        return None
    group = f"no multiple of {least}, the smallest group of {spec['format']}"
    return f"{path}: {short} numbers of a rank's rows or columns are {group}"


def grouped_lengths(path: str, spec: dict, shard: Shard | None, ranks: int) -> list[int]:
    """Return a rank's lengths along an axis with groups: a group has to divide each of them."""
    inner = 2 if ".experts." in path else 1  # the axis of the input dimension
    axes = (inner, inner - 1) if FORMATS[spec["format"]].blocks else (inner,)
    if shard is None or shard.axis not in axes:
        return []
    lengths = [count // min(count, ranks) * width for count, width in shard.segments]
    count, width = shard.segments[-1]
    is_last_block = shard.axis == inner - 1 and count * width < spec["group_size"]
    if is_last_block and not any(n % spec["group_size"] for n in lengths[:-1]):
        # The last rows fill only a part of a block (Laguna's gates). A rank's part of these rows is
        # such a block, too, with the same scale.
        lengths.pop()
    return lengths


def sharded_format(
    format: dict, table: dict[str, Shard], ranks: int, ranges: dict[str, Shard] | None = None
) -> dict:
    """Return a checkpoint's format with the largest groups that divide the shards."""
    modules = {}
    for path, spec in format.get("modules", {}).items():
        shard = (ranges or {}).get(path) or shard_of(table, path)
        lengths = grouped_lengths(path, spec, shard, ranks)
        modules[path] = spec | {"group_size": gcd(spec["group_size"], *lengths)}
    return format | {"modules": match_shared_experts(modules)}


def shard_refusal(args: ModelArgs, format: dict, ranks: int, parallel: str) -> str | None:
    """Return `shard_problem` as an error message, with the numbers of processes that work."""
    why = shard_problem(args, format, ranks, parallel)
    if why is None:
        return None
    counts = [str(n) for n in range(1, 65) if shard_problem(args, format, n, parallel) is None]
    return f"{ranks} processes, --parallel {parallel}: {why}: start {', '.join(counts)}"


def regroupings(whole: nn.Module, modules: dict[str, dict]) -> dict[str, Regrouping]:
    """Return a Regrouping for each packed module of a whole model whose groups its shards cut.

    Where blocks have rows, too, these include the modules whose last block is not full.
    """
    found = {}
    for path, spec in modules.items():
        module = whole.get_submodule(path)
        assert isinstance(module, Packed)
        shape, format = (*module.codes.shape[:-1], module.width), FORMATS[module.format]
        is_cut = format.blocks and shape[-2] % module.group != 0
        if spec["group_size"] != module.group or is_cut:
            found[path] = Regrouping(format, shape, module.group, spec["group_size"])
    return found


def local_args(args: ModelArgs, ranks: int, parallel: str) -> ModelArgs:
    """Return the args of one rank's shard, with all of the vocabulary and experts.

    The head is untied, since the embedding is not sharded.
    """
    if ranks == 1:
        return args
    inner = args.intermediate if parallel == "expert" else args.intermediate // ranks
    kv_heads = family_of(args).kv_head_fields
    fields = {name: getattr(args, name) for name in family_of(args).sharded_fields}
    sharded: dict = {
        name: tuple(n // ranks for n in each) if isinstance(each, tuple) else each // ranks
        for name, each in fields.items()
    }
    sharded |= {name: max(1, getattr(args, name) // ranks) for name in kv_heads}
    return replace(
        args, n_head=args.n_head // ranks, intermediate=inner, tied_embeddings=False, **sharded
    )


class ModelShard:
    """One rank's shard of a model in a number format; the whole model if there is one rank.

    `model` is on the meta device. Fill its parameters with `read`, then call `insert_collectives`.
    rank, ranks: default to this process's. dtype: of parameters that are not packed, on the meta
    device. Raises ValueError for a model that cannot be sharded, and as `pack_modules`.
    """

    def __init__(
        self,
        args: ModelArgs,
        format: dict,
        parallel: str = "tensor",
        rank: int | None = None,
        ranks: int | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        self.rank = process_group.rank() if rank is None else rank
        self.ranks = process_group.size() if ranks is None else ranks
        self.args, self.table = args, shard_table(args, parallel)
        self.ranges: dict[str, Shard] = {}  # by path, of weights in several formats
        self.model = whole = build_model(args, dtype)
        pack_modules(whole, format)
        if self.ranks == 1:
            return
        if why := shard_refusal(args, format, self.ranks, parallel):
            raise ValueError(why)
        self.ranges = range_shards(self.table, format)
        named = whole.named_parameters(remove_duplicate=False)
        self.shapes = {name: tensor.shape for name, tensor in named}
        self.model = build_model(local_args(args, self.ranks, parallel), dtype)
        self.shard_modules(parallel)
        local = local_format(format, self.ranges, self.ranks)
        local = sharded_format(local, self.table, self.ranks, self.ranges)
        self.regroupings = regroupings(whole, local["modules"])
        pack_modules(self.model, local)

    def shard_modules(self, parallel: str) -> None:
        """Shard the head, the experts and the norms over all heads. Parameters keep their names."""
        model, ranks = self.model, self.ranks
        for name, whole in [*model.head.named_parameters()]:
            rows = whole[: self.args.vocab_size // ranks]
            setattr(model.head, name, nn.Parameter(rows, requires_grad=False))
        for block in model.layers:
            if self.args.qk_norm == "full":
                attention = block.attention
                attention.q_norm = ShardedRMSNorm(attention.q_norm, ranks)
                attention.k_norm = ShardedRMSNorm(attention.k_norm, ranks)
            norm = getattr(block.attention, "norm", None)
            if isinstance(norm, GatedGroupNorm) and getattr(self.args, "mamba_groups", 1) % ranks:
                block.attention.norm = ShardedGroupNorm(norm, ranks)
            if isinstance(block.ffn, MoE):
                experts = block.ffn.experts
                count, first = experts.n_expert, 0
                if parallel == "expert":
                    count //= ranks
                    first = self.rank * count
                block.ffn.experts = ShardedExperts(experts, first, count)

    def insert_collectives(self) -> None:
        """Replace AddNorm, routers and head by modules that communicate. Call it after loading."""
        if self.ranks == 1:
            return
        self.model.head = GatheredHead(self.model.head, self.ranks)
        for block in self.model.layers:
            router = block.ffn.router if isinstance(block.ffn, MoE) else None
            block.add_attention = all_reduced(block.add_attention, router)
            block.add_ffn = all_reduced(block.add_ffn)
            if router is not None:
                scored = isinstance(block.add_attention, AllReduceAddNorm)
                block.ffn.router = (
                    FusedScores(block.add_attention) if scored else MeanScores(router, self.ranks)
                )

    def read(
        self, source, name: str, device: torch.device | str, expert: int | None = None
    ) -> Tensor:
        """Read only this rank's part of parameter `name`.

        source: as in `runtime.loading.load_model`. expert: read one of this rank's stacked experts
        only, [1, ...].
        """
        path = name.rpartition(".")[0]
        index = None if expert is None else (slice(expert, expert + 1),)
        shard = self.ranges.get(path) or shard_of(self.table, path)
        if self.ranks == 1 or shard is None:
            return source.read(name, index, device)
        regrouping = self.regroupings.get(path) if not name.endswith(".bias") else None
        shape = regrouping.shape if regrouping else self.shapes[name]
        if shard.axis == len(shape):  # a bias after an all-reduce: one rank adds it
            bias = source.read(name, index, device)
            return bias if self.rank == 0 else torch.zeros_like(bias)
        if name == "head.weight" and self.args.tied_embeddings:
            name = "embedding.weight"
        slices = shard_slices(shape, shard, self.rank, self.ranks)
        if expert is not None:
            slices = [
                (slice(at := (rows.start or 0) + expert, at + 1), *rest) for rows, *rest in slices
            ]

        def read(index: tuple[slice, ...]) -> Tensor:
            return source.read(name, index, device)

        if regrouping:
            return regrouping.read(read, name.rpartition(".")[2], slices, shard.axis).contiguous()
        parts = [read(index) for index in slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=shard.axis)
