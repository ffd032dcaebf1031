"""Files that other programs quantized run in every mode, with the text of the eager answer.

The embedded models, a Mixtral and a hybrid with Gated DeltaNet, are written as GGUF, NVFP4, W4A16,
AWQ and W8A16. `make test` runs one of these files; `make test-all` all, compiled too, and by two
ranks.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT
from gguf_checkpoint import write_gguf
from published_files import LAYOUTS, write
from test_batch import run as run_batch
from test_gguf_tokenizer import sentencepiece_values

from gguf_files.opening import open_source
from model import ModelArgs
from models import args_of_checkpoint
from models.converter import convert
from offload.plan import OffloadSettings
from runtime.batch import Batch
from runtime.loading import load_model
from runtime.sampling import Sampling
from runtime.session import Session, SessionOptions
from runtime.speculation import Speculation
from tokenizer import load_tokenizer
from tp import ModelShard

GREEDY, COUNT = Sampling(temperature=0), 10
TEXTS = (
    "def read_lines(path):\n    with open(path) as file:\n        return file.read",
    "import os\n\n\nclass Writer:\n    def __init__(self, path):\n        self.path",
    "for name in names:\n    print(name)\n\nfor name in",
)
CLASSES = {
    "tiny-moe": transformers.MixtralForCausalLM,
    "tiny-hybrid": transformers.Qwen3_5MoeForCausalLM,
}
# Types of a GGUF file by a part of a tensor's name; the first that fits. Two ranks can share each.
TYPES = {
    "tiny-moe": {
        **{"inp": "F32", "attn_v": "Q6_K", "attn_output": "Q8_0", "ffn_down": "Q5_0"},
        **{"ffn_up": "Q5_K", "token_embd": "Q6_K"},
    },
    "tiny-hybrid": {
        **{"inp": "F32", "ssm_out": "Q8_0", "ssm_": "F16", "attn_output": "IQ4_NL"},
        **{"ffn_down": "F16", "ffn_up": "Q4_1", "ffn_gate": "Q4_0", "attn": "Q5_1", "": "Q8_0"},
    },
}
CASES = [
    ("tiny-moe", "GGUF"),
    ("tiny-moe", "compressed NVFP4"),
    ("tiny-moe", "compressed zeros"),
    ("tiny-moe", "compressed 8 bits in groups"),
    ("tiny-hybrid", "GGUF"),
    ("tiny-hybrid", "ModelOpt NVFP4"),
    ("tiny-hybrid", "compressed groups of 32"),
    ("tiny-hybrid", "AWQ"),
]
QUICK = (("tiny-hybrid", "ModelOpt NVFP4"),)
PARAMETERS = [
    pytest.param(case, marks=() if case in QUICK else pytest.mark.slow, id=" ".join(case))
    for case in CASES
]
# Its second products have rows of 32 numbers: a group of NVFP4, which ranks cannot share.
UNSHARED = "tiny-hybrid", "ModelOpt NVFP4"
SLOW = [pytest.param(case, marks=pytest.mark.slow, id=" ".join(case)) for case in CASES]
pytestmark = pytest.mark.usefixtures("few_threads")


def write_as_gguf(name: str, folder: Path) -> Path:
    source = ROOT / "checkpoints" / name
    peer = CLASSES[name].from_pretrained(source, dtype=torch.float32)
    values = {
        key: value.tolist() if hasattr(value, "tolist") else value
        for key, value in sentencepiece_values(source).items()
    }

    def type_of(tensor: str) -> str:
        return next((type for part, type in TYPES[name].items() if part in tensor), "Q4_K")

    return write_gguf(folder / f"{name}.gguf", peer, type_of, values)


class File:
    """A checkpoint, and the eager answers to TEXTS."""

    def __init__(self, case: tuple[str, str], folder: Path):
        name, layout = case
        if layout == "GGUF":
            self.path = write_as_gguf(name, folder)
        else:
            function, config, _ = LAYOUTS[layout]
            source = ROOT / "checkpoints" / name
            directory, _ = write(source, folder / "published", lambda name: function, config)
            self.path = convert(directory, folder / "model", "fp32", progress=False)
        tokenizer = load_tokenizer(ROOT / "checkpoints" / name)
        self.prompts = [tokenizer.encode(text) for text in TEXTS]
        self.model = self.load()  # computes the eager answers
        self.answers = [self.answer(ids) for ids in self.prompts]
        self.text = tokenizer.decode(self.answers[0])

    def load(self, **options) -> torch.nn.Module:
        return load_model(open_source(self.path), "cpu", torch.float32, **options)

    def args(self) -> ModelArgs:
        return args_of_checkpoint(open_source(self.path))

    def answer(self, ids: list[int]) -> list[int]:
        return list(Session(self.model, 128).stream(ids, COUNT, GREEDY))


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    return cache(lambda case: File(case, tmp_path_factory.mktemp("file")))


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_batch(case, file_of):
    file = file_of(case)
    requests = [(ids, COUNT, GREEDY) for ids in file.prompts]
    batch = Batch(Session(file.load(), 128, SessionOptions(batch=4)), 3)
    assert run_batch(batch, requests, [0, 3, 5]) == file.answers


@pytest.mark.parametrize("case", SLOW)
def test_a_prefix_that_is_used_again(case, file_of):
    """The second prompt is the first with its answer, and more."""
    file = file_of(case)
    session, ids = Session(file.load(), 128), file.prompts[0]
    assert list(session.stream(ids, COUNT, GREEDY)) == file.answers[0]
    longer = ids + file.answers[0] + file.prompts[2][:5]
    assert list(session.stream(longer, COUNT, GREEDY)) == file.answer(longer)
    assert session.prefilled < len(longer)


@pytest.mark.parametrize("case", PARAMETERS)
def test_speculation(case, file_of):
    file = file_of(case)
    speculation = Speculation(Session(file.load(), 128), 4)
    found = [list(speculation.stream(ids, COUNT, GREEDY)) for ids in file.prompts]
    assert found == file.answers and speculation.statistics()["drafted"] > 0


@pytest.mark.parametrize("case", PARAMETERS)
def test_offloaded_experts(case, file_of):
    file = file_of(case)
    model = file.load(experts=OffloadSettings(gpu_experts=5))
    assert list(Session(model, 128).stream(file.prompts[0], COUNT, GREEDY)) == file.answers[0]


@pytest.mark.parametrize("case", SLOW)
def test_a_compiled_session(case, file_of):
    torch._dynamo.reset()
    file = file_of(case)
    session = Session(file.load(), 128, SessionOptions(compile=True))
    assert list(session.stream(file.prompts[0], COUNT, GREEDY)) == file.answers[0]


@pytest.mark.parametrize("case", SLOW)
def test_two_ranks(case, file_of, tmp_path):
    file = file_of(case)
    if case == UNSHARED:
        with pytest.raises(ValueError, match="no multiple of 32, the smallest group of nvfp4"):
            ModelShard(file.args(), open_source(file.path).format, "tensor", 0, 2)
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    line = [*launch, "generate.py", "--checkpoint_path", str(file.path), "--prompt", TEXTS[0]]
    line += ["--temperature", "0", "--max_new_tokens", str(COUNT), "--dtype", "fp32", "--json"]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    options = dict(cwd=ROOT, capture_output=True, text=True, timeout=300)
    done = subprocess.run(line, env=variables, **options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == file.text
