"""Several GPUs: which part of the model each process holds, and where parts are summed.

    torchrun --standalone --nproc_per_node=4 generate.py --checkpoint_path DIR ...

Tensor parallelism (Shoeybi et al. 2019) cuts attention by heads, each expert along I and the head along V. A block then
sums [T, D] over the ranks after `wo` and after the weighted sum over experts. Expert parallelism gives a rank E / N
whole experts in place of a part of each. What is cut, and how, is a table (`table`); the two sums stand in the slot
`join`, the gathered vocabulary in `gather`; the rest of the program does not know. The processes are world.py's.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import world
from args import ModelArgs
from attention import allow_one_kernel
from layers import Linear, RMSNorm
from model import Experts, Join, Terms, Transformer
from packing import FORMATS
from quantize import apply

PARALLEL = "tensor", "expert"

Segments = tuple[tuple[int, int], ...]  # of an axis: each how many pieces that stay whole, and the width of one


# What stands in a block's slots -------------------------------------------------------------------------------------


class Gather(nn.Module):
    """[..., V / N], this rank's part of the vocabulary -> [..., V]."""

    def forward(self, x: Tensor) -> Tensor:
        parts = world.all_gather(x.flatten(0, -2), world.size()).unflatten(0, (world.size(), -1))  # [N, ..., V / N]
        return parts.transpose(0, 1).flatten(1).unflatten(0, x.shape[:-1])


class SplitNorm(nn.Module):
    """RMSNorm over a last dimension that is cut over the ranks into equal parts."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        mean = world.all_reduce(x.float().square().mean(dim=-1, keepdim=True)) / world.size()
        return (x.float() * torch.rsqrt(mean + self.eps) * self.weight).to(x.dtype)


class SumAndJoin(Join):
    """`model.Join` of a sum over ranks, in one way on all of them, so that all choose the same experts.

    y may be terms, which are added up as well.
    """

    def forward(self, x: Tensor, y: Tensor | Terms, norm: RMSNorm | nn.LayerNorm, router: Linear | None = None):
        rows = None if router is None else router.weight
        bias = getattr(norm, "bias", None)
        y, weights = y if isinstance(y, Terms) else (y.view_as(x), None)
        x, normed, scores = world.sum_and_join(x, y, weights, self.scale, norm.weight, bias, norm.eps, rows)
        if router is None:
            return x, normed, None
        return x, normed, scores if router.bias is None else scores + router.bias


class LocalExperts(Experts):
    """E / N of the E experts, from `first` on: what the router gives to others counts nothing here."""

    def __init__(self, args: ModelArgs, first: int, count: int):
        super().__init__(args)
        for product in (self.w13, self.w2):
            for name, whole in product.named_parameters():
                setattr(product, name, nn.Parameter(whole[:count], requires_grad=False))
        self.first, self.n_expert = first, count

    def forward(self, x: Tensor, expert_indices: Tensor, expert_weights: Tensor) -> Tensor | Terms:
        local = expert_indices - self.first
        return self.of_own(x, local, (local >= 0) & (local < self.n_expert), expert_weights)

    def of_own(self, x: Tensor, local: Tensor, mine: Tensor, expert_weights: Tensor) -> Tensor | Terms:
        """The product of the pairs [T, A] that are `mine`, whose expert is the one at `local` here."""
        expert_weights = torch.where(mine, expert_weights, 0.0)
        if x.shape[0] <= self.gather_tokens:
            # Others' become one more reading of the token's largest own, which a cache may still hold, at no weight.
            one = torch.where(mine, local, 0).amax(dim=-1, keepdim=True)
            return self.gather(x, torch.where(mine, local, one), expert_weights)
        # Others' sort last, after the end of the last group, and are not multiplied.
        return self.group(x, torch.where(mine, local, self.n_expert), expert_weights)

    def combine(self, y: Tensor, expert_weights: Tensor) -> Tensor:
        """What was not multiplied is undefined, and not a number times 0 is not a number."""
        expert_weights = expert_weights.unsqueeze(-1)
        return torch.where(expert_weights == 0, 0.0, y * expert_weights).sum(1)


# What a rank holds --------------------------------------------------------------------------------------------------


def table(args: ModelArgs, parallel: str) -> dict[str, tuple[int, Segments]]:
    """Module (without its layer) -> the axis of its weight [..., out, in] that is cut, and the segments along it.
    A bias is cut along the same axis, where it has that many.

    Each segment is cut by itself, so that a rank gets its part of each. What is not here every rank has whole.
    """
    queries, kv = (args.n_head, args.head_dim), (args.n_kv_head, args.head_dim)
    values = (args.n_head, args.value_dim or args.head_dim)
    inner, dense, shared = (args.intermediate, 1), (args.dense_intermediate, 1), (args.shared_intermediate, 1)
    rows = {
        "attention": (0, ((args.n_head, 1),)),  # its sinks; wkv of latent attention
        "attention.wqkv": (0, (queries, kv, kv)),
        "attention.wo": (1, (values,)),
        "ffn.experts.w13": (1, (inner, inner)),
        "ffn.experts.w2": (2, (inner,)),
        "ffn.w13": (0, (dense, dense)),
        "ffn.w2": (1, (dense,)),
        "ffn.shared.w13": (0, (shared, shared)),
        "ffn.shared.w2": (1, (shared,)),
        "head": (0, ((args.vocab_size, 1),)),
    }
    if args.kv_rank:  # what all heads are made of every rank has, and so the same cache
        rows["attention.wqkv"] = 0, (queries, (1, args.kv_rank + args.rotary_dim))
        if args.q_rank:
            rows["attention.wq"] = rows.pop("attention.wqkv")[0], (queries,)
    if args.qk_norm == "full":
        rows |= {"attention.q_norm": (0, (queries,)), "attention.k_norm": (0, (kv,))}
    if parallel == "expert":
        rows |= {f"ffn.experts.{name}": (0, ((args.n_expert, 1),)) for name in ("w13", "w2")}
    return rows


def _key(path: str) -> str:
    """A module's name in `table`."""
    return re.sub(r"^layers\.\d+\.", "", path)


def cut(shape: Sequence[int], axis: int, segments: Segments, rank: int, ranks: int) -> list[tuple[slice, ...]]:
    """The slices of a part of a weight, of that shape, that `rank` has, to be joined along the axis.

    A part is cut in proportion to its weight (codes in words, scales in groups), and is whole where it is 1 long.
    Where there are fewer pieces than ranks (KV heads), neighbouring ranks have the same one.
    """
    if shape[axis] == 1:
        return [(slice(None),)]
    whole, begin, found = sum(count * width for count, width in segments), 0, []
    for count, width in segments:
        parts = min(count, ranks)
        edges = [begin + count * width * (rank * parts // ranks + n) // parts for n in (0, 1)]
        assert all(edge * shape[axis] % whole == 0 for edge in edges), (shape, axis, segments, ranks)
        found.append((slice(None),) * axis + (slice(*(edge * shape[axis] // whole for edge in edges)),))
        begin += count * width
    return found


def problem(args: ModelArgs, format: dict, ranks: int, parallel: str) -> str | None:
    """Why this model cannot be cut into so many parts, or None."""
    if ranks == 1:
        return None
    wholes = {"query heads": args.n_head, "the vocabulary's size": args.vocab_size}
    if parallel == "expert":
        wholes["experts"] = args.n_expert
    else:
        wholes["the experts' intermediate size"] = args.intermediate
    if args.dense_layers:
        wholes["the dense layers' intermediate size"] = args.dense_intermediate
    if args.shared_intermediate:
        wholes["the shared expert's intermediate size"] = args.shared_intermediate
    for name, number in wholes.items():
        if number % ranks:
            return f"{number} ({name}) cannot be divided by {ranks}"
    if args.n_kv_head % ranks and ranks % args.n_kv_head:
        return f"{args.n_kv_head} key-value heads are neither a multiple nor a divisor of {ranks}"
    for path, spec in format.get("modules", {}).items():
        axis, segments = table(args, parallel).get(_key(path), (None, ()))
        width, group = sum(count * width for count, width in segments), spec["group_size"]
        along = 2 if ".experts." in path else 1  # the axis of a row's numbers, after that of the rows
        if axis == along and (width // ranks) % group:
            return f"{path} has rows of {width}, of which {width // ranks} are no multiple of the group size {group}"
        if axis == along - 1 and FORMATS[spec["format"]].blocks:
            rows = [count // min(count, ranks) * size for count, size in segments]
            if short := next((n for n in rows if n % group), None):
                return f"{path}: {short} rows of a rank are no multiple of the group size {group}"
    return None


def refusal(args: ModelArgs, format: dict, ranks: int, parallel: str) -> str | None:
    """`problem` with the numbers of processes, and the group sizes, that would do."""
    why = problem(args, format, ranks, parallel)
    if why is None:
        return None
    counts = [str(n) for n in range(1, 65) if problem(args, format, n, parallel) is None]
    fixes = [f"start {', '.join(counts)}"]
    for group in (128, 64, 32, 16):
        modules = {
            path: spec if FORMATS[spec["format"]].per_row else spec | {"group_size": group}
            for path, spec in format.get("modules", {}).items()
        }
        if "group size" in why and problem(args, {"modules": modules}, ranks, parallel) is None and all(
            FORMATS[spec["format"]].per_row or group % FORMATS[spec["format"]].least == 0 for spec in modules.values()
        ):  # fmt: skip
            fixes.append(f"quantize again with --group_size {group}")
            break
    return f"{ranks} processes, --parallel {parallel}: {why}: {', or '.join(fixes)}"


def local_args(args: ModelArgs, ranks: int, parallel: str) -> ModelArgs:
    """The args of one rank's part. The vocabulary and the number of experts, which the router counts, stay.

    A part of a tied head is no longer the embedding.
    """
    if ranks == 1:
        return args
    inner = args.intermediate if parallel == "expert" else args.intermediate // ranks
    return replace(
        args, n_head=args.n_head // ranks, n_kv_head=max(1, args.n_kv_head // ranks), intermediate=inner,
        dense_intermediate=args.dense_intermediate // ranks, shared_intermediate=args.shared_intermediate // ranks,
        tied_embeddings=False,
    )  # fmt: skip


class Part:
    """What one rank holds of the model with these args and this format (a checkpoint's), the whole of it if alone.

    `.model` is on the meta device, `.read` gives its parameters one by one. Raises ValueError for a model that cannot
    be cut into so many parts, and as `quantize.apply`.
    """

    def __init__(self, args: ModelArgs, format: dict, parallel: str = "tensor", rank: int | None = None,
                 ranks: int | None = None):  # fmt: skip
        self.rank, self.ranks = (world.rank(), world.size()) if ranks is None else (rank, ranks)
        self.args, self.table = args, table(args, parallel)
        with torch.device("meta"):
            self.model = whole = Transformer(args)
        apply(whole, format)
        if self.ranks == 1:
            return
        if why := refusal(args, format, self.ranks, parallel):
            raise ValueError(why)
        self.shapes = {name: tensor.shape for name, tensor in whole.named_parameters(remove_duplicate=False)}
        with torch.device("meta"):
            self.model = Transformer(local_args(args, self.ranks, parallel))
            self._fill_slots(parallel)
        apply(self.model, format)

    def _fill_slots(self, parallel: str) -> None:
        model, count = self.model, self.args.n_expert // self.ranks
        for name, whole in [*model.head.named_parameters()]:
            setattr(model.head, name, nn.Parameter(whole[: self.args.vocab_size // self.ranks], requires_grad=False))
        model.gather = Gather()
        allow_one_kernel(model)
        for block in model.layers:
            block.join = SumAndJoin(self.args.residual_scale)
            if self.args.qk_norm == "full":
                block.attention.q_norm, block.attention.k_norm = map(
                    SplitNorm, (block.attention.q_norm, block.attention.k_norm)
                )
            if not hasattr(block.ffn, "experts"):  # a dense layer
                continue
            if parallel == "expert":
                block.ffn.experts = LocalExperts(model.args, self.rank * count, count)
            block.ffn.experts.apart = block.ffn.shared is None

    def read(self, source, name: str, device: torch.device | str, expert: int | None = None) -> Tensor:
        """This rank's part of the model's parameter `name`, and nothing else, from a source as `load_model` has it.

        expert: of stacked experts' [E, ...], E of this rank's, that one alone, [1, ...].
        """
        path, index = name.rpartition(".")[0], None if expert is None else (slice(expert, expert + 1),)
        if self.ranks == 1 or _key(path) not in self.table:
            return source.read(name, index, device)
        axis, segments = self.table[_key(path)]
        shape = self.shapes[name]
        if axis == len(shape):  # a bias that is added to a sum over ranks, so one rank adds it
            bias = source.read(name, index, device)
            return bias if self.rank == 0 else torch.zeros_like(bias)
        if name == "head.weight" and self.args.tied_embeddings:
            name = "embedding.weight"
        pieces = cut(shape, axis, segments, self.rank, self.ranks)
        if expert is not None:
            pieces = [(slice(at := (rows.start or 0) + expert, at + 1), *rest) for rows, *rest in pieces]
        parts = [source.read(name, index, device) for index in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)
