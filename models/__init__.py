"""Model families, one file each. docs/adding_a_model.md shows how to add one."""

import torch

from formats.quantizer import DTYPES
from model import ModelArgs, Transformer
from models.afmoe import Afmoe
from models.config import MAX_INTEGER, MAX_INTEGERS, MAX_NUMBER
from models.deepseek import DeepseekV2, DeepseekV3
from models.ernie4_5_moe import Ernie4_5Moe
from models.family import HEAD_SUFFIX, Family
from models.flint import Flint
from models.gemma4 import Gemma4, Gemma4Text
from models.gguf import Values
from models.glm4_moe import Glm4Moe
from models.glm4_moe_lite import Glm4MoeLite
from models.gpt_oss import GptOss
from models.granitemoe import GraniteMoe
from models.granitemoehybrid import GraniteMoeHybrid
from models.kimi_linear import KimiLinear
from models.kolibri1 import Kolibri1
from models.laguna import Laguna
from models.legacy import args_of_version_one
from models.lfm2_moe import Lfm2Moe
from models.mellum import Mellum
from models.minimax_m2 import MiniMaxM2
from models.mixtral import Mixtral
from models.multi_token import head_family
from models.nemotron_h import NemotronH
from models.olmoe import Olmoe
from models.phimoe import Phimoe
from models.qwen2_moe import Qwen2Moe
from models.qwen3_5_moe import Qwen3_5Moe, Qwen3_5MoeText
from models.qwen3_moe import Qwen3Moe
from models.qwen3_next import Qwen3Next
from models.qwen4_exp import Qwen4Exp, Qwen4ExpText

# Keys are names in config.json's "architectures".
FAMILIES: dict[str, Family] = {
    "MixtralForCausalLM": Mixtral(),
    "Qwen3MoeForCausalLM": Qwen3Moe(),
    "Qwen2MoeForCausalLM": Qwen2Moe(),
    "Qwen3NextForCausalLM": Qwen3Next(),
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5Moe(),
    "Qwen3_5MoeForCausalLM": Qwen3_5MoeText(),
    "Qwen4ExpForConditionalGeneration": Qwen4Exp(),
    "Qwen4ExpForCausalLM": Qwen4ExpText(),
    "OlmoeForCausalLM": Olmoe(),
    "GraniteMoeForCausalLM": GraniteMoe(),
    "GraniteMoeHybridForCausalLM": GraniteMoeHybrid(),
    "PhimoeForCausalLM": Phimoe(),
    "Glm4MoeForCausalLM": Glm4Moe(),
    "Glm4MoeLiteForCausalLM": Glm4MoeLite(),
    "Gemma4ForConditionalGeneration": Gemma4(),
    "Gemma4ForCausalLM": Gemma4Text(),
    "DeepseekV2ForCausalLM": DeepseekV2(),
    "DeepseekV3ForCausalLM": DeepseekV3(),
    "GptOssForCausalLM": GptOss(),
    "NemotronHForCausalLM": NemotronH(),
    "Lfm2MoeForCausalLM": Lfm2Moe(),
    "MiniMaxM2ForCausalLM": MiniMaxM2(),
    "Ernie4_5_MoeForCausalLM": Ernie4_5Moe(),
    "LagunaForCausalLM": Laguna(),
    "FlintForCausalLM": Flint(),
    "MellumForCausalLM": Mellum(),
    "Kolibri1ForCausalLM": Kolibri1(),
    "AfmoeForCausalLM": Afmoe(),
    "KimiLinearForCausalLM": KimiLinear(),
}

# The config.json of published models by name, for benchmark.py.
CONFIGS: dict[str, dict] = {
    name: {"model_type": family.name} | config
    for family in FAMILIES.values()
    for name, config in family.shapes.items()
}


def family_of_config(config: dict) -> Family:
    """Return the family that a config.json names by `architectures`, or else by `model_type`.

    Raises ValueError for one that is not supported.
    """
    names, model_type = config.get("architectures"), config.get("model_type")
    for name, family in FAMILIES.items():
        known_type = model_type in (None, family.name)
        if known_type and (names == [name] or (not names and model_type)):
            return family
    what = f"architectures = {names!r:.60} with model_type = {model_type!r:.30}"
    raise ValueError(f"config.json: {what} is not supported; {known_families()}")


def known_families() -> str:
    """Return what an error says about names of families. It is short enough for one line."""
    return f"supported are {', '.join({family.name: None for family in FAMILIES.values()})}"


def family_of_gguf(values: Values) -> Family:
    """Return the family of a GGUF file. Raises ValueError for an architecture without any."""
    for family in FAMILIES.values():
        if family.gguf == values.architecture and family.is_gguf(values):
            return family
    known = ", ".join(sorted({family.gguf for family in FAMILIES.values() if family.gguf}))
    what = f"the architecture {values.architecture!r:.60} is not supported"
    raise ValueError(f"{what}; supported are {known}")


def family_of(args: ModelArgs) -> Family:
    """Return the family of these args."""
    return family_named(args.family)


def family_named(name: str) -> Family:
    """Return the family of this name, or of its heads. Raises ValueError for an unknown one."""
    base = str(name).removesuffix(HEAD_SUFFIX)
    for family in FAMILIES.values():
        if family.name == base:
            return family if name == base else head_family(family)
    raise ValueError(f"family {name!r:.60} is not supported; {known_families()}")


def head_args(args: ModelArgs) -> ModelArgs:
    """Return the args of the head for multi-token prediction that a model of these args may have.

    They describe a model of one layer (models/multi_token.py).
    """
    return family_of(args).head_args(args)


def args_from_hf(config: dict) -> ModelArgs:
    """Return the args of a config.json. Raises ValueError naming what cannot be run."""
    return family_of_config(config).from_hf(config)


# The args of published models by name.
ARCHITECTURES: dict[str, ModelArgs] = {name: args_from_hf(CONFIGS[name]) for name in CONFIGS}


def args_from_json(values: dict) -> ModelArgs:
    """Return the args that a converted checkpoint's config.json holds, of version one too.

    Raises ValueError for args of another version.
    """
    try:
        if "family" not in values:
            values = args_of_version_one(values, {f.name: f.args_class for f in FAMILIES.values()})
        args = family_named(values["family"]).args_class(**values)
        check_sizes(args)
        return args
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the checkpoint's args are of another version ({error}): convert the model again"
        ) from None


def check_sizes(args: ModelArgs) -> None:
    """Raise ValueError for numbers beyond those that any config.json may have."""
    limits = {
        "n_layer": MAX_INTEGERS["num_hidden_layers"],
        "n_expert": MAX_INTEGERS["num_experts"],
    }
    for name, value in vars(args).items():
        limit = MAX_NUMBER if isinstance(value, float) else limits.get(name, MAX_INTEGER)
        if isinstance(value, int | float) and value > limit:
            raise ValueError(f"{name} cannot be {str(value)[:40]}")


def args_of_checkpoint(source) -> ModelArgs:
    """Return a checkpoint's args. Raises ValueError for an unknown version or format."""
    format = source.format if isinstance(source.format, dict) else {}
    dtype = format.get("dtype", format.get("name"))
    known = isinstance(format.get("name"), str) and isinstance(dtype, str) and dtype in DTYPES
    if not known:
        what = str(source.format)[:80]
        raise ValueError(f"number format {what!r} is not known here: convert the model again")
    return args_from_json(source.args)


def build_model(args: ModelArgs, dtype: torch.dtype = torch.float32) -> Transformer:
    """Return the model of these args on the meta device, without weights.

    dtype: of its parameters. Raises ValueError if one would have more than 2**63 bytes.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # to convert 48 layers would take as long as to build them
    try:
        with torch.device("meta"):
            return family_of(args).model_class(args)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ValueError("the model's args are too large: convert the model again") from None
    finally:
        torch.set_default_dtype(before)


def import_meta_kernels() -> None:
    """Import torch's Python kernels of the meta device, for arithmetic there.

    A command postpones them, since they take 0.3 s (host/quick_imports.py).
    """
    import torch._decomp  # noqa: F401
