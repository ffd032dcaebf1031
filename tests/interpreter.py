"""Triton's interpreter for tests: it is made faster, and checks addresses.

A kernel may load and store in its tensors alone. On a GPU a load outside of them mostly finds other
tensors, so that results are right until one does not.
"""

import gc
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

LEAST_ADDRESS = 1 << 40  # larger integers are addresses


def flattened(values: Iterable) -> Iterator:
    """Yield the values of nested tuples."""
    for value in values:
        yield from flattened(value) if isinstance(value, tuple) else (value,)


def reached(kernel: str, values: list) -> list[Tensor]:
    """Return the tensors among a kernel's arguments; all tensors, if it finds others by these.

    They are addresses, or offsets to the tensors of other layers.
    """
    values = list(flattened(values))
    tensors = [value for value in values if isinstance(value, Tensor)]
    integers = [value for value in values if type(value) is int]
    integers += [int(t.max()) for t in tensors if t.dtype == torch.int64 and t.numel()]
    if max(integers, default=0) > LEAST_ADDRESS or kernel.startswith("_settle"):
        return [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    return tensors


class Bounds:
    """The memory of the kernel that is running."""

    def __init__(self) -> None:
        self.begins = self.ends = np.zeros(0, np.uint64)
        self.kernel = ""

    def note(self, kernel: str, values: list) -> None:
        """Take the tensors among a kernel's arguments."""
        kept = (tensor for tensor in reached(kernel, values) if tensor.device.type == "cpu")
        storages = {storage.data_ptr(): storage for storage in map(Tensor.untyped_storage, kept)}
        begins = sorted(storages)
        self.begins = np.array(begins, np.uint64)
        sizes = [storages[begin].nbytes() for begin in begins]
        self.ends, self.kernel = self.begins + np.array(sizes, np.uint64), kernel

    def check(self, pointers, mask) -> None:
        """Raise IndexError if one of the addresses is outside."""
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        used = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        addresses = pointers.data[used].astype(np.uint64)
        at = np.searchsorted(self.begins, addresses, side="right")
        inside = at > 0
        inside[inside] = addresses[inside] + size <= self.ends[at[inside] - 1]
        if not inside.all():
            first = addresses[~inside][0]
            before = self.ends[self.ends <= first]
            behind = f", {first - before.max()} bytes behind a tensor" if len(before) else ""
            count = int((~inside).sum())
            raise IndexError(f"{self.kernel}: {count} addresses outside of its tensors{behind}")


def patch_once() -> None:
    """Patch `triton.language` for the interpreter once and for good.

    Triton patches it in each launch and in each call of a device function: half of its time. Its
    functions also check in each call that a kernel calls them.
    """
    checked = core.builtin(lambda: None).__code__

    def patch_attribute(owner, name, member, builder, scope):
        call = member.__wrapped__ if member.__code__ is checked else member

        def patched(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return call(*args, **kwargs)

        scope.set_attr(owner, name, patched)

    interpreter._patch_attr = patch_attribute
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    unchanged = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda function: unchanged


def check_bounds() -> None:
    """Check every load and store of the kernels that this process interprets from now on."""
    bounds = Bounds()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store = builder.create_masked_load, builder.create_masked_store
    start = executor._init_args_hst

    def noted(self, args, kwargs):
        args, kwargs = start(self, args, kwargs)
        bounds.note(self.fn.__name__, [*args, *kwargs.values()])
        return args, kwargs

    def checked_load(self, pointers, mask, *rest):
        bounds.check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        bounds.check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    executor._init_args_hst = noted
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store


def remember_types() -> None:
    """Keep what Triton makes anew for each value: NumPy's type, and the shape and its name."""
    find, init, fill = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    known, blocks, shapes = {}, {}, {}

    def find_once(kind):
        name = getattr(kind, "element_ty", kind).name if kind.is_block() else kind.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    def init_once(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            init(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    def fill_quickly(self, handle, type):
        if type.name not in shapes:
            fill(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[type.name]

    interpreter._get_np_dtype, core.tensor.__init__ = find_once, fill_quickly
    core.block_type.__init__ = init_once


def unwrap_quickly() -> None:
    """Return tensors and numbers as they are, which Triton does after three checks."""
    unwrap, as_they_are = core._unwrap_if_constexpr, {core.tensor, int, bool, str, type(None)}
    core._unwrap_if_constexpr = lambda value: value if type(value) in as_they_are else unwrap(value)


def fit_quickly() -> None:
    """Compare the sizes of a type in NumPy and in Triton once."""
    fit, known = interpreter._validate_np_data_size, {}

    def fit_once(data, kind):
        key = data.itemsize, kind.name
        if key not in known:
            known[key] = fit(data, kind)
        return known[key]

    interpreter._validate_np_data_size = fit_once


def pair_quickly() -> None:
    """Find the common type and shape of two types once, and keep a number's block.

    Triton finds the type of each pair, casts and broadcasts both: a third of its time.
    """
    pair = TritonSemantic.binary_op_type_checking_impl
    broadcast = TritonSemantic.broadcast_impl_value
    types: dict[tuple, tuple] = {}  # of both operands -> those of the results
    same_types: dict[tuple, bool] = {}  # whether operands of these types are only broadcast
    numbers: dict[tuple, core.tensor] = {}

    def widen(value, kind):
        if value.type.name == kind.name:
            return value
        data = np.empty([*kind.shape], value.handle.data.dtype)
        data[...] = value.handle.data
        return core.tensor(interpreter.TensorHandle(data, kind.scalar), kind)

    def broadcast_once(self, left, right):
        key = left.type.name, right.type.name
        if key not in types:
            results = broadcast(self, left, right)
            types[key] = tuple(result.type for result in results)
            return results
        return tuple(map(widen, (left, right), types[key]))

    def pair_tensors(self, left, right, *flags):
        key = left.type.name, right.type.name, flags
        if same_types.get(key):
            return broadcast_once(self, left, right)
        results = pair(self, left, right, *flags)
        same_types[key] = all(
            before.dtype.name == result.dtype.name
            for before, result in zip((left, right), results, strict=True)
        )
        return results

    def pair_with_number(self, left, right, *flags):
        number_first = type(left) is not core.tensor
        number, value = (left, right) if number_first else (right, left)
        key = value.type.name, repr(number), number_first, flags
        if key not in numbers:
            results = pair(self, left, right, *flags)
            if results[number_first].type.name == value.type.name:
                numbers[key] = results[not number_first]
            return results
        return (numbers[key], value) if number_first else (value, numbers[key])

    def pair_once(self, left, right, *flags, **more):
        kinds = {type(left), type(right)}
        if more or core.tensor not in kinds or not kinds <= {core.tensor, int, float}:
            return pair(self, left, right, *flags, **more)
        both = pair_tensors if len(kinds) == 1 else pair_with_number
        return both(self, left, right, *flags)

    TritonSemantic.binary_op_type_checking_impl = pair_once
    TritonSemantic.broadcast_impl_value = broadcast_once


def multiply_bf16() -> None:
    """Let `tl.dot` take bf16, whose bits the interpreter multiplies as integers."""
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def as_fp32(handle):
        if handle.dtype.scalar != core.bfloat16:
            return handle
        values = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(values, core.float32)

    def widened(self, a, b, *rest):
        return dot(self, as_fp32(a), as_fp32(b), *rest)

    builder.create_dot = widened


def prepare() -> None:
    """Make the interpreter faster, and `tl.dot` right in bf16.

    With CHECK_BOUNDS in the environment, check addresses: slow.
    Then Triton also checks each 32-bit sum and product for an overflow, a quarter of its time.
    """
    patch_once()
    remember_types()
    unwrap_quickly()
    fit_quickly()
    pair_quickly()
    multiply_bf16()
    if os.environ.get("CHECK_BOUNDS"):
        check_bounds()
    else:
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)
