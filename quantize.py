"""Models in number formats: the modules that multiply with packed weights, and the command that packs them.

    python quantize.py --checkpoint_path DIR/model_bf16 --mode int8          writes DIR/model_int8
    python quantize.py --checkpoint_path DIR/model_bf16 --attention hqq4 --experts hqq2

How the numbers are packed stands in packing.py.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import attention_kernels
import grouped_kernel
import kernels
from args import ModelArgs
from attention import Chunk, KVCache, allow_one_kernel, join_parts
from checkpoint import Checkpoint, Writer, pick_device
from command import Parser
from layers import Linear, operator, realise
from model import ExpertLinear, Transformer, activate, biased
from packing import FORMATS, PLAIN, Parts, grouped_order, nonzero

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # of what is in no number format
PACKED_AT_ONCE = 1 << 22  # weights; in fp32, with what the solver keeps beside them, some 150 MB


# Modules ------------------------------------------------------------------------------------------------------------


@operator("moe_fast::grouped_packed")
def grouped_packed(x: Tensor, group_ends: Tensor, parts: list[Tensor], format: str, group: int) -> Tensor:
    """x [N, in], group_ends int32 [E], parts of [E, out, in] in the order of the format's layout -> [N, out].

    On CUDA one kernel that unpacks a tile at a time, for x in `grouped_order`; on CPU expert by expert, for x as it is.
    """
    row, width = FORMATS[format], x.shape[-1]
    parts = dict(zip(row.layout((*parts[0].shape[:2], width), group), parts, strict=True))
    if x.is_cuda:
        return grouped_kernel.grouped(x, group_ends, parts, row.kind, row.bits, group)
    y, start = x.new_empty(x.shape[0], parts["codes"].shape[1]), 0
    for expert, end in enumerate(group_ends.tolist()):
        if end > start:
            weight = row.unpack({name: part[expert] for name, part in parts.items()}, group).to(x.dtype)
            y[start:end] = F.linear(x[start:end], weight)
        start = end
    return y


@grouped_packed.register_fake
def _(x: Tensor, group_ends: Tensor, parts: list[Tensor], format: str, group: int) -> Tensor:
    return x.new_empty(x.shape[0], parts[0].shape[1])


class Packed(nn.Module):
    """A weight [..., out, in] in a format: its parts are the module's parameters."""

    def __init__(self, weight: Tensor, format: str, group: int):
        super().__init__()
        self.format, self.group, self.width = format, group, weight.shape[-1]
        FORMATS[format].choose_group(self.width, group)
        self.layout = FORMATS[format].layout(weight.shape, group)
        for name, (shape, dtype) in self.layout.items():
            part = torch.empty(shape, dtype=dtype, device=weight.device)
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    def parts(self, index: Tensor | None = None) -> Parts:
        """The parts, or those of the chosen experts: a gather that the product fuses with."""
        parts = {name: getattr(self, name) for name in self.layout}
        return parts if index is None else {name: part[index] for name, part in parts.items()}

    def dot(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        """x [..., in] -> fp32 [..., out]. index [T, A]: the expert of each pair, and x is [T, A | 1, in]."""
        if self.in_kernel(x):
            return self.kernel(x, index).sum(0).view(*(x.shape[:-1] if index is None else index.shape), -1)
        # Kept in memory, or its scales would become part of whatever reads it, more than once.
        return realise(FORMATS[self.format].dot(x, self.parts(index), self.group))

    def in_kernel(self, x: Tensor, gated: bool = False) -> bool:
        """Whether one token's product has a kernel of its own: then the compiler's best was slower by half."""
        row, out = FORMATS[self.format], self.layout["codes"][0][-2]
        return row.bits == 4 and x.is_cuda and kernels.dot4_supports(x, out, self.group, gated)

    def kernel(self, x: Tensor, index: Tensor | None, gated: bool = False) -> Tensor:
        row, parts = FORMATS[self.format], list(self.parts().values())
        index = index if index is None else index.flatten()
        return kernels.dot4(realise(x).flatten(0, -2), parts, index, row.kind, self.group, gated)

    def grouped(self, x: Tensor, group_ends: Tensor, dense: bool = False) -> Tensor:
        """x [N, in], rows sorted by expert, group_ends int32 [E] -> [N, out]. dense: the weight is one expert's."""
        # A number, where a prompt's compiler takes all sizes for variables: it would divide by this one, for each x.
        torch._check(x.shape[-1] == self.width)
        if x.is_cuda:  # ordered here and not by the operator, so that it becomes part of the kernel that computes x
            x = grouped_order(x, FORMATS[self.format].bits, self.group)
        parts = [part.unsqueeze(0) if dense else part for part in self.parts().values()]
        return grouped_packed(x, group_ends, parts, self.format, self.group)

    def unpack(self) -> Tensor:
        """fp32 [..., out, in]."""
        return FORMATS[self.format].unpack(self.parts(), self.group)


class PackedLinear(Packed):
    """layers.Linear in a format."""

    def __init__(self, linear: Linear, format: str, group: int):
        super().__init__(linear.weight, format, group)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == x.shape[-1]:  # one token
            y = self.dot(x).to(x.dtype)
        else:
            rows = x.flatten(0, -2)
            ends = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
            y = self.grouped(rows, ends, dense=True).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


class PackedExpertLinear(Packed):
    """model.ExpertLinear in a format."""

    def __init__(self, experts: ExpertLinear, format: str, group: int):
        super().__init__(experts.weight, format, group)
        self.bias, self.clamp = experts.bias, experts.clamp

    def gated(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        if self.bias is None and self.clamp is None and self.in_kernel(x, gated=True):
            return self.kernel(x, expert_indices, gated=True).view(*expert_indices.shape, -1)
        if self.in_kernel(x) or FORMATS[self.format].by_bytes(x, self.codes):
            both = self.dot(x.unsqueeze(1), expert_indices)
            return activate(self, *both.chunk(2, dim=-1), expert_indices).to(x.dtype)
        # Gate and up are two sums, as in model.ExpertLinear.
        halves = [{}, {}]
        for name, part in self.parts(expert_indices).items():
            halves[0][name], halves[1][name] = part.chunk(2, dim=2)
        x, dot = x.unsqueeze(1), FORMATS[self.format].dot
        return activate(self, *(dot(x, half, self.group) for half in halves), expert_indices).to(x.dtype)

    def gathered(self, x: Tensor, expert_indices: Tensor) -> Tensor:
        return biased(self.dot(x, expert_indices), self.bias, expert_indices)


# Caches -------------------------------------------------------------------------------------------------------------


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n] -> codes int8 [..., n] from -127 to 127, scale bf16 [..., 1]: the largest magnitude over 127.

    A row with a number that is not finite comes back with no finite one.
    """
    x = x.float()
    scale = nonzero((x.abs().amax(-1, keepdim=True) / 127).bfloat16())
    # Seen as bits and back: the compiler would leave the rounding out, and divide by what is not the stored scale.
    scale = scale.view(torch.int16).view(torch.bfloat16)
    return (x / scale.float()).round().clamp(-127, 127).to(torch.int8), scale


class Int8KVCache(KVCache):
    """Codes int8 [2, B, K, S, C] and a scale bf16 [2, B, K, S, 1] for each position and head.

    That is 0.508 of a bf16 cache where C is 128. Keys and values are given as products of the two, which the compiled
    attention of one token makes where it reads them; a long cache's attention is a kernel of ours, since the library's
    read plain tensors. A prompt's attention is an operator of the library, and gets the part in use written out.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, parts: int = 2):
        super().__init__(shape, torch.int8, device, parts)
        self.scale, self.dtype = KVCache((*shape[:-1], 1), torch.bfloat16, device, parts), dtype

    def update(self, positions: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = to_int8(kv)
        return self._plain(super().update(positions, codes), self.scale.update(positions, scale))

    def extend(self, chunk: Chunk, kv: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = to_int8(kv)
        return self._plain(super().extend(chunk, codes), self.scale.extend(chunk, scale))

    def reads_blocks(self, queries: int) -> bool:
        return queries <= 64  # rows that a kernel's registers hold

    def attend_blocks(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, blocks: tuple[Tensor, Tensor],
                      window: int | None, sinks: Tensor | None) -> Tensor:  # fmt: skip
        (B, Q, H, C), (K, S) = q.shape, self.kv.shape[2:4]
        rows = H // K * Q
        found = attention_kernels.attend_int8(q, self.kv, self.scale.kv, positions, window or S)
        if sinks is not None:
            sinks = sinks.float().view(1, K, H // K, 1).expand(-1, -1, -1, Q).flatten(2)
        y = join_parts(*(part[:, :, :, :rows] for part in found), sinks)  # [B, K, rows, C]
        return y.unflatten(2, (H // K, Q)).permute(0, 3, 1, 2, 4).reshape(B, Q, H * C).to(q.dtype)

    def attend_latent(self, q: Tensor, positions: Tensor, rank: int, scale: Tensor | None = None) -> Tensor:
        return super().attend_latent(q, positions, rank, self.scale.kv)

    def clear(self) -> None:
        super().clear()
        self.scale.clear()

    def _plain(self, codes: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return tuple((c.float() * s.float()).to(self.dtype) for c, s in zip(codes, scales, strict=True))


KV_CACHES = {"plain": KVCache, "int8": Int8KVCache}  # plain: in the model's dtype


# A model in formats -------------------------------------------------------------------------------------------------


def plan(
    args: ModelArgs,
    attention: str,
    experts: str,
    head: str | None = None,
    group_size: int | None = None,
    dtype: str = "bf16",
) -> dict:
    """What a checkpoint's "format" says: {"name", "dtype", "modules": {module: {"format", "group_size"}}}.

    attention, experts (dense feed-forward layers go with them), head: names in FORMATS, or PLAIN; the head's default is
    its format's. dtype: of the rest. Raises ValueError for an unknown name and for a group size that does not fit.
    """
    main_format = FORMATS.get(experts) or FORMATS.get(attention)
    usual_head = main_format.head if main_format else PLAIN
    head = head or usual_head
    names = {"attention": attention, "experts": experts, "head": head}
    for option, name in names.items():
        if name != PLAIN and name not in FORMATS:
            raise ValueError(f"--{option} {name}: it must be one of {', '.join((PLAIN, *FORMATS))}")
    if all(name == PLAIN for name in names.values()):
        raise ValueError("nothing is to be quantised: give --mode, --attention, --experts or --head a format")
    if group_size is not None and all(name == PLAIN or FORMATS[name].per_row for name in names.values()):
        raise ValueError(f"--group_size {group_size}: none of these formats has groups, leave it out")
    with torch.device("meta"):
        model = Transformer(args)
    chosen = {}  # path: (format, width of its rows)
    for path, module in model.named_modules():
        role = "head" if path == "head" else "attention" if ".attention." in path else "experts"
        packable = isinstance(module, Linear | ExpertLinear) and not path.endswith((".router", ".shared_gate"))
        if packable and names[role] != PLAIN:
            chosen[path] = names[role], module.weight.shape[-1]
    modules, grouped = {}, [(FORMATS[f], width) for f, width in chosen.values() if not FORMATS[f].per_row]
    for path, (name, width) in chosen.items():
        row = FORMATS[name]
        try:
            group = row.choose_group(width, None if row.per_row else group_size)
        except ValueError as error:
            sizes = [str(n) for n in (8, 16, 32, 64, 128, 256) if all(row.fits(width, n) for row, width in grouped)]
            fix = f"--group_size {' or '.join(sizes)} would do" if grouped and sizes else "choose other formats"
            raise ValueError(f"{path} in {name}: {error}: {fix}") from None
        modules[path] = {"format": name, "group_size": group}
    name = experts if (attention, experts) == of_mode(experts) else f"{attention}-{experts}"
    if head != usual_head:
        name += f"-head_{head}"
    if group_size is not None:
        name += f"-g{group_size}"
    return {"name": name, "dtype": dtype, "modules": modules}


def of_mode(mode: str) -> tuple[str, str]:
    """The formats of attention and of experts that a --mode stands for."""
    return FORMATS[mode].attention or mode if mode in FORMATS else mode, mode


def model_args(source) -> ModelArgs:
    """The ModelArgs of a source. Raises ValueError for args or a number format that this version does not know."""
    format = source.format if isinstance(source.format, dict) else {}
    dtype = format.get("dtype", format.get("name"))
    if not isinstance(format.get("name"), str) or not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"number format {str(source.format)[:80]!r} is not known here: convert the model again")
    try:
        return ModelArgs(**source.args)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint's args are of another version ({error}): convert the model again") from None


def apply(model: Transformer, format: dict) -> None:
    """Swap in, on the meta device, the modules that a checkpoint's "format" names. ValueError where they do not fit."""
    modules = format.get("modules", {})
    if not isinstance(modules, dict):
        raise ValueError("the checkpoint's format names its modules in no way that this version knows: make it again")
    for path, spec in modules.items():
        try:
            module, name, group = model.get_submodule(path), spec["format"], spec["group_size"]
            twin = {Linear: PackedLinear, ExpertLinear: PackedExpertLinear}[type(module)]
            if type(group) is not int:
                raise TypeError
            packed = twin(module, name, group)
            if path.endswith("experts.w13") and FORMATS[name].blocks and module.weight.shape[1] % (2 * group):
                raise ValueError("gate and up are not of whole blocks")
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            what = (
                f"{path!r}: {spec!r}"
                if isinstance(error, KeyError | TypeError)
                else f"{path!r}: {str(error).splitlines()[0]:.200}"
            )
            raise ValueError(f"the checkpoint's format does not fit the model ({what}): make it again") from None
        model.set_submodule(path, packed)
    # One GPU's decoding has no kernel of ours in bf16, int8 and fp8; in 4 bits it has, and may have one more.
    if any(FORMATS[spec["format"]].bits == 4 for spec in modules.values()):
        allow_one_kernel(model)


# Writing a quantised checkpoint -------------------------------------------------------------------------------------


def pack_weight(weight: Tensor, spec: dict, device: torch.device, iterations: int | None = None) -> Parts:
    """A weight [..., out, in] from anywhere -> its parts on `device`, packed there some rows at a time.

    iterations: of the half-quadratic formats' solver, where not the usual number. Raises ValueError for weights that
    are not finite.
    """
    row, group = FORMATS[spec["format"]], spec["group_size"]
    more = {} if iterations is None or row.kind != "hqq" else {"iterations": iterations}
    parts = {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in row.layout(weight.shape, group).items()
    }
    height, width = weight.shape[-2:]
    step = max(group, PACKED_AT_ONCE // width // group * group)  # whole blocks, where there are blocks
    for expert, rows in enumerate(weight.reshape(-1, height, width)):  # no expert's codes depend on another's
        for start in range(0, height, step):
            chunk = rows[start : start + step].to(device).float()
            if not chunk.isfinite().all():
                raise ValueError("it holds numbers that are not finite")
            for name, part in row.pack(chunk, group, **more).items():
                whole = parts[name].view(-1, *parts[name].shape[-2:])[expert]
                whole.narrow(0, start * len(whole) // height, len(part)).copy_(part)
    return parts


def quantize(
    source: Path | str,
    format: dict,
    target: Path | str | None = None,
    device: torch.device | str = "cpu",
    force: bool = False,
    iterations: int | None = None,
    progress: bool = True,
) -> Path:
    """Write the checkpoint `source` anew with the modules that `format` names packed, about one layer in memory.

    target: a directory, by default model_<name of the format> beside the source. Returns it. Raises ValueError for a
    source that is quantised already, and as `Checkpoint` and `Writer` do; then nothing is left behind.
    """
    checkpoint = Checkpoint(source)
    if "modules" in checkpoint.format:
        raise ValueError(f"{source} is quantised already ({checkpoint.format['name']}): use it or its bf16 original")
    with torch.device("meta"):
        model = Transformer(model_args(checkpoint))
    for name, parameter in model.named_parameters():
        shape, dtype = checkpoint.tensors.get(name, (None, None))
        if shape != parameter.shape or dtype not in DTYPES.values():
            due = f"{list(parameter.shape)} in 16 or 32 bits"
            raise ValueError(
                f"{name} is not there as {due}, as the args ask for: convert the original checkpoint again"
            )
    target = Path(target) if target else checkpoint.directory.resolve().parent / f"model_{format['name']}"
    if target.resolve() == checkpoint.directory.resolve():
        raise ValueError(f"{target} is what is to be quantised: name another --output_dir")
    modules = format["modules"]
    sizes = {name: checkpoint.nbytes(name) for name in checkpoint.tensors}
    tied = "head" in modules and "head.weight" not in sizes
    apply(model, format)
    packed = sum(part.nbytes for m in model.modules() if isinstance(m, Packed) for part in m.parts().values())
    kept = sum(size for name, size in sizes.items() if name.removesuffix(".weight") not in modules)
    with (
        Writer(target, checkpoint.args, format, force) as writer,
        tqdm(total=sum(sizes.values()), desc="quantize", unit="B", unit_scale=True, file=sys.stderr,
             disable=not progress) as bar,
    ):  # fmt: skip
        writer.reserve(packed + kept)
        for file, names in checkpoint.by_file().items():
            tensors = {}
            for name in names:
                path, weight = name.removesuffix(".weight"), checkpoint.read(name)
                if path not in modules:
                    tensors[name] = weight
                if tied and path == "embedding":  # the head has been this same tensor, and now has parts of its own
                    path = "head"
                if path in modules:
                    try:
                        parts = pack_weight(weight, modules[path], torch.device(device), iterations)
                    except ValueError as error:
                        raise ValueError(f"{name}: {error}; fetch and convert the checkpoint again") from None
                    tensors |= {f"{path}.{leaf}": part for leaf, part in parts.items()}
                bar.update(sizes[name])
            writer.write(file, tensors)
        for path in checkpoint.side_files():
            writer.copy(path)
    return target


def bits_per_weight(checkpoint: Checkpoint) -> tuple[float, float]:
    """Bits a weight, with scales and zeros: over the weights in number formats alone, and over the whole checkpoint."""
    with torch.device("meta"):
        model = Transformer(model_args(checkpoint))
    count = {path: module.weight.numel() for path, module in model.named_modules() if hasattr(module, "weight")}
    modules = checkpoint.format["modules"]
    sizes = {name: 8 * checkpoint.nbytes(name) for name in checkpoint.tensors}
    packed = sum(size for name, size in sizes.items() if name.rsplit(".", 1)[0] in modules and name[-5:] != ".bias")
    everything = sum(parameter.numel() for parameter in model.parameters())
    return packed / sum(count[path] for path in modules), sum(sizes.values()) / everything


# Command ------------------------------------------------------------------------------------------------------------


def build_parser() -> Parser:
    parser = Parser(
        "Write a checkpoint anew with its weights in fewer bits.",
        (
            "python quantize.py --checkpoint_path checkpoints/OWNER/NAME/model_bf16 --mode int8",
            "python quantize.py --checkpoint_path DIR/model_bf16 --attention hqq4 --experts hqq2 --head int8",
        ),
    )
    add, names = parser.add_argument, (PLAIN, *FORMATS)
    add("--checkpoint_path", type=Path, required=True, metavar="DIR", help="a converted checkpoint, not quantised yet")
    add("--mode", choices=tuple(FORMATS), help="format of attention and experts; mxfp4 of experts alone")
    add("--attention", choices=names, help="format of the attention's weights, in place of --mode's")
    add("--experts", choices=names, help="format of the experts' (and dense feed-forward) weights, likewise")
    add("--head", choices=(PLAIN, "int8"), help="default: int8 with int8, fp8 and int4; bf16 with the others")
    add("--group_size", type=int, metavar="N", help="numbers that share a scale; default: 128 for int4 and fp8b, 64 "
        "for hqq4 and hqq3, 16 for hqq2")  # fmt: skip
    add("--iterations", type=int, metavar="N", help="of the hqq solver; default: 20; 0 is round-to-nearest")
    add("--output_dir", type=Path, metavar="DIR", help="default: model_<format> beside the checkpoint")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"), help="where the weights are packed")
    add("--force", action="store_true", help="replace an existing checkpoint")
    return parser


def run(options: argparse.Namespace) -> str:
    """Do what the options ask for, and say what came of it."""
    for name, least in (("group_size", 1), ("iterations", 0)):
        if (value := getattr(options, name)) is not None and value < least:
            raise ValueError(f"--{name} {value}: it must be at least {least}")
    if options.mode and options.attention and options.experts:
        raise ValueError("--mode says nothing beside --attention and --experts: leave one of the three out")
    source = Checkpoint(options.checkpoint_path)
    attention, experts = of_mode(options.mode or PLAIN)
    format = plan(
        model_args(source), options.attention or attention, options.experts or experts, options.head,
        options.group_size, source.format["name"],
    )  # fmt: skip
    kinds = {FORMATS[spec["format"]].kind for spec in format["modules"].values()}
    if options.iterations is not None and "hqq" not in kinds:
        raise ValueError(f"--iterations {options.iterations}: none of these formats has a solver, leave it out")
    start = time.perf_counter()
    device = pick_device(options.device)
    target = Checkpoint(
        quantize(source.directory, format, options.output_dir, device, options.force, options.iterations)
    )
    packed, whole = bits_per_weight(target)
    size = sum(map(target.nbytes, target.tensors))
    return (
        f"{target.directory}: {size / 1e9:.3f} GB, {packed:.3f} bits a quantised weight, {whole:.3f} over all weights, "
        f"in {time.perf_counter() - start:.1f} s"
    )


def main() -> int:
    """Run the command; a user's mistake is one line on stderr and exit code 2."""
    options = build_parser().parse_args()
    try:
        print(run(options))
    except (ValueError, OSError, torch.cuda.OutOfMemoryError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
