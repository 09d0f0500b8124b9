# SPDX-License-Identifier: Apache-2.0
"""Run a script as `python` would, and leave a record of how it failed.

`accelfn launch` starts every rank as `python worker.py LAUNCHER script.py args…`, where
LAUNCHER is its own process: a rank ends with it, however it ends.
The file is run by its path and imports the standard library only, so that the script
is the first to import torch: what it sets in the environment before that still counts.

The record goes where torch's launcher asks for it (`TORCHELASTIC_ERROR_FILE`) and has
the format of its `ErrorHandler`, with a finer time: of ranks that fail within one
second, the launcher must know the first. Beside it goes this process's stack, when the
launcher asks where it is.
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

# A rank that has raised ends by then, whatever threads it left: its peers wait.
GRACE_SECONDS = 5
# The launcher's question; no program uses this signal for itself.
ASKS_WHERE = signal.SIGRTMAX
# Asks Linux for a signal when the parent of this process ends.
_PR_SET_PDEATHSIG = 1
# What leads to the code of a user: a script, or a function given to `af.launch`.
LEADS = __file__, os.path.join(os.path.dirname(__file__), "rank.py")  # noqa: PTH118, PTH120


def main() -> int:
    """Run what the command line names; see the module's docstring."""
    launcher, *words = sys.argv[1:]
    end_with(int(launcher))
    # Whole lines: those of several ranks share one terminal. With PYTHONUNBUFFERED, too, where
    # Python would write each word by itself.
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
    except BaseException as error:  # noqa: BLE001  it is shown as Python shows it
        report = record(error, 1)
        sys.last_value = error  # as Python does: functions at its exit may ask
        tell(error, report)
        faulthandler.dump_traceback_later(GRACE_SECONDS, exit=True)
        return 1
    return 0


def end_with(launcher: int) -> None:
    """Have the system send SIGTERM to this process when its launcher is gone.

    A launcher ends its ranks when it exits. A killed launcher cannot: its ranks would continue,
    hold their GPUs and write to the checkpoints of the next run. SIGTERM, not SIGKILL, lets a
    rank under `af.stopping` save. Available on Linux only.
    """
    if sys.platform == "linux":
        ask = ctypes.CDLL(None).prctl
        ask(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
        if os.getppid() != launcher:  # it was gone before it was asked for
            signal.raise_signal(signal.SIGTERM)


def run_script(path: str, args: Sequence[str]) -> None:
    """Run a file as `python path args…` does."""
    # Not by `runpy.run_path`, which gives `sys.argv[0]` and `__file__` one spelling and
    # takes `__main__` away before the script's threads and exit handlers have ended.
    file = os.path.abspath(path)  # noqa: PTH100  `Path.resolve` would follow links
    loader = SourceFileLoader("__main__", file)
    start(os.path.dirname(os.path.realpath(path)), [path, *args])  # noqa: PTH120
    module = ModuleType("__main__")
    module.__file__ = file
    module.__loader__ = loader
    module.__dict__["__cached__"] = None
    # Processes that the script spawns import its functions from here, by `__file__`.
    sys.modules["__main__"] = module
    code = loader.source_to_code(loader.get_data(file), file)
    exec(code, module.__dict__)  # noqa: S102  running the script is the task


def run_module(name: str, args: Sequence[str]) -> None:
    """Run a module as `python -m name args…` does."""
    start(os.getcwd(), [name, *args])  # noqa: PTH109  `sys.path` holds strings
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def start(folder: str, argv: list[str]) -> None:
    """Put `folder` and `argv` where Python would have put them."""
    if not sys.flags.safe_path:
        sys.path[0] = folder  # in place of the folder of this file
    sys.argv = argv


def exit_status(error: SystemExit) -> int:
    """Return Python's exit status for a failure; it is never 0.

    The system keeps eight bits of a status, so `sys.exit(256)` would look like a success.
    """
    if isinstance(error.code, int):
        error.code = error.code & 0xFF or 1
        return error.code
    return 1


def tell(error: BaseException, report: str) -> None:
    """Show an error by the program's hook, unless the launcher's report shows it.

    torch's hook, too, shows what Python's does, with the rank before each line.
    """
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        sys.excepthook(type(error), error, error.__traceback__)
    text = stream.getvalue()
    if re.sub(r"(?m)^\[rank\d+\]: ?", "", text).split() != report.split():
        sys.stderr.write(text)
        sys.stderr.flush()


def record(error: BaseException, status: int) -> str:
    """Record an error, its place and time for the launcher; return the recorded traceback.

    Also records Python's exit status: Gloo's threads, for example, can abort a process that is
    already ending, and then the process seems killed.
    """
    error.__traceback__ = without_leads(error.__traceback__)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return ""
    now = time.time()
    trace = "".join(traceback.format_exception(error))
    details = {
        "py_callstack": trace,
        "timestamp": str(int(now)),  # torch reads this one,
        "time": now,  # accelfn.launching these two
        "status": status,
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    # Replaced in one go: this process may be ended at any moment, and half a record
    # would be an error in the launcher.
    with open(f"{file}.part", "w", encoding="utf-8") as part:  # noqa: PTH123
        json.dump({"message": message}, part)
    os.replace(part.name, file)  # noqa: PTH105
    return trace


def answer_where() -> None:
    """Write this process's stack to a file whenever the launcher asks."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        # faulthandler leaves before Python ends: what comes after it would kill this process
        signal.signal(ASKS_WHERE, signal.SIG_IGN)
        # it stays open: a process that hangs opens nothing
        answer = open(where_file(file), "w", encoding="utf-8")  # noqa: PTH123, SIM115
        faulthandler.register(ASKS_WHERE, file=answer, all_threads=False)


def where_file(error_file: str) -> str:
    """Return the file for the stack of a process, from its error file."""
    return f"{error_file}.where"


def without_leads(frames: TracebackType | None) -> TracebackType | None:
    """Drop the launcher's frames before the script's."""
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if file not in LEADS and not file.startswith("<frozen "):
            break
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    sys.exit(main())
