# SPDX-License-Identifier: Apache-2.0
"""Run a script as `python` does, and record its error for the launcher.

`accelfn launch` starts every rank as `python worker.py LAUNCHER script.py args…`. LAUNCHER is the
launcher's process id: the rank ends when the launcher ends, even if the launcher is killed. This
file runs by its path and imports only the standard library. So the script is the first to import
torch, and can set environment variables for torch before.

The error is recorded in the file that torch's launcher names (`TORCHELASTIC_ERROR_FILE`), in the
format of torch's `ErrorHandler`, but with an exact time. If several ranks fail within one second,
the launcher must find the first. When the launcher asks for this process's stack, the stack is
written to a second file next to the recorded error.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

# A rank that raised an error exits after this time, even if its threads are still running, because
# other ranks wait for it.
GRACE_SECONDS = 5
# The launcher sends this signal to get a stack. Programs usually do not use this signal.
ASKS_WHERE = signal.SIGRTMAX
# prctl option of Linux: send this process a signal when its parent ends.
_PR_SET_PDEATHSIG = 1
# The files whose frames precede the user's script or function in a traceback.
LEADS = __file__, os.path.join(os.path.dirname(__file__), "rank.py")  # noqa: PTH118, PTH120


def main() -> int:
    """Run the script or module of the command line; return the exit code."""
    launcher, *words = sys.argv[1:]
    end_with(int(launcher))
    # Write complete lines, because several ranks share one terminal. write_through=False also
    # does this under PYTHONUNBUFFERED, where Python would write parts of lines.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    faulthandler.enable()  # a crash in C code shows its Python stack
    answer_where()
    try:
        if words[0] == "-m":
            run_module(words[1], words[2:])
        else:
            run_script(words[0], words[1:])
    except SystemExit as error:
        if error.code not in (None, 0):
            record(error, exit_status(error))
        raise
    except KeyboardInterrupt as error:
        record(error, -signal.SIGINT)
        raise
    except BaseException as error:  # noqa: BLE001  `tell` shows the error as Python does
        report = record(error, 1)
        sys.last_value = error  # as Python does, for functions that run at exit
        tell(error, report)
        faulthandler.dump_traceback_later(GRACE_SECONDS, exit=True)
        return 1
    return 0


def end_with(launcher: int) -> None:
    """Let the system send SIGTERM to this process when its launcher has ended.

    A launcher ends its ranks before it exits, but a killed launcher cannot. Its ranks would
    continue, keep their GPUs, and write to the checkpoints of the next run. After SIGTERM, unlike
    SIGKILL, a rank under `af.stopping` can save. This works only on Linux.
    """
    if sys.platform == "linux":
        ask = ctypes.CDLL(None).prctl
        ask(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
        if os.getppid() != launcher:  # the launcher ended before the call of prctl
            signal.raise_signal(signal.SIGTERM)


def run_script(path: str, args: Sequence[str]) -> None:
    """Run a file as `python path args…` does."""
    # `runpy.run_path` would set `sys.argv[0]` and `__file__` to the same path, and would
    # remove `__main__` before the script's threads and exit handlers have ended.
    file = os.path.abspath(path)  # noqa: PTH100  `Path.resolve` would follow symbolic links
    loader = SourceFileLoader("__main__", file)
    start(os.path.dirname(os.path.realpath(path)), [path, *args])  # noqa: PTH120
    module = ModuleType("__main__")
    module.__file__ = file
    module.__loader__ = loader
    module.__dict__["__cached__"] = None
    # Child processes of the script import its functions by `__main__.__file__`.
    sys.modules["__main__"] = module
    code = loader.source_to_code(loader.get_data(file), file)
    exec(code, module.__dict__)  # noqa: S102  running the script is the task


def run_module(name: str, args: Sequence[str]) -> None:
    """Run a module as `python -m name args…` does."""
    start(os.getcwd(), [name, *args])  # noqa: PTH109  entries of `sys.path` are strings
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def start(folder: str, argv: list[str]) -> None:
    """Set `sys.path[0]` and `sys.argv` as Python sets them for a script."""
    if not sys.flags.safe_path:
        sys.path[0] = folder  # Python set it to the folder of this file
    sys.argv = argv


def exit_status(error: SystemExit) -> int:
    """Return Python's exit status for a `SystemExit` that reports a failure; never 0.

    The system keeps only eight bits of a status, so `sys.exit(256)` would look like a success.
    """
    if isinstance(error.code, int):
        error.code = error.code & 0xFF or 1
        return error.code
    return 1


def tell(error: BaseException, report: str) -> None:
    """Show an error with `sys.excepthook`, unless that only prints the recorded traceback.

    The launcher's report shows that traceback. torch's hook prints the same text as Python's,
    with the rank before each line.
    """
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        sys.excepthook(type(error), error, error.__traceback__)
    text = stream.getvalue()
    if re.sub(r"(?m)^\[rank\d+\]: ?", "", text).split() != report.split():
        sys.stderr.write(text)
        sys.stderr.flush()


def record(error: BaseException, status: int) -> str:
    """Record an error for the launcher, with its traceback and time; return the traceback.

    The record also has Python's exit status. Otherwise a process that, for example, Gloo's
    threads abort while Python exits would look like a killed process.
    """
    error.__traceback__ = without_leads(error.__traceback__)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return ""
    now = time.time()
    trace = "".join(traceback.format_exception(error))
    details = {
        "py_callstack": trace,
        "timestamp": str(int(now)),  # for torch
        "time": now,  # for accelfn.launching, like "status"
        "status": status,
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    # Write the record to another file and rename that file: this process may be ended at any
    # moment, and the launcher cannot read an incomplete record.
    with open(f"{file}.part", "w", encoding="utf-8") as part:  # noqa: PTH123
        json.dump({"message": message}, part)
    os.replace(part.name, file)  # noqa: PTH105
    return trace


def answer_where() -> None:
    """Install a signal handler that writes this process's stack to a file."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        # faulthandler removes its handler before Python ends; a later signal must be ignored
        signal.signal(ASKS_WHERE, signal.SIG_IGN)
        # the file stays open, because the handler cannot open a file
        answer = open(where_file(file), "w", encoding="utf-8")  # noqa: PTH123, SIM115
        faulthandler.register(ASKS_WHERE, file=answer, all_threads=False)


def where_file(error_file: str) -> str:
    """Return the path of the file for a process's stack, given the path of its error file."""
    return f"{error_file}.where"


def without_leads(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the launcher's frames before the script's frames."""
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if file not in LEADS and not file.startswith("<frozen "):
            break
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    sys.exit(main())
