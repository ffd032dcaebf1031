"""Reading quantization_config of a config.json: which published files can be kept as they are."""

from typing import NamedTuple

MODELOPT_FILE = "hf_quant_config.json"  # ModelOpt's own, beside config.json
NEAREST = "fetch the original bf16 or fp16 checkpoint"
FOUR_BITS = "only 4 bits are kept as published; add :int8 to the name of the bf16 model for 8"
INT8 = "add :int8 to the name of the bf16 model, or take a symmetric file"
IN_ORDER = "take a file without it, AWQ for example, or add :int4 to the name of the bf16 model"
BITS = "only 4 and 8 bits are kept as published; add :int4 to the name of the bf16 model"
# ModelOpt's algorithms whose tensors are kept.
MODELOPT = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "MIXED_PRECISION": "nvfp4",
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
}
# Formats of compressed-tensors; None: by the number of zeros.
COMPRESSED = {
    "nvfp4-pack-quantized": "nvfp4",
    "mixed-precision": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
    "float-quantized": "fp8",
    "int-quantized": "int8",
    "naive-quantized": "fp8",
    "pack-quantized": None,
}
# AutoRound's ways to pack: the layout, and the number that is added to its zeros.
AUTO_ROUND = {
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round:gptqmodel": ("gptq", 0),
    "auto_round": ("gptq", 0),
    "auto_round:auto_awq": ("awq", 0),
}


class Published(NamedTuple):
    """How the weights of a config.json are stored.

    name: the format in `formats.FORMATS` that most of them get. layout: "gptq" or "awq" for files
    with `qweight`; "": tensors tell. added: to stored zeros. symmetric: all zeros are 8.
    """

    name: str
    layout: str = ""
    added: int = 0
    symmetric: bool = False


def published_config(given: object, methods: tuple[str, ...]) -> Published | None:
    """Read quantization_config, None for 16 or 32 bits.

    methods: the quant_methods that the family is published in. Raises ValueError, naming what is
    not supported, for any other.
    """
    if given is None:
        return None
    method = given.get("quant_method", given) if isinstance(given, dict) else given
    if not isinstance(given, dict) or not isinstance(method, str) or method not in methods:
        raise refused(f" = {method!r:.80}")
    return READERS[method](given)


def published_format(config: dict, methods: tuple[str, ...]) -> str | None:
    """Return the format that config.json says its weights have, None for 16 or 32 bits."""
    published = published_config(config.get("quantization_config"), methods)
    return published and published.name


def refused(what: str, fix: str = NEAREST) -> ValueError:
    return ValueError(f"config.json: quantization_config{what} is not supported; {fix}")


def one_of(given: dict, key: str, known, default=None, fix: str = NEAREST):
    """Return the value of a key, if it is one of those that are known. Raises ValueError."""
    value = given.get(key)
    value = default if value is None else value
    if not any(type(value) is type(other) and value == other for other in known):
        raise refused(f"'s {key} = {given.get(key)!r:.80}", fix)
    return value


def read_fp8(given: dict) -> Published:
    """transformers' FineGrainedFP8Config writes no fmt; e4m3 is then meant. Activations stay 16."""
    one_of(given, "fmt", ("e4m3",), "e4m3")
    one_of(given, "activation_scheme", ("dynamic", "static"), "dynamic")
    blocks = one_of(given, "weight_block_size", ([128, 128], None))
    return Published("fp8b" if blocks else "fp8")


def read_mxfp4(given: dict) -> Published:
    return Published("mxfp4")


def read_modelopt(given: dict) -> Published:
    return Published(MODELOPT[one_of(given, "quant_algo", MODELOPT)])


def read_compressed(given: dict) -> Published:
    name = COMPRESSED[one_of(given, "format", COMPRESSED, "pack-quantized")]
    if given.get("transform_config"):
        raise refused("'s transform_config")  # weights are rotated, x would have to be
    sparsity = given.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise refused("'s sparsity_config")
    if name is None:
        groups = given.get("config_groups")
        groups = groups.values() if isinstance(groups, dict) else ()
        weights = [group.get("weights") for group in groups if isinstance(group, dict)]
        weights = [w for w in weights if isinstance(w, dict)]
        check_actorder(weights)
        name = "int4" if all(w.get("symmetric", True) for w in weights) else "uint4"
        if weights and all(w.get("num_bits") == 8 for w in weights):
            name = "int8" if all(w.get("strategy") == "channel" for w in weights) else "q8_0"
    return Published(name)


def read_awq(given: dict) -> Published:
    one_of(given, "bits", (4,), fix=FOUR_BITS)
    version = given.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise refused(f"'s version = {version!r:.80}", "only gemm is kept as published")
    symmetric = not one_of(given, "zero_point", (True, False), True)
    return Published("int4" if symmetric else "uint4", "awq", 0, symmetric)


def check_actorder(weights: list[dict]) -> None:
    """Raise ValueError for groups that are ordered by activation, in a file of compressed-tensors.

    With "weight" or "static" the groups are runs of neighbors.
    """
    for each in weights:
        order = each.get("actorder")
        if order in ("group", "dynamic") and each.get("strategy") == "group":
            raise refused(f"'s actorder = {order!r}", IN_ORDER)


def check_desc_act(given: dict) -> None:
    """Raise ValueError for groups that are ordered by activation, in a file of GPTQ.

    With `static_groups`, or one group a row, the groups are runs of neighbors.
    """
    is_sorted = given.get("static_groups") is True or given.get("group_size") == -1
    if given.get("desc_act") is True and not is_sorted:
        raise refused("'s desc_act = True", IN_ORDER)


def integers(given: dict, layout: str, added: int) -> Published:
    """Integers of 4 or 8 bits, symmetric if "sym" says so."""
    symmetric = one_of(given, "sym", (True, False), True)
    name = "int4" if symmetric else "uint4"
    if one_of(given, "bits", (4, 8), fix=BITS) == 8:
        if layout == "awq" or not symmetric:
            raise refused(f"'s bits = 8 with {'AWQ' if layout == 'awq' else 'zeros'}", INT8)
        name = "int8" if given.get("group_size") == -1 else "q8_0"
    return Published(name, layout, added, symmetric)


def read_gptq(given: dict) -> Published:
    known = {"gptq": 1, "gptq_v2": 0}
    key = "checkpoint_format" if "checkpoint_format" in given else "format"
    check_desc_act(given)
    return integers(given, "gptq", known[one_of(given, key, known, "gptq")])


def read_auto_round(given: dict) -> Published:
    one_of(given, "data_type", ("int",), "int")
    key = "packing_format" if "packing_format" in given else "backend"
    layout, added = AUTO_ROUND[one_of(given, key, AUTO_ROUND, "auto_round:auto_gptq")]
    return integers(given, layout, added)


READERS = {
    "fp8": read_fp8,
    "mxfp4": read_mxfp4,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "compressed-tensors": read_compressed,
    "awq": read_awq,
    "gptq": read_gptq,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,
}
# In what most families are published.
METHODS = tuple(method for method in READERS if method != "mxfp4")
