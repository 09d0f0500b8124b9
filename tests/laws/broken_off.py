# SPDX-License-Identifier: Apache-2.0
"""Breaks a call of accelfn off where its code calls others', and says what is left behind.

What may really raise is what accelfn calls: torch and numpy, the user's own functions, and
the system. So each such call that a public call makes is counted, and one of them raises
instead of being made. Left out are calls that put things back, those in a `finally` or below
an `__exit__`: no program can go on where a generator's own state cannot be set again, and
what a block does at its end is broken off inside the block instead.
"""

import ast
import functools
import gc
import inspect
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.data
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import accelfn as af
from tests.waiting import wait_until

OWN = f"{Path(af.__file__).parent}{os.sep}"
TESTS = f"{Path(__file__).parents[1]}{os.sep}"
RAISES = {
    *("torch", "numpy", "safetensors", "os", "posix", "io", "_io", "shutil"),
    *(
        "tempfile",
        "pathlib",
        "json",
        "_json",
        "fcntl",
        "mmap",
        "signal",
        "_signal",
        "socket",
    ),
    *("_socket", "threading", "subprocess", "multiprocessing", "concurrent", "blake3"),
}
"""Packages whose functions may raise, of torch's kin and of the system."""


class Broken(Exception):  # noqa: N818 - of a call
    """An error that nobody expects."""


KINDS: Mapping[str, type[BaseException]] = {
    each.__name__: each for each in (Broken, MemoryError, KeyboardInterrupt)
}

PUT_BACK = ("__exit__", "__del__")
SWALLOWED = ("Finalize.__call__",)
"""Callbacks of weak references, whose errors Python prints and drops."""

Place = tuple[str, int, str]
"""A file, a line in it, and what is called there."""


@functools.cache
def cleaning(file: str) -> frozenset[int]:
    """Return the lines of a file that stand in a `finally`."""
    tree = ast.parse(Path(file).read_text())
    lines: set[int] = set()
    for node in ast.walk(tree):
        for each in getattr(node, "finalbody", ()):
            lines |= {*range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    return frozenset(lines)


@functools.cache
def is_own(code: CodeType) -> bool:
    return code.co_filename.startswith(OWN)


@functools.cache
def may_raise(code: CodeType) -> bool:
    """Whether a function written in Python is torch's, the system's or a test's."""
    file = code.co_filename
    if file.startswith(TESTS):
        return True
    parts = Path(file).parts
    home = max((i for i, part in enumerate(parts) if _is_home(part)), default=-1)
    return Path(parts[home + 1]).stem in RAISES if 0 <= home < len(parts) - 1 else False


def _is_home(part: str) -> bool:
    return part == "site-packages" or part.startswith("python3")


def c_name(function: Any) -> str:
    """Return what a function written in C is called, if it may raise."""
    of = getattr(function, "__self__", None)
    home = getattr(function, "__module__", None) or type(of).__module__
    name = function.__name__
    if home.partition(".")[0] in RAISES or (home == "builtins" and name == "open"):
        return name
    return ""


def is_resumed(frame: FrameType) -> bool:
    """Whether a generator goes on, or is closed, that was called before."""
    code = frame.f_code
    is_generator = code.co_flags & inspect.CO_GENERATOR
    return bool(is_generator) and frame.f_lineno != code.co_firstlineno


def puts_back(frame: FrameType | None) -> bool:
    """Whether a call belongs to what is put back at the end of something."""
    while frame is not None and not frame.f_code.co_filename.startswith(TESTS):
        code = frame.f_code
        if code.co_name in PUT_BACK or code.co_filename.endswith("weakref.py"):
            return True
        if is_own(code) and frame.f_lineno in cleaning(code.co_filename):
            return True
        frame = frame.f_back
    return False


class Breaking:
    """Counts the calls that leave accelfn on a thread, and raises in place of one.

    Attributes:
        counts: how many were made, by place.
        raised: the error, once it was raised.
    """

    def __init__(
        self, place=None, number=0, kind=Broken, *, but="nothing", behind=False
    ):
        """Take a place, which of its calls, and an error; `but` is a room that is left out.

        It is of this thread, or of those that begin in the block, `behind` it.
        """
        self.place, self.number, self.kind = place, number, kind
        self._profile = threading if behind else sys
        self._but = f"{OWN}{but}{os.sep}"
        self.counts = Counter[Place]()
        self.raised: BaseException | None = None

    def __enter__(self) -> Self:
        self._before = self._profile.getprofile()
        self._profile.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        self._profile.setprofile(self._before)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            code, caller = frame.f_code, frame.f_back
            if caller is None or is_own(code):
                return
            if code is not inside.__code__ and not is_own(caller.f_code):
                return
            if (
                not may_raise(code)
                or is_resumed(frame)
                or code.co_qualname in SWALLOWED
                or "selfref" in code.co_varnames
            ):
                return
            name, method = code.co_qualname, code.co_name
        elif event == "c_call" and is_own(frame.f_code):
            name = method = c_name(arg)
            caller = frame
            if not name:
                return
        else:
            return
        file = caller.f_code.co_filename
        if method in PUT_BACK or file.startswith(self._but) or puts_back(caller):
            return
        place = file, caller.f_lineno, name
        self.counts[place] += 1
        if place == self.place and self.counts[place] > self.number:
            self.place = None
            self.raised = self.kind("broken off")
            raise self.raised


def inside(value: Any) -> Any:
    """Return a value, in a block of the user's, which may be broken off here."""
    return value


def is_told(raised: BaseException, error: BaseException | None) -> bool:
    """Whether an error comes of another; what trackers say of theirs is a warning in words."""
    if isinstance(error, af.errors.TrackingWarning) and str(raised) in str(error):
        return True
    return raised in causes(error)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and what it is said to come of."""
    seen: set[int] = set()
    left = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += [each.__cause__, each.__context__]
        left += [*getattr(each, "exceptions", ())]


# What is left behind

PATCHED = (
    *(torch, nn, nn.Module, nn.Parameter, torch.Tensor, torch.optim.Optimizer),
    *(torch.autograd, torch.random, torch.utils.data, torch.nn.functional, dist),
    *(nn.modules.module, sys.modules["torch.optim.optimizer"]),
    *(dist.distributed_c10d, dist.group),
    *(os, signal, threading, tempfile, random, np.random),
)
"""What a program could change the attributes of."""


def _attributes() -> dict[str, int]:
    return {
        f"{getattr(owner, '__name__', owner)}.{name}": id(value)
        for owner in PATCHED
        for name, value in vars(owner).items()
        if not name.startswith("__") or name in ("__setattr__", "__getattr__")
        if callable(value) or name in _DICTS
    }


_DICTS = ("WORLD", "default_generator")


def _hooks() -> dict[str, int]:
    kinds = vars(nn.modules.module) | vars(sys.modules["torch.optim.optimizer"])
    return {
        n: len(each)
        for n, each in kinds.items()
        if n.startswith("_global_") and isinstance(each, dict)
    }


def _files() -> list[str]:
    found: list[str] = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing
            found.append(str(each.readlink()))
    return sorted(found)


def _children() -> list[str]:
    """Return the processes that this one has started, and that are there."""
    found: list[str] = []
    for each in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # that of a thread that has ended
            found += (each / "children").read_text().split()
    return sorted(found)


def _generators() -> dict[str, bytes]:
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": repr(random.getstate()).encode(),
        "numpy": _bytes(np.random.get_state()),  # noqa: NPY002 - it is looked at
    }


def _bytes(state: Any) -> bytes:
    kind, keys, *rest = state
    return keys.tobytes() + repr((kind, rest)).encode()


def _modes() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "function modes": len(_get_current_function_mode_stack()),
        "anomaly": torch.is_anomaly_enabled(),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),  # noqa: FBT003 - torch's
        "profiler": torch.autograd.profiler._is_profiler_enabled,
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "overrides": torch._C._is_torch_function_enabled(),
    }


def around() -> dict[str, Any]:
    """Return all that is not of a state, and that a call must leave as it was."""
    return {
        **_modes(),
        **_generators(),
        "attributes": _attributes(),
        "hooks": _hooks(),
        "files": _files(),
        "processes": _children(),
        "temporary": sorted(map(str, Path(tempfile.gettempdir()).iterdir())),
        "default group": dist.is_initialized(),
        "filters": [*warnings.filters],
        "handlers": [signal.getsignal(each) for each in signal.valid_signals()],
        "environment": dict(os.environ),
        "streams": (sys.stdout, sys.stderr, sys.stdin),
        "excepthooks": (sys.excepthook, sys.unraisablehook, threading.excepthook),
        "folder": Path.cwd(),
        "path": [*sys.path],
        "collector": (gc.isenabled(), len(gc.callbacks), gc.get_threshold()),
        "switches": sys.getswitchinterval(),
        "setprofile": sys.getprofile(),
    }


def threads() -> set[threading.Thread]:
    return {*threading.enumerate()}


def left_behind(before: Mapping[str, Any], there: set[threading.Thread]) -> list[str]:
    """Return what is other than it was before a call; threads may be about to end."""
    wait_until(lambda: threads() <= there and _children() == before["processes"])
    if _files() != before["files"]:  # that an error's frames may have had
        gc.collect()
    after = around()
    found: list[str] = []
    for name, value in after.items():
        was = before[name]
        if was != value:
            inside = ""
            if isinstance(value, dict):
                inside = f" {[k for k in value if value[k] != was.get(k)][:3]}"
            elif isinstance(value, list):
                new = [each for each in value if each not in was]
                if name == "files" and not new:
                    continue  # a file of an earlier call's garbage was closed
                inside = f" {new[:3]}"
            found.append(f"{name}{inside}")
    return found
