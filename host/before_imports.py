"""Work that a command starts before it imports torch, so that both run side by side.

    keep_bytecode     let Python keep what it compiles of torch's sources
    create_context    start CUDA
    hash_ahead        let Triton know the hash of its compiler
    load_libraries    load torch's libraries
    read_ahead        read a model's files into the page cache

`host.compile_helper.start_before_imports` starts another process. All of these are optional: what
fails here is done later, and an error is reported there.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

from host.compile_cache import own_folder, prepare
from host.compile_helper import may_have_gpu, triton_folder
from host.files import replace_text, stamp
from host.free_memory import free_host_memory

PIECE = 64 << 20  # bytes; a process that ends waits for the piece that is being read
HASH_FILE = "compiler_hash.json"
# What Triton hashes, in its package: its code generator's sources, and the compiler.
HASHED = "compiler/**/*.py", "backends/**/*.py", "language/**/*.py", "runtime/*.py", "_C/*.so"
WITHOUT_BYTECODE = "PYTHONDONTWRITEBYTECODE"
hashing: list[threading.Thread] = []  # at most one


def find_torch() -> str | None:
    """Return the path of torch's `__init__.py`, without importing it; None if it is not there."""
    spec = PathFinder.find_spec("torch")
    return None if spec is None else spec.origin


def keep_bytecode(options: argparse.Namespace) -> None:
    """Let Python keep compiled modules in the compile cache, if it cannot keep torch's.

    It compiles 1,500 modules at each start then, which takes two seconds: where packages were
    installed without compiling them, into a folder that is not the user's, or where
    PYTHONDONTWRITEBYTECODE is set. Processes that this one starts keep theirs there, too.
    """
    if (origin := find_torch()) is None or sys.pycache_prefix is not None:
        return
    is_kept = os.path.exists(importlib.util.cache_from_source(origin))
    is_writable = not sys.dont_write_bytecode and os.access(os.path.dirname(origin), os.W_OK)
    if is_kept or is_writable:
        return
    with suppress(OSError, ValueError):  # `use_compile_cache` says why
        if options.compile_cache:
            prepare(options.compile_cache.absolute())
        folder = (options.compile_cache or own_folder()).absolute() / "python"
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
        os.environ.pop(WITHOUT_BYTECODE, None)


def create_context(options: argparse.Namespace) -> threading.Thread | None:
    """Create the first GPU's CUDA context in a thread; torch then finds it.

    It takes 0.3 to 0.5 s, in which the driver does not hold Python's lock.
    """
    if not may_have_gpu(options):
        return None
    # No daemon: the process must not end while the driver starts.
    thread = threading.Thread(target=retain_context, name="CUDA context")
    thread.start()
    return thread


def retain_context() -> None:
    with suppress(OSError, AttributeError):  # no driver, or another one
        cuda = ctypes.CDLL("libcuda.so.1")
        # All three now: a later look-up would wait for `load_libraries`, and hold Python's lock.
        start, get, retain = cuda.cuInit, cuda.cuDeviceGet, cuda.cuDevicePrimaryCtxRetain
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if start(0) == 0 and get(ctypes.byref(device), 0) == 0:
            retain(ctypes.byref(context), device)


def hash_ahead(options: argparse.Namespace) -> None:
    if may_have_gpu(options) and not options.dry_run:
        start_hashing(triton_folder(options.compile_cache))


def start_hashing(folder: Path) -> None:
    """Let a thread give Triton the hash of its compiler: a part of all keys of its cache.

    folder: of that cache. The compiler has 400 MB, which takes 0.3 s, and two seconds beside
    imports: the thread waits for Python's lock after each of them. So the hash is kept.
    """
    if not hashing:
        thread = threading.Thread(target=hash_triton, args=(folder,), daemon=True)
        hashing.append(thread)
        thread.start()


def hash_triton(folder: Path) -> None:
    """Let Triton know its hash: of an earlier process, if its files are those of then."""
    with suppress(ImportError, AttributeError):  # no Triton, or another version
        from triton.runtime import cache

        package, kept = Path(cache.__file__).parents[1], folder / HASH_FILE
        paths = [path for pattern in HASHED for path in package.glob(pattern)]
        files = [[str(path), *stamp(path.stat())] for path in sorted(paths)]
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # none, or damaged
            found = json.loads(kept.read_text())
            if found["files"] == files:
                hashed = str(found["hash"])
                cache.triton_key = lambda: hashed
                return
        hashed = cache.triton_key()
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(kept, json.dumps({"files": files, "hash": hashed}))


def wait_for_hash() -> None:
    """Return when the thread of `start_hashing` has ended: a launch would hash, too."""
    for thread in hashing:
        thread.join()


def load_libraries() -> None:
    """Load torch's libraries in a thread; torch then finds them.

    It takes 0.3 s with CUDA's libraries. An import would hold Python's lock for that time, which
    the C library's dlopen does not. Imports of other compiled modules wait meanwhile.
    """
    if (origin := find_torch()) is None:
        return
    folder = os.path.join(os.path.dirname(origin), "lib")
    kinds = ("libtorch_cuda.so", "libtorch_cpu.so")  # the first needs the second
    paths = [path for name in kinds if os.path.exists(path := os.path.join(folder, name))]
    first = os.path.join(folder, "libtorch_global_deps.so")  # torch loads it first, for all
    if paths and os.path.exists(first):
        arguments = {first: os.RTLD_NOW | os.RTLD_GLOBAL, paths[0]: os.RTLD_NOW}
        threading.Thread(target=load_each, args=(arguments,), name="libraries of torch").start()


def load_each(paths: dict[str, int]) -> None:
    for path, flags in paths.items():
        with suppress(AttributeError):  # a system without this function
            ctypes.CDLL(None).dlopen(path.encode(), flags)


def read_ahead(paths: Sequence[Path]) -> threading.Thread | None:
    """Let the system read files in a thread, unless they would fill half of the free memory."""
    paths = [path for path in paths if path.is_file()]  # opening a pipe would wait for its writer
    sizes = [path.stat().st_size for path in paths]
    try:
        fits = hasattr(os, "posix_fadvise") and sum(sizes) <= free_host_memory() // 2
    except OSError:  # the system does not say
        fits = False
    if not fits:
        return None
    thread = threading.Thread(target=advise, args=(paths,), name="read ahead", daemon=True)
    thread.start()
    return thread


def advise(paths: Sequence[Path]) -> None:
    for path in paths:
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            for start in range(0, os.fstat(file.fileno()).st_size, PIECE):
                os.posix_fadvise(file.fileno(), start, PIECE, os.POSIX_FADV_WILLNEED)
