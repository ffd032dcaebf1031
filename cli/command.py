"""The frame around every command's main(): one line for each error, none for a traceback."""

import atexit
import contextlib
import errno
import fcntl
import functools
import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

from cli.ctrl_c import INTERRUPTED, end_at_ctrl_c, end_at_once
from host import quick_imports

USER_ERROR = 2  # exit code
MAX_MESSAGE = 500  # characters
RAISED_AGAIN = 5.0  # seconds between two exceptions for one signal
OUT_OF_MEMORY = (  # in messages of PyTorch, safetensors and Python; a limit such as ulimit -v
    "can't allocate memory",
    "cannot allocate memory",
    "unable to mmap",
    "std::bad_alloc",
    "can't start new thread",
)
SENTENCES = 3  # of PyTorch's error about memory
# Control characters of ASCII and Latin-1, but for tabs and newlines.
ESCAPES = {n: repr(chr(n))[1:-1] for n in (*range(9), *range(11, 32), *range(127, 160))}
FIXES = {  # by errno
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EROFS: "name another place",
    errno.ELOOP: "remove the loop of symbolic links",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.ENOSPC: "free some space or name another place",
    errno.EDQUOT: "free some space or name another place",
    errno.ENOENT: "check the path and the working directory",
    errno.EMFILE: "raise the limit: ulimit -n 4096",
    errno.EIO: "check the disk",
    errno.EBADF: "redirect it to a file, or to /dev/null",
}


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP. Handled as Ctrl-C is, so that temporary files are removed."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def suppress_ctrl_c() -> Iterator[None]:
    """Within, Ctrl-C ends the block alone. SIGTERM and SIGHUP end the command."""
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error, Terminated):
            raise


def command(
    fail: Callable[[str], int] | None = None,
    out_of_memory: str = "use a smaller checkpoint: quantize.py --mode int4",
    interrupted: str = "",
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate a main() that returns an exit code: errors of the user become one line and code 2.

    fail: prints the line and returns the code; default: `report`. out_of_memory: the fix to name.
    interrupted: printed after an interruption. After SIGINT, SIGTERM or SIGHUP, main returns
    128 plus the signal's number; if the reader of stdout has left, 141.
    """
    fail = fail or report

    def decorate(main: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(main)
        def framed(*arguments) -> int:
            if not gc.isenabled():  # `cli.startup` has disabled it for the imports
                gc.freeze()
                atexit.register(gc.unfreeze)  # libraries report what is left at the end
                gc.enable()
                quick_imports.finish()
            try:
                open_standard_streams()
                with termination_raises():
                    try:
                        code = main(*arguments)
                    except SystemExit:  # --help has been printed
                        sys.stdout.flush()
                        raise
                    sys.stdout.flush()
                return code
            except ValueError as error:
                return fail(str(error))
            except KeyboardInterrupt as error:
                if interrupted:
                    report(f"interrupted; {interrupted}")
                return INTERRUPTED + (error.number if isinstance(error, Terminated) else 2)
            except BrokenPipeError:
                discard(sys.stdout)
                return INTERRUPTED + signal.SIGPIPE
            except (MemoryError, RuntimeError, OSError) as error:
                if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                    discard(sys.stdout)
                    return fail(describe_os_error(error))
                if str(error).startswith("Symlink loop"):  # Path.resolve, before Python 3.13
                    return fail(f"{error}; {FIXES[errno.ELOOP]}")
                if not is_out_of_memory(error):
                    if is_compile_error(error):
                        return fail(describe_compile_error(error))
                    if fix := fix_of_library(error):
                        return fail(f"{first_line(error)}; {fix}")
                    raise
                return fail(f"out of memory ({describe_out_of_memory(error)}); {out_of_memory}")
            finally:
                try:
                    sys.stderr.flush()
                except (OSError, ValueError):  # nobody reads it: Python would exit with 120
                    discard(sys.stderr)

        return framed

    return decorate


def report(message: str) -> int:
    """Print one line on stderr, as far as it can be written; return the code of a user's error."""
    with contextlib.suppress(OSError):
        print(f"error: {printable(message)}", file=sys.stderr, flush=True)
    return USER_ERROR


def printable(message: str) -> str:
    """Return one line of at most MAX_MESSAGE characters, control characters escaped."""
    line = escaped(message.strip().replace("\n", " "))
    return line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE - 3]}..."


def escaped(text: str) -> str:
    """Return a text with its control characters escaped, except for newlines.

    Names of files and tensors come from others: an escape sequence in one would drive the terminal.
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def for_stream(text: str, stream: TextIO | None) -> str:
    """Return a model's text as a stream gets it: on a terminal control characters are escaped.

    A model repeats what a document says, and an escape sequence can write the clipboard.
    """
    return text.translate(ESCAPES) if stream is not None and stream.isatty() else text


def describe_os_error(error: OSError, place: str = "stdout") -> str:
    """Return cause and fix. place: of errors without a file's name, as in writes to stdout."""
    if error.errno is None:
        return str(error)
    cause = error.strerror or str(error)
    where = error.filename if error.filename is not None else place
    return f"{where}: {cause}; {FIXES.get(error.errno or 0, 'check the path')}"


def fix_of_library(error: BaseException) -> str | None:
    """Return the fix of an operating system's error that PyTorch names: "...: CAUSE (errno)"."""
    number = re.search(r": ([^:]+) \((\d+)\)$", first_line(error))
    if number and os.strerror(int(number[2])) == number[1]:
        return FIXES.get(int(number[2]))
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, PyTorch's CPU allocator or its GPU allocator ran out of memory."""
    message = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or getattr(error, "errno", None) == errno.ENOMEM
        or type(error).__name__ == "OutOfMemoryError"
        or any(part in message for part in OUT_OF_MEMORY)
    )


def is_compile_error(error: BaseException) -> bool:
    """Return whether PyTorch's compiler failed. False if the environment wants its own report."""
    names = {kind.__name__ for kind in type(error).__mro__}
    verbose = {"TORCHDYNAMO_VERBOSE", "TORCH_LOGS"} & os.environ.keys()
    return bool(names & {"BackendCompilerFailed", "CppCompileError"}) and not verbose


def describe_compile_error(error: BaseException) -> str:
    """Return cause and fix of a failed compilation: a full disk, or damaged files of the cache."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "the compile cache")
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, OSError) and cause.errno in FIXES:
            return f"cannot compile: {describe_os_error(cause, folder)}"
        cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__
    full = os.strerror(errno.ENOSPC)
    if full in str(error):  # as g++ reports it
        return f"cannot compile: {folder}: {full}; {FIXES[errno.ENOSPC]}"
    fix = f"remove {folder}, which may be damaged, or leave out --compile"
    reason = first_line(getattr(error, "inner_exception", error))
    return f"cannot compile ({reason}); {fix}; TORCHDYNAMO_VERBOSE=1 shows all"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def describe_out_of_memory(error: BaseException) -> str:
    """Return the size of the allocation and the free memory: the first sentences of the error.

    The others are about the allocator's settings; with them the line is too long for the fix.
    """
    return ". ".join(first_line(error).split(". ")[:SENTENCES]).removesuffix(".")


@contextlib.contextmanager
def termination_raises() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise Terminated; nohup's ignored SIGHUP stays ignored.

    They raise it again every RAISED_AGAIN seconds: an exception within a destructor, or a callback
    from C such as those of PyTorch's compiler, is lost.

    SIGINT raises KeyboardInterrupt again, if `end_at_ctrl_c` had it end the process; after this it
    ends it once more, so that a second Ctrl-C prints no traceback of what Python does at its end.
    """
    of_alarm = signal.getsignal(signal.SIGALRM)

    def terminate(number, frame):
        signal.signal(signal.SIGALRM, lambda *_: terminate(number, None))
        signal.setitimer(signal.ITIMER_REAL, RAISED_AGAIN)
        raise Terminated(number)

    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    ]
    ends_early = signal.getsignal(signal.SIGINT) is end_at_once
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # Python allows handlers there alone
    elif ends_early:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in numbers:
        signal.signal(number, terminate)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        if numbers and signal.getsignal(signal.SIGALRM) is not of_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, of_alarm or signal.SIG_DFL)
        if ends_early:
            end_at_ctrl_c()


def open_standard_streams() -> None:
    """Point closed standard streams at /dev/null, and let no character fail to print or be read.

    A closed descriptor 1 or 2 would be given to the next file opened, and receive what is printed.
    A closed stdout can only be read, so that printing a result fails with EBADF.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(number, "w", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if hasattr(sys.stdin, "reconfigure"):  # bytes that are no text: the tokenizer names them
        sys.stdin.reconfigure(errors="surrogateescape")


def check_stdout() -> None:
    """Raise OSError if stdout cannot be written: before hours of work, not after them."""
    if fcntl.fcntl(1, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def discard(stream: TextIO) -> None:
    """Point a stream at /dev/null, so that Python's flush at exit does not fail once more."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
