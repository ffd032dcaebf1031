"""GGUF files that llama.cpp's own quantizer wrote (`make oracles` builds it)."""

import itertools
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from conftest import ROOT, randomize
from gguf_checkpoint import entries, put_back, write_gguf
from test_gguf import READ, check_logits, check_text, small_peer, wide_peer
from test_gguf_tokenizer import TINY, sentencepiece_values
from transformers import MixtralForCausalLM

from formats import FORMATS
from gguf_files.conversions import ROUNDED, ROUNDED_TO
from tokenizer import load_tokenizer

QUANTIZER = ROOT / "build" / "oracles" / "llama-quantize"
NEVER_PACKED = "token_embd", "attn_k_b", "attn_v_b", "ssm_ba", "ssm_alpha", "ssm_beta"
KEPT = "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q4_0", "IQ4_XS", "Q4_1", "Q5_1"
TEXT = "import os\n\n\ndef find_files(directory, suffix):\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not QUANTIZER.exists(), reason="no llama-quantize: run `make oracles`"),
]


def cases(first: str, *others: str) -> list[tuple[str, str]]:
    """Return all families with the first of these types, and some with the others."""
    some = itertools.product(("qwen3_5_moe", "gpt_oss", "glm4_moe_lite"), others)
    return [*((name, first) for name in READ), *some]


def peer_of(make: Callable, name: str):
    """Return transformers' model. llama.cpp lets one of 26 or 27 layers lack q_lora_rank."""
    peer = make(name)
    if name != "deepseek_v2":
        return peer
    peer.config.num_hidden_layers = 27
    peer = type(peer)(peer.config).eval()
    randomize(peer)
    return peer


def quantized(path: Path, kind: str, *options: str) -> Path:
    """Return a file that llama.cpp's quantizer makes of a plain one, beside it."""
    target = path.with_name(f"{path.stem}-{kind}.gguf")
    command = [QUANTIZER, *options, path, target, kind, "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return target


def take_weights(peer, path: Path) -> set[str]:
    """Give a model the numbers that the package `gguf` dequantizes of a file; return its types.

    Types that are rounded again here are so in the model too.
    """
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    types, state = {t.tensor_type.name for t in tensors.values()}, peer.state_dict()
    with torch.no_grad():
        for entry in entries(peer.config, state):
            tensor = tensors.pop(entry.name)
            type = tensor.tensor_type.name
            if type == "F32":
                continue
            values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            packed = not any(part in entry.name for part in NEVER_PACKED)
            if type in ROUNDED and packed:
                values = rounded(values, ROUNDED_TO)
            put_back(entry, state, values)
    assert not tensors
    return types


def rounded(values: torch.Tensor, format: str) -> torch.Tensor:
    """Return the numbers after they were packed; they are not far from the given ones."""
    form = FORMATS[format]
    found = form.unpack(form.pack(values, form.group), form.group)
    assert (found - values).norm() / values.norm() < 0.08
    return found


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("name", READ)
def test_logits_and_text_of_a_quantized_file_match_transformers(name, kind, tmp_path, caplog):
    peer = peer_of(wide_peer, name)
    path = quantized(write_gguf(tmp_path / "a.gguf", peer, lambda tensor: "F16"), kind)
    types = take_weights(peer, path)
    assert kind.removesuffix("_M") in types
    check_text(check_logits(path, peer), peer)
    assert "rounded again" not in caplog.text


@pytest.mark.parametrize(("name", "kind"), cases("Q3_K_M", "Q2_K", "IQ3_S", "TQ2_0"))
def test_types_without_a_format_become_the_one_that_is_told_of(name, kind, tmp_path, caplog):
    peer = peer_of(wide_peer, name)
    path = quantized(write_gguf(tmp_path / "a.gguf", peer, lambda tensor: "F16"), kind)
    take_weights(peer, path)
    check_text(check_logits(path, peer), peer)
    type = kind.removesuffix("_M")
    assert f"{type} as {ROUNDED_TO}" in caplog.text


@pytest.mark.parametrize(("name", "kind"), cases("Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS"))
def test_rows_that_no_block_of_256_divides(name, kind, tmp_path):
    """llama.cpp takes a type of smaller blocks for them, or leaves them in 16 bits."""
    peer = peer_of(small_peer, name)
    path = quantized(write_gguf(tmp_path / "a.gguf", peer, lambda tensor: "F32"), kind)
    take_weights(peer, path)
    check_text(check_logits(path, peer), peer)


# Commands -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, str]:
    """Return the embedded model in Q4_K_M and the text that transformers writes with it."""
    peer = MixtralForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    values = {
        key: value.tolist() if hasattr(value, "tolist") else value
        for key, value in sentencepiece_values(TINY).items()
    }
    plain = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    path = quantized(write_gguf(plain, peer, lambda tensor: "F16", values), "Q4_K_M")
    assert take_weights(peer, path) >= {"Q4_K", "Q6_K", "Q5_0"}
    tokenizer = load_tokenizer(TINY)
    ids = torch.tensor([tokenizer.encode(TEXT)])
    found = peer.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    return path, tokenizer.decode(found[0, ids.shape[1] :].tolist())


def start(script: str, path: Path, folder: Path, *options: str) -> subprocess.Popen:
    line = [sys.executable, ROOT / script, "--checkpoint_path", path, *options]
    places = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(line, cwd=ROOT, env=os.environ | places, **pipes)


def test_generate_writes_the_text_of_transformers(tiny, tmp_path):
    path, want = tiny
    options = "--prompt", TEXT, "--temperature", "0", "--max_new_tokens", "24", "--dtype", "fp32"
    process = start("generate.py", path, tmp_path, *options, "--json", "--device", "cpu")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert json.loads(output)["text"] == want


def test_serve_answers_with_the_text_of_transformers(tiny, tmp_path):
    path, want = tiny
    options = "--port", "0", "--dtype", "fp32", "--device", "cpu"
    process = start("serve.py", path, tmp_path, *options)
    try:
        found = (re.search(r"on (http://\S+)/v1", line) for line in process.stderr)
        url = next(match[1] for match in found if match)
        body = {"prompt": TEXT, "max_tokens": 24, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["choices"][0]["text"] == want
    finally:
        process.kill()
        process.communicate()


def test_eval_measures_it(tiny, tmp_path):
    """Q4_K_M costs little of the quality of 16 bits."""
    found = []
    for path in (tiny[0], tiny[0].with_name("tiny.gguf")):
        options = "--seq_len", "256", "--json", "--device", "cpu"
        text = "--text_file", str(ROOT / "generate.py")
        process = start("eval.py", path, tmp_path, *text, *options)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        found.append(json.loads(output))
    packed, plain = found
    assert 1 < packed["perplexity"] / plain["perplexity"] < 1.1
    assert packed["bytes"] < 0.5 * plain["bytes"], (
        "the embedding has 16 bits, and the head is packed"
    )
