"""Odd but legal GGUF files: other types of values, orders, alignments, keys that are missing."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from gguf_checkpoint import add_value, write_gguf
from test_gguf import check_logits, refusal, small_peer

from gguf_files.container import GGUFFile

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
        (lambda v: v | {"general.architecture": [1, 2]}, "the architecture '[1 2]' is not"),
    ],
)
def test_what_cannot_be_run_is_named(change, message, plain, tmp_path):
    assert message in refusal(rewrite(plain, tmp_path / "a.gguf", change))
