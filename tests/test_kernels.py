"""Our Triton kernels without a GPU: results under the interpreter, machine code for an H200.

kernels_without_gpu.py makes both, in processes of its own. Inline assembly, which the interpreter
does not know, is run here by a small interpreter of PTX.
"""

import ast
import operator
import re
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from without_gpu import run_without_gpu

from formats import FORMATS
from formats.gguf_blocks import IQ4
from formats.mxfp4 import E2M1
from ops import launch
from ops.products import gguf_units, units, words

pytestmark = pytest.mark.usefixtures("few_threads")


def without_a_gpu(*names: str, **variables: str) -> dict[str, dict]:
    return run_without_gpu("kernels_without_gpu.py", *names, **variables)


def interpret(name: str) -> dict[str, float]:
    """Return the errors of a group of cases in Triton's interpreter."""
    return without_a_gpu(name, TRITON_INTERPRET="1")[name]


def check_attention(errors: dict[str, float], cases: int) -> None:
    assert len(errors) == cases and all(error < 2e-6 for error in errors.values()), errors


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict]:
    """Return the kernels' errors; one process, which takes longer to start than most of them."""
    names = (
        "grouped, a shape a format",
        "dot4, few",
        "token, few",
        "rings",
        "begin",
        "fixed",
        "rows",
    )
    names += ("words",)  # the last: it replaces functions
    return without_a_gpu(*names, TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def machine_code() -> dict[str, dict]:
    """Return counts of machine code, which takes long to make: for slow tests."""
    return without_a_gpu("dot4", "token", "queries", "fixed", "fetch", "rows")


def check_grouped_errors(errors: dict[str, float]) -> None:
    limits = {case: 1e-6 if "float32" in case else 2e-3 for case in errors}
    assert all(error < limits[case] for case, error in errors.items()), errors


def test_the_kernel_computes_what_the_cpu_computes(interpreted):
    errors = interpreted["grouped, a shape a format"]
    assert len(errors) == len(FORMATS) + 7
    check_grouped_errors(errors)


@pytest.mark.slow
def test_the_kernel_computes_what_the_cpu_computes_in_every_shape():
    errors = interpret("grouped")
    assert len(errors) == 2 * 5 * (len(FORMATS) + 1) + 17
    check_grouped_errors(errors)


@pytest.mark.slow
def test_the_copy_out_of_host_memory(machine_code):
    found = interpret("fetch")
    assert found == {"right": [True] * 3}
    assert machine_code["fetch"] == {"LDG.E.128": 8, "STG.E.128": 8}


def test_rows_of_a_batch_are_copied_and_exchanged(interpreted):
    assert interpreted["rows"] == [True] * 10


def test_what_is_the_same_on_every_gpu(interpreted):
    errors = interpreted["fixed"]
    assert len(errors) == 33
    for case, error in errors.items():  # the interpreter cuts where a GPU rounds to bf16
        assert error < (5e-3 if "bfloat16" in case else 1e-6), case


@pytest.mark.slow
def test_moves_of_rows_compile_for_an_h200(machine_code):
    assert machine_code["rows"]["STG.E"] >= 24  # 1 + 2 stores of 8 words a thread


@pytest.mark.slow
def test_what_is_the_same_on_every_gpu_compiles_for_an_h200(machine_code):
    for case, counts in machine_code["fixed"].items():
        assert counts["waits"] == counts["starts"] == 1 and counts["spills"] == 0, case
        if "over" in case:  # 16 bytes, two words with their counts, to each other rank
            assert counts["sent"] == int(case[-1]) - 1
        if "fixed" in case:  # the prefetch of the norm's weight
            assert counts["ahead"] >= 1


@pytest.mark.slow
def test_attention_that_reads_the_blocks_in_use():
    check_attention(interpret("attend"), 8)


@pytest.mark.slow
def test_attention_that_reads_the_blocks_in_use_compiles_for_an_h200():
    found = without_a_gpu("attend", "latent")
    assert len(found["latent"]) == 8
    for case, counts in found["latent"].items():
        assert counts["products"] and not counts["spills"] and counts["shared"] <= 227 << 10, case
    for counts in found["attend"].values():
        assert counts["spills"] == 0 and counts["products"] > 0


def test_one_tokens_attention_in_one_kernel(interpreted):
    errors = interpreted["token, few"]
    check_attention(errors, 3)


def test_a_step_begins_with_the_tokens_embeddings_and_rope(interpreted):
    assert list(interpreted["begin"].values()) == [0, 0, 0]


def test_attention_over_a_ring_is_that_over_all_positions(interpreted):
    errors = interpreted["rings"]
    check_attention(errors, 2)


@pytest.mark.slow
def test_attention_over_rings_of_every_kind():
    """One token and up to 64, whose padding and idle rows leave the ring as it is."""
    check_attention(interpret("rings, more"), 6)


@pytest.mark.slow
def test_one_tokens_attention_in_every_form(machine_code):
    check_attention(interpret("token"), 13)
    for case, counts in machine_code["token"].items():
        bodies = 2 if "bfloat16" in case else 1
        assert counts["waits"] == counts["starts"] == bodies and counts["spills"] == 0, case
        assert counts["products"] > 0, case
        # The first block of the cache is loaded before the wait for the previous kernel.
        few, *more = counts["ahead"]
        assert few >= counts["block"] > 0 and all(n >= 2 * counts["block"] for n in more), case
        # Keys and values of two blocks are in flight before the first of them is used.
        assert bodies == 1 or counts["together"] >= 2 * counts["block"], case
        # Over a short cache there is nothing to merge.
        assert counts["merges"] == ("32768" in case), case


def check_queries_code(found: dict[str, dict]) -> None:
    """No spills; the first block of the cache and RoPE are loaded before the wait."""
    for case, counts in found.items():
        assert counts["waits"] == counts["starts"] == 1 and counts["spills"] == 0, case
        assert counts["shared"] <= 227 << 10, case
        if case.endswith("attend_kernel"):
            assert counts["products"] and counts["ahead"] >= 8, case


@pytest.mark.slow
def test_few_queries_attention_in_one_kernel():
    check_attention(interpret("queries"), 3)


@pytest.mark.slow
def test_few_queries_attention_in_one_kernel_compiles_for_an_h200(machine_code):
    assert len(machine_code["queries"]) == 3  # over two blocks or fewer there is nothing to merge
    check_queries_code(machine_code["queries"])


@pytest.mark.slow
def test_few_queries_attention_at_other_sizes():
    check_attention(interpret("queries, more"), 14)


@pytest.mark.slow
def test_few_queries_attention_compiles_for_an_h200():
    found = without_a_gpu("queries, more")["queries, more"]
    assert len(found) == 15 and sum("merge_kernel" in case for case in found) == 7, list(found)
    check_queries_code(found)


@pytest.mark.slow
def test_one_tokens_latent_attention_of_small_heads():
    check_attention(interpret("latent token, few"), 2)


@pytest.mark.slow
def test_one_tokens_latent_attention_at_published_sizes():
    check_attention(interpret("latent token"), 8)


@pytest.mark.slow
def test_few_tokens_latent_attention():
    check_attention(interpret("latent tokens"), 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("latent token", "latent tokens"))
def test_latent_attention_compiles_for_an_h200(name):
    """Weights are loaded before the wait, and for one token a block of the cache is prefetched."""
    found = without_a_gpu(name)[name]
    assert len(found) == 10
    for case, counts in found.items():
        assert counts["waits"] == counts["starts"] == 1 and counts["spills"] == 0, case
        assert counts["shared"] <= 227 << 10, case
        if case.startswith("_attend"):
            assert counts["products"] and counts["prefetches"] == (name == "latent token"), case
        else:
            assert counts["ahead"] >= 8, case


def check_machine_code(found: dict) -> None:
    """Tensor cores, with weights from registers, which nothing overwrites meanwhile; no spills.

    With more than 32 rows an expert of GGUF's 4 to 6 bits, NVFP4 and HQQ's 4 bits some of 128
    registers spill, so that two programs share a multiprocessor: that is faster.
    """
    for case, counts in found.items():
        assert counts["bytes"] and counts["shared"] <= 227 << 10 and not counts["overwritten"], case
        if "float32" not in case:
            assert counts["products"], case
            format = case.partition(",")[0]
            kind = FORMATS[format.split()[0]].kind
            limited = counts["registers"] == 128
            limited &= kind in ("iq4", "q4_k", "q5_k", "q6_k", "nvfp4", "hqq")
            assert counts["spills"] <= (80 if limited else 0), case
            assert counts["from_shared_memory"] == 0, case
            if "300 rows" in case:
                # 4 bits have a smaller tile for an expert's last rows.
                rows = [256] if format.startswith(("hqq2", "hqq3")) else [32, 128]
                rows[0] = 16 if kind in ("q4_k", "q5_k") else rows[0]
                assert counts["columns"] == ([128] if "8" in format else rows), case


@pytest.mark.slow
def test_the_kernel_compiles_for_an_h200():
    found = without_a_gpu("grouped, a shape a format")["grouped, a shape a format"]
    assert len(found) == len(FORMATS) + 6
    check_machine_code(found)


def test_the_product_for_one_token_in_each_format(interpreted):
    errors = interpreted["dot4, few"]
    assert len(errors) == 13 and all(error < 1e-5 for error in errors.values()), errors


@pytest.mark.slow
def test_the_product_for_one_token_computes_what_unpacked_weights_do():
    errors = interpret("dot4")
    assert [errors.pop(value) for value in ("inf", "-inf", "nan")] == [True] * 3
    assert len(errors) == 36
    limits = {case: 1e-3 if "gated" in case else 1e-5 for case in errors}
    assert all(error < limits[case] for case, error in errors.items()), errors


def test_codes_are_multiplied_alike_without_inline_assembly(interpreted):
    """By shifts, and by NVIDIA's instructions; tensor cores' numbers are those of fp32."""
    assert len(interpreted["words"]) > 40 and not any(interpreted["words"])


@pytest.mark.slow
def test_the_product_for_one_token_compiles_for_an_h200(machine_code):
    """Four words a load, bytes multiplied in pairs, no spills, one wait."""
    found = machine_code["dot4"]
    assert len(found) == 31
    for case, counts in found.items():
        assert counts["loads"] and counts["spills"] == 0, case
        assert counts["products"] % 8 == 0 < counts["products"], case
        assert counts["waits"] == counts["starts"] == 1, case


def assembly(function, **constants: int) -> str:
    """Return the PTX of a kernel function's inline block, one instruction a line.

    constants: values of its constexpr arguments.
    """
    tree = ast.parse(function.src)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (call,) = (
        node for node in calls if getattr(node.func, "attr", None) == "inline_asm_elementwise"
    )
    named = {
        node.target.id: node.value for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)
    }
    text = named.pop(getattr(call.args[0], "id", None), call.args[0])
    for name, value in named.items():
        with suppress(NameError):  # its value depends on an argument that is no constant
            constants[name] = eval(compile(ast.Expression(value), name, "eval"), constants)
    text = eval(compile(ast.Expression(text), function.__name__, "eval"), constants)
    return "".join(f"  {line.strip()};\n" for line in text.strip("{}").split(";") if line.strip())


def run_assembly(source: str, **values: int) -> dict[str, int]:
    """Interpret the PTX of an inline block -> its registers. values: _2 is that of $2, etc.

    It knows only the instructions of the blocks tested here.
    """
    registers = {f"${name[1:]}": value for name, value in values.items()}

    def read(name: str) -> int:
        return (
            int(name[2:], 16)
            if name.startswith(("0x", "0f"))
            else int(name)
            if name.isdecimal()
            else registers[name]
        )

    def signed(value: int, bits: int) -> int:
        return (value & (1 << bits) - 1) - (value >> bits - 1 & 1) * (1 << bits)

    for line in re.findall(r"^\s+(\w+[.\w]*) ([^;]+);", source, flags=re.M):
        name, arguments = line[0], line[1].replace("{", "").replace("}", "").split(", ")
        if name == "mov.b32" and line[1].startswith("{"):
            whole = read(arguments[2])
            registers[arguments[0]], registers[arguments[1]] = whole & 0xFFFF, whole >> 16
        elif name == "mov.b64":
            whole = read(arguments[2]) & (1 << 64) - 1
            registers[arguments[0]], registers[arguments[1]] = whole & 0xFFFFFFFF, whole >> 32
        elif name != ".reg":
            target, *given = arguments[0], *map(read, arguments[1:])
            if name == "mov.b32":
                found = given[0] if len(given) == 1 else given[0] | given[1] << 16
            elif name.endswith(".f32"):
                first, second, *third = map(as_fp32, given)
                if name == "cvt.rn.bf16x2.f32":
                    both = torch.tensor((second, first)).bfloat16()
                    found = both.view(torch.int32).item() & 0xFFFFFFFF
                else:
                    product = {"sub.f32": first - second}.get(name, first * second)
                    found = fp32_bits(product + sum(third))
            elif name == "fma.rn.bf16x2":  # in fp32, and rounded: exact as far as products are
                parts = torch.tensor(given).to(torch.int32).view(torch.bfloat16).view(3, 2).double()
                found = (parts[0] * parts[1] + parts[2]).bfloat16().view(
                    torch.int32
                ).item() & 0xFFFFFFFF
            elif name == "lop3.b32":
                logic = given.pop()  # 0xEA: a & b | c, 0x6A: a & b ^ c
                assert logic in (0xEA, 0x6A)
                both = given[0] & given[1]
                found = both | given[2] if logic == 0xEA else both ^ given[2]
            elif name == "prmt.b32":  # bit 3 of a selector replicates the byte's sign
                table, found = given[0] | given[1] << 32, 0
                for n in range(4):
                    selector = given[2] >> 4 * n & 15
                    byte = table >> 8 * (selector & 7) & 255
                    found |= (255 * (byte >> 7) if selector & 8 else byte) << 8 * n
            elif name.startswith("dp2a."):
                x, weights = given[0], given[1] >> (16 if ".hi." in name else 0)
                found = given[2] + sum(
                    signed(x >> 16 * n, 16)
                    * (
                        signed(weights >> 8 * n, 8)
                        if name.endswith(".s32")
                        else weights >> 8 * n & 255
                    )
                    for n in (0, 1)
                )
            else:
                found = {
                    "xor.b32": operator.xor,
                    "and.b32": operator.and_,
                    "or.b32": operator.or_,
                    "shr.u32": operator.rshift,
                    "shr.b32": operator.rshift,
                    "shl.b32": operator.lshift,
                    "add.u32": operator.add,
                    "mul.lo.u32": operator.mul,
                }[name](*given) & 0xFFFFFFFF
            registers[target] = found
    return registers


@settings(max_examples=200, deadline=None)
@given(
    word=st.integers(0, 2**32 - 1),
    x=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=4, max_size=4),
)
def test_the_assembly_of_bytes_multiplies_them(word, x):
    if launch.triton is None:
        pytest.skip("ops/ needs triton")
    in_int64 = sum((number & 0xFFFF) << 16 * n for n, number in enumerate(x))
    for signed in (False, True):
        text = assembly(words.dot_bytes, SIGNED=signed)
        found = run_assembly(text, _1=word, _2=in_int64, _3=1000)["$0"]
        numbers = word.to_bytes(4, "little")
        numbers = [byte - (byte >> 7 << 8) if signed else byte for byte in numbers]
        assert found == sum(map(operator.mul, numbers, x)) + 1000


@settings(max_examples=200, deadline=None)
@given(
    word=st.integers(0, 2**32 - 1),
    x=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=8, max_size=8),
)
def test_the_assembly_of_e2m1_multiplies_what_the_codes_are(word, x):
    """Sums of x * (12 + 2 * number) over four codes each, as in the interpreter's twin."""
    if launch.triton is None:
        pytest.skip("ops/ needs triton")
    low, high = (
        sum((number & 0xFFFF) << 16 * n for n, number in enumerate(some)) for some in (x[:4], x[4:])
    )
    table = {
        f"_{7 + n}": int(text, 16)
        for n, text in enumerate(re.findall("0x[0-9A-F]{8}", words.e2m1_table.src))
    }
    found = run_assembly(
        assembly(words._dot_e2m1), _2=word, _3=low, _4=high, _5=1000, _6=-1000, **table
    )
    levels = [int(2 * value) for value in E2M1]
    numbers = [(-1 if word >> 4 * n & 8 else 1) * levels[word >> 4 * n & 7] for n in range(8)]
    sums = [
        sum((12 + number) * of_x for number, of_x in zip(*half, strict=True))
        for half in ((numbers[:4], x[:4]), (numbers[4:], x[4:]))
    ]
    assert [found["$0"], found["$1"]] == [sums[0] + 1000, sums[1] - 1000]


@settings(max_examples=100, deadline=None)
@given(word=st.integers(0, 2**32 - 1))
def test_the_assembly_of_a_look_up_finds_each_number_of_iq4(word):
    """For each half of the table one look-up; the sum of both is the number."""
    if launch.triton is None:
        pytest.skip("ops/ needs triton")
    text = assembly(words._select)
    terms = re.findall("lanes ([+-]) (0x[0-9A-F]{8})", words.iq4_table.src)
    table = [int(sign + digits, 16) & 0xFFFFFFFF for sign, digits in terms]
    for shift in (0, 16):
        codes = word >> shift
        first = run_assembly(text, _1=table[0], _2=table[1], _3=codes)["$0"]
        other = (word ^ 0x88888888) >> shift
        second = run_assembly(text, _1=table[2], _2=table[3], _3=other)["$0"]
        sums = zip(first.to_bytes(4, "little"), second.to_bytes(4, "little"), strict=True)
        found = [sum(byte - (byte >> 7 << 8) for byte in pair) for pair in sums]
        assert found == [IQ4[codes >> 4 * n & 15] for n in range(4)]


@pytest.mark.parametrize("K", range(4))
@pytest.mark.parametrize("bits", (1, 2))
@pytest.mark.parametrize("plus", (False, True))
def test_the_assembly_of_bits_above_joins_their_planes(bits, K, plus):
    if launch.triton is None:
        pytest.skip("ops/ needs triton")
    text = assembly(units.with_bits_above, K=K, BITS=bits, PLUS_128=plus)
    at, added = 8 * (K // 2) + bits * (K % 2), 128 if plus else -(8 << bits)
    for code in range(16 << bits):
        pair = (0xA5C3 & ~(15 << 4 * K) | (code & 15) << 4 * K) * 0x00010001
        plane = 0xC3A5 & ~((1 << bits) - 1 << at) | code >> 4 << at
        found = run_assembly(text, _1=pair, _2=plane * 0x00010001)["$0"]
        assert as_bf16(found) == [float(code + added)] * 2, code


@pytest.mark.parametrize("K", range(4))
def test_the_assembly_of_six_bits_joins_their_planes(K):
    if launch.triton is None:
        pytest.skip("ops/ needs triton")
    text, at = assembly(gguf_units.small_six_bits, K=K), 8 * (K // 2) + 2 * (K % 2)
    for code in range(64):
        pair = (0xA5C3 & ~(15 << 4 * K) | (code & 15) << 4 * K) * 0x00010001
        plane = 0xC3A5 & ~(3 << at) | code >> 4 << at
        found = run_assembly(text, _1=pair, _2=plane * 0x00010001)["$0"]
        assert as_bf16(found) == [(code - 32) / 64] * 2, code


def as_bf16(register: int) -> list[float]:
    """Return the two bf16 numbers in a register."""
    return torch.tensor([register]).to(torch.int32).view(torch.bfloat16).tolist()


def test_the_assembly_of_fields_makes_their_numbers():
    """Two codes at a time; the other bits of the units hold garbage."""
    if launch.triton is None:
        pytest.skip("ops/ needs triton")
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3 = codes.view(torch.float8_e4m3fn).float() / 256
    # NaN in e4m3; our formats read these two codes as numbers.
    e4m3[[0x7F, 0xFF]] = torch.tensor((480.0, -480.0)) / 256
    e2m1 = torch.tensor(E2M1)
    e2m1 = torch.cat((e2m1, -e2m1))
    cases = [
        (units.signed_bytes, 8, {}, codes.view(torch.int8).float()),
        (units.e4m3, 8, {}, e4m3),
        *((units.e2m1, 4, {"K": K}, e2m1) for K in range(4)),
        *((units.int4, 4, {"K": K}, codes[:16] - 8.0) for K in range(4)),
        *((units.iq4, 4, {"K": K}, torch.tensor(IQ4).float()) for K in range(4)),
        (gguf_units.small_bytes, 8, {}, codes.view(torch.int8).float() / 64),
        *((units.codes_plus_128, 4, {"K": K, "BITS": 4}, codes[:16] + 128.0) for K in range(4)),
        *((units.codes_plus_128, 2, {"K": K, "BITS": 2}, codes[:4] + 128.0) for K in range(8)),
    ]
    for function, bits, constants, numbers in cases:
        low = bits * constants.get("K", 0)
        garbage, text = 0xA5C3 & ~(2**bits - 1 << low), assembly(function, **constants)
        for code, number in enumerate(numbers.tolist()):
            pair = (code << low | garbage) * 0x00010001
            result = run_assembly(text, _1=pair, _2=0x7E807E80)["$0"]  # 2 ** 126: of e2m1
            assert as_bf16(result) == [number] * 2, (function, constants, code)


@pytest.mark.parametrize("code", range(8))
@pytest.mark.parametrize("K", range(8))
def test_the_assembly_of_3_bits_joins_their_planes(K, code):
    if launch.triton is None:
        pytest.skip("ops/ needs triton")
    low, high = 2 * K, K // 4 * 8 + K % 4 + 2  # bits of a unit
    pair = (0xA5C3 & ~(3 << low) | (code & 3) << low) * 0x00010001
    thirds = (0xC3A5 & ~(1 << high) | (code >> 2) << high) * 0x00010001
    text = assembly(units.codes_3_plus_128, K=K)
    assert as_bf16(run_assembly(text, _1=pair, _2=thirds)["$0"]) == [128.0 + code] * 2


@pytest.mark.parametrize("K", range(4))
@pytest.mark.parametrize("signed", (False, True))
def test_the_assembly_of_a_scale_of_a_byte(signed, K):
    """The byte is found in the bits of an fp32 number, times a power of two."""
    if launch.triton is None:
        pytest.skip("ops/ needs triton")
    text = assembly(gguf_units.scaled_byte, K=K)
    for byte in range(256):
        word = 0xA5C3F00D & ~(255 << 8 * K) | byte << 8 * K
        found = run_assembly(text, _1=word ^ (0x80808080 if signed else 0))["$0"]
        assert as_fp32(found) * 2.0**133 == (byte - (byte >> 7 << 8) + 128 if signed else byte)


def as_fp32(register: int) -> float:
    return torch.tensor([register]).to(torch.int32).view(torch.float32).item()


def fp32_bits(number: float) -> int:
    return torch.tensor(number).view(torch.int32).item() & 0xFFFFFFFF


def test_the_assembly_of_two_digits_rounds_a_weight_once():
    """Numbers of 8 bits times a scale in fp32, of two bf16 numbers."""
    if launch.triton is None:
        pytest.skip("ops/ needs triton")
    generator = torch.Generator().manual_seed(0)
    split, product = assembly(gguf_units.two_digits), assembly(gguf_units.times_two_digits)
    for _ in range(400):
        scale = (torch.rand(1, generator=generator) * 2 - 1).item()
        factor = run_assembly(split, _1=fp32_bits(scale))["$0"]
        assert abs(sum(as_bf16(factor)) - scale) <= 2.0**-16 * abs(scale)
        numbers = torch.randint(-128, 128, (2,), generator=generator).bfloat16()
        register = numbers.view(torch.int32).item() & 0xFFFFFFFF
        found = run_assembly(product, _1=register, _2=factor)["$0"]
        for number, got in zip(numbers.tolist(), as_bf16(found), strict=True):
            # Half a unit of the last of 8 digits, and of the lower product's last one
            assert abs(got - number * scale) <= (2.0**-8 + 2.0**-14) * abs(number * scale)


@pytest.mark.parametrize("K", range(4))
@pytest.mark.parametrize("bits", (4, 5))
def test_the_assembly_of_scaled_codes_rounds_a_weight_once(bits, K):
    if launch.triton is None:
        pytest.skip("ops/ needs triton")
    text, at = assembly(gguf_units.scaled_codes, K=K, BITS=bits), 8 * (K // 2) + K % 2
    for code in range(1 << bits):
        pair = 0xA5C3 & ~(15 << 4 * K) | (code & 15) << 4 * K
        plane = 0xC3A5 & ~(1 << at) | code >> 4 << at
        # The second code of a pair is the first one's complement.
        other = pair ^ 15 << 4 * K, plane ^ 1 << at
        given = dict(_1=pair | other[0] << 16, _2=plane | other[1] << 16)
        factors, offsets = (0.3, -1.7), (0.11, 5.3)
        given |= {f"_{n + 3}": fp32_bits(f * 2.0**95) for n, f in enumerate(factors)}
        given |= {f"_{n + 5}": fp32_bits(o * 2.0**-38) for n, o in enumerate(offsets)}
        want = torch.tensor((code, (1 << bits) - 1 - code)) * torch.tensor(factors)
        found = torch.tensor(as_bf16(run_assembly(text, **given)["$0"])) * 2.0**38
        assert torch.equal(found, (want + torch.tensor(offsets)).bfloat16().float()), code


def test_the_assembly_of_pairs_of_e4m3_scales():
    if launch.triton is None:
        pytest.skip("ops/ needs triton")
    text = assembly(units.e4m3_pairs)
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    for code, value in enumerate(values):
        found = as_bf16(run_assembly(text, _1=0xA5C30000 | code | 0x3800)["$0"])
        assert found == [value * 2.0**94, 2.0**94]


def test_the_assembly_that_widens_and_that_moves_down():
    if launch.triton is None:
        pytest.skip("ops/ needs triton")
    pair = torch.tensor((1.5, -3.0)).bfloat16()
    register = pair.view(torch.int32).item() & 0xFFFFFFFF
    found = run_assembly(assembly(units.to_fp32), _2=register)
    for register, number in zip(("$0", "$1"), pair.tolist(), strict=True):
        assert torch.tensor([found[register]]).to(torch.int32).view(torch.float32).item() == number
    text = assembly(units.shift_right, COUNT=4)
    assert run_assembly(text, _1=0x12345678)["$0"] == 0x01234567


@pytest.mark.slow
def test_the_kernel_compiles_for_an_h200_at_every_number_of_experts():
    found = without_a_gpu("grouped", "grouped, other shapes")
    assert len(found["grouped"]) == 2 * len(FORMATS)
    assert len(found["grouped, other shapes"]) == 10 * len(FORMATS)
    check_machine_code(found["grouped"])
    check_machine_code(found["grouped, other shapes"])
