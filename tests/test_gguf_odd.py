"""Odd but legal GGUF files: other types of values, orders, alignments, keys that are missing."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf_checkpoint import add_value, write_gguf
from test_gguf import check_logits, refusal, small_peer, wide_peer

from gguf_files import side_files
from gguf_files.container import GGUFFile
from gguf_files.side_files import SideFiles
from gguf_files.source import GGUFCheckpoint
from host.staging import StagedDirectory
from runtime.loading import load_model

PREFIX = "qwen3moe."


@pytest.fixture(scope="module")
def peer():
    return small_peer("qwen3_moe")


@pytest.fixture(scope="module")
def plain(peer, tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("plain") / "a.gguf", peer)


def rewrite(
    source: Path,
    target: Path,
    change: Callable[[dict], dict] = lambda values: values,
    order: Callable[[list], list] = lambda tensors: tensors,
    alignment: int | None = None,
    types: dict[str, str] | None = None,
) -> Path:
    """Write a file again. types: of values by the end of their key, as GGUFWriter's methods."""
    reader = gguf.GGUFReader(source)
    fields = [f for f in reader.fields.values() if not f.name.startswith(("GGUF.", "general."))]
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in change({field.name: field.contents() for field in fields}).items():
        type = (types or {}).get(key.removeprefix(PREFIX))
        if type:
            getattr(writer, f"add_{type}")(key, value)
        else:
            add_value(writer, key, value)
    for tensor in order(list(reader.tensors)):
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def without(*keys: str) -> Callable[[dict], dict]:
    return lambda values: {k: v for k, v in values.items() if not k.endswith(keys)}


def with_values(**given) -> Callable[[dict], dict]:
    return lambda values: values | {PREFIX + k.replace("__", "."): v for k, v in given.items()}


LEGAL = {
    "an alignment of 8": dict(alignment=8),
    "an alignment of 4096": dict(alignment=4096),
    "tensors in another order": dict(order=lambda tensors: tensors[::-1]),
    "counts of other widths": dict(
        types={
            "expert_count": "uint64",
            "block_count": "uint16",
            "expert_used_count": "int8",
            "embedding_length": "int32",
            "rope.freq_base": "float64",
        }
    ),
    "a number of heads for each layer": dict(
        change=with_values(attention__head_count=[8, 8, 8], attention__head_count_kv=[4, 4, 4])
    ),
    "widths by the tensors alone": dict(change=without("feed_forward_length")),
    "no width of values": dict(change=without("value_length")),
    "an unknown file type": dict(change=lambda v: v | {"general.file_type": 9999}),
    "values that nobody knows": dict(
        change=lambda v: v | {"quantize.imatrix.file": "x", "author.sizes": [1, 2]}
    ),
    "RoPE's scaling of no kind": dict(change=with_values(rope__scaling__type="none")),
}


@pytest.mark.parametrize("case", LEGAL)
def test_legal_files_are_run(case, peer, plain, tmp_path):
    check_logits(rewrite(plain, tmp_path / "a.gguf", **LEGAL[case]), peer)


def test_arrays_of_arrays_are_values(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen3moe")
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    nested = GGUFFile(tmp_path / "a.gguf").values["nested"]
    assert [numbers.tolist() for numbers in nested] == [[1, 2], [3]]


def test_arrays_beyond_the_file_or_too_deep_are_one_line(tmp_path):
    """Each level has the type and the length of one array: 12 bytes."""
    one = (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    counts = ((3, 4), (0, 8), (1, 8), (1, 8))  # version, tensors, values, the length of a key
    header = b"GGUF" + b"".join(number.to_bytes(size, "little") for number, size in counts)
    for nested in (one * 1000, one + (9).to_bytes(4, "little") + (1 << 60).to_bytes(8, "little")):
        path = tmp_path / "a.gguf"
        path.write_bytes(header + b"k" + (9).to_bytes(4, "little") + nested + b"\0" * 64)
        assert "arrays, beyond the file" in refusal(path)


@pytest.mark.parametrize("family", ("qwen3_next", "deepseek_v2"))
def test_a_tensor_of_one_axis_is_refused_by_its_shape(family, tmp_path):
    """Each of the first layers', whatever is made of it."""
    source = write_gguf(tmp_path / "a.gguf", small_peer(family))
    tensors = gguf.GGUFReader(source).tensors
    names = {re.sub(r"blk\.\d+", "blk", t.name): t.name for t in tensors if len(t.shape) > 1}

    def flat(tensor, name: str):
        data = tensor.data.reshape(-1) if tensor.name == name else tensor.data
        return SimpleNamespace(name=tensor.name, data=data, tensor_type=tensor.tensor_type)

    for name in names.values():
        changed = [flat(tensor, name) for tensor in tensors]
        found = refusal(rewrite(source, tmp_path / "b.gguf", order=lambda _, c=changed: c))
        assert "shape" in found or name.endswith("ffn_gate_inp_shexp.weight"), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_values(attention__head_count_kv=[4, 2, 4]), "num_key_value_heads = [4, 2, 4]"),
        (without("context_length"), "its header lacks qwen3moe.context_length"),
        (without("layer_norm_rms_epsilon"), "lacks qwen3moe.attention.layer_norm_rms_epsilon"),
        (with_values(rope__scaling__type="ntk"), "ntk"),
        (with_values(rope__scaling__attn_factor=1.5), "attn_factor = 1.5 is not supported"),
        (lambda v: v | {"general.architecture": [1, 2]}, "the architecture '[1 2]' is not"),
    ],
)
def test_what_cannot_be_run_is_named(change, message, plain, tmp_path):
    assert message in refusal(rewrite(plain, tmp_path / "a.gguf", change))


@pytest.mark.parametrize(
    "given",
    (
        {"rope__scaling__factor": 4.0, "rope__scaling__type": "linear"},
        {"rope__scaling__factor": 4.0},
        {"rope__scale_linear": 4.0},
        {"rope__scaling__factor": 4.0, "rope__scale_linear": 2.0},
    ),
)
def test_a_factor_of_rope_is_linear_unless_a_type_is_given(given, peer, plain, tmp_path):
    """As in llama.cpp."""
    rope = peer.config.rope_parameters | {"rope_type": "linear", "factor": 4.0}
    config = type(peer.config).from_dict(peer.config.to_dict() | {"rope_parameters": rope})
    scaled = type(peer)(config).eval()
    scaled.load_state_dict(peer.state_dict())
    check_logits(rewrite(plain, tmp_path / "a.gguf", with_values(**given)), scaled)


@pytest.mark.parametrize(
    "given",
    (
        {"rope__scaling__factor": 0.0},
        {"rope__scaling__factor": 1.0},
        {"rope__scaling__factor": 4.0, "rope__scaling__type": "none"},
    ),
)
def test_a_factor_of_rope_that_scales_nothing(given, peer, plain, tmp_path):
    check_logits(rewrite(plain, tmp_path / "a.gguf", with_values(**given)), peer)


# Tensors ------------------------------------------------------------------------------------------


def replaced(source: Path, target: Path, name: str, data: np.ndarray, type: str) -> Path:
    """Write a file again with other numbers, or another type, of one tensor."""
    tensors = [t for t in gguf.GGUFReader(source).tensors if t.name != name]
    kind = gguf.GGMLQuantizationType[type]
    new = SimpleNamespace(name=name, data=data, tensor_type=kind)
    return rewrite(source, target, order=lambda _: [*tensors, new])


@pytest.mark.parametrize("type", ("Q8_0", "Q5_0", "Q4_1"))
def test_a_packed_tensor_of_one_axis_has_its_numbers(type, plain, tmp_path):
    """A block has several of its rows, of one number each."""
    (norm,) = (t for t in gguf.GGUFReader(plain).tensors if t.name == "blk.0.attn_norm.weight")
    kind = gguf.GGMLQuantizationType[type]
    packed = gguf.quants.quantize(norm.data, kind)
    path = replaced(plain, tmp_path / "b.gguf", norm.name, packed, type)
    model = load_model(GGUFCheckpoint(path), "cpu", torch.float32)
    want = torch.from_numpy(gguf.quants.dequantize(packed, kind)).view(-1)
    assert torch.equal(model.layers[0].attention_norm.weight, want)


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory) -> Path:
    def type(name: str) -> str:
        return "F32" if "inp" in name or "token_embd" in name else "NVFP4"

    return write_gguf(tmp_path_factory.mktemp("nvfp4") / "a.gguf", wide_peer("qwen3_moe"), type)


ONES = np.ones(32, np.float32)
SCALES = {
    "of three rows": (ONES[:3], "F32", "no scale of"),
    "of more than the rows": (np.ones(4096, np.float32), "F32", "no scale of"),
    "in blocks": (
        gguf.quants.quantize(ONES, gguf.GGMLQuantizationType.Q8_0),
        "Q8_0",
        "no scale of",
    ),
    "that is NaN": (ONES[:1] * np.nan, "F32", "holds NaN or infinity"),
}


@pytest.mark.parametrize("tensor", ("attn_q", "ffn_up_exps"))
@pytest.mark.parametrize("case", SCALES)
def test_a_scale_that_is_none_is_one_line(case, tensor, nvfp4, tmp_path):
    data, type, message = SCALES[case]
    path = replaced(nvfp4, tmp_path / "b.gguf", f"blk.0.{tensor}.scale", data, type)
    assert message in refusal(path)


def test_numbers_that_are_not_finite_beside_packed_rows_are_refused(tmp_path):
    """Q in 16 bits and K in blocks are one weight of two ranges."""
    types = {"attn_q.": "F16", "attn_k.": "Q8_0"}
    source = write_gguf(
        tmp_path / "a.gguf",
        small_peer("qwen3_moe"),
        lambda name: next((types[part] for part in types if part in name), "F32"),
    )
    (query,) = (t for t in gguf.GGUFReader(source).tensors if t.name == "blk.0.attn_q.weight")
    numbers = query.data.copy()
    numbers[3, 5] = np.nan
    path = replaced(source, tmp_path / "b.gguf", query.name, numbers, "F16")
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        load_model(GGUFCheckpoint(path), "cpu")


# The tokenizer's files ----------------------------------------------------------------------------


def test_the_files_of_two_processes_are_those_of_the_first(plain, tmp_path, monkeypatch):
    """Both began before there were any; the second one's command goes on with the first one's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(side_files, "tokenizer_files", lambda *_: {"a": b"second"})
    file, commit = GGUFFile(plain), StagedDirectory.commit
    made = []

    def late(staged, **options):
        monkeypatch.setattr(StagedDirectory, "commit", commit)
        monkeypatch.setattr(side_files, "tokenizer_files", lambda *_: {"a": b"first"})
        made.append(SideFiles(file, 160).directory("F32"))
        commit(staged, **options)

    monkeypatch.setattr(StagedDirectory, "commit", late)
    made.append(SideFiles(file, 160).directory("F32"))
    assert made[0] == made[1] and (made[0] / "a").read_bytes() == b"first"
    (made[0] / side_files.DONE).unlink()  # a damaged one is replaced
    assert SideFiles(file, 160).directory("F32") == made[0]
    assert (made[0] / side_files.DONE).is_file() and len(list(made[0].parent.iterdir())) == 1
