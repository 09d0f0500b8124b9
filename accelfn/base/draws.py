# SPDX-License-Identifier: Apache-2.0
"""Keys and seeded draws: every random draw is a function of what it is for.

A key is a 64-bit integer mixed from named parts. `seeded` sets the default generators of
torch, numpy and Python from a key and puts them back after, so code that draws from them
(dropout, `np.random.beta`) needs no change, and a resumed run draws what the uninterrupted
one draws.

A process has each default generator once, so one thread at a time may draw: another
one's draws would be the first's, and the states that are put back would go back in time.

torch's CPU generator keeps only the low 32 bits of a seed. Keys are mixed so that different
ones differ in those bits too, but for one pair in 2**32; no more can be had of 32 bits.
"""

import hashlib
import os
import random
import threading
import weakref
from _random import Random as _Python
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from ctypes import c_char
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, Self, cast

import torch
from numpy.random import MT19937, mtrand
from torch.autograd import profiler

from accelfn.base import devices
from accelfn.errors import WorldError

_MASK = (1 << 64) - 1
_CPU = torch.device("cpu")


def key(*parts: int | str) -> int:
    """Return the 64-bit key of the parts; strings and integers of any size are taken."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{type(part).__name__}:{part};"
        digest.update(text.encode())
    return int.from_bytes(digest.digest(), "little")


def fold(parent: int, *numbers: int) -> int:
    """Return the key of numbers, one under the other; what a step does, in 0.3 µs each.

    The finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom
    number generators"): a bijection in which every bit of the input reaches every bit.
    """
    for number in numbers:
        z = (parent + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        parent = z ^ (z >> 31)
    return parent


def generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's default generators that code on `device` draws from."""
    return [torch.default_generator, *devices.generators(device)]


def _memory_of_python() -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return functions that read and write the state of Python's default generator.

    CPython keeps a position and 624 words in the object, which are copied in 0.1 µs. If
    they are elsewhere, they are read and written as `random` does, which takes 10.
    """
    size, start = 625 * 4, object.__basicsize__
    if size + start <= _Python.__basicsize__:
        there = (c_char * size).from_address(id(_python) + start)
        memory = memoryview(there).cast("B")
        position, *words = memory.cast("I")
        if (*words, position) == random.getstate()[1]:
            return partial(bytes, memory), partial(memory.__setitem__, slice(None))
    return random.getstate, random.setstate


_python: Any = random.random.__self__
_save_python, _restore_python = _memory_of_python()
_NO_BITS = SimpleNamespace(state=None)
"""Stands in for numpy's generator of bits, whose state takes 30 µs to read or set."""


def normal_of_numpy() -> tuple[int, float]:
    """Return what numpy keeps beside its bits: whether a second normal number is left, and it."""
    legacy = cast("Any", mtrand)._rand
    bits, legacy._bit_generator = legacy._bit_generator, _NO_BITS
    _NO_BITS.state = {"bit_generator": "MT19937"}  # to which numpy adds the number
    try:
        normal = legacy.get_state(legacy=False)
        return normal["has_gauss"], normal["gauss"]
    finally:
        legacy._bit_generator = bits


def put_back_normal_of_numpy(normal: tuple[int, float]) -> None:
    """Let numpy have that number again, which it forgets with its generator."""
    has_gauss, gauss = normal
    if has_gauss:
        state = mtrand.get_state(legacy=False)
        mtrand.set_state({**state, "has_gauss": has_gauss, "gauss": gauss})


def generator_states(device: torch.device) -> list[Any]:
    """Return what the default generators hold, to compare."""
    numpy = [str(each) for each in mtrand.get_state(legacy=False).items()]
    return [
        *(g.get_state().tolist() for g in generators(device)),
        random.getstate(),
        numpy,
    ]


class seeded(AbstractContextManager["seeded"]):
    """Let code in a `with` block draw from the default generators of torch, numpy and Python.

    A block with a seed begins with generators that come from it. `begin(seed)` seeds them
    again, any number of times. They are put back after the block, also if it raises. Blocks
    may be nested, as data that are read by other data are.

    numpy's generator is exchanged, and the memory of Python's copied, because numpy takes
    30 µs and Python 10 to give out a state and take it back. It is a class, with the CPU's
    generator written out, because a step enters a block with its code out of the
    processor's caches.
    """

    __slots__ = ("_gauss", "_held", "_normal", "_numpy", "_others", "_python")
    __slots__ += ("_saved", "_saved_others", "_seed", "_spare")

    def __init__(
        self, seed: int | None = None, device: torch.device = _CPU, *numbers: int
    ) -> None:
        """Take a key, the device whose code will draw, and numbers to fold into the key."""
        self._seed = seed if seed is None or not numbers else fold(seed, *numbers)
        self._others = () if device.type == "cpu" else devices.generators(device)

    def __enter__(self) -> Self:
        """Keep the generators' states, and seed them if there is a seed."""
        held = self._held = _turn.take()
        self._numpy = mtrand.get_bit_generator()
        try:
            self._saved = _default.get_state()
            if self._others:
                self._saved_others = [each.get_state() for each in self._others]
            self._python, self._gauss = _save_python(), _python.gauss_next
            self._normal = normal_of_numpy()
            self._spare = _spares.pop() if _spares else MT19937(0)
        except BaseException:  # a device that failed, or Ctrl-C as numpy was asked
            mtrand.set_bit_generator(self._numpy)
            held.give_back()
            raise
        try:
            mtrand.set_bit_generator(self._spare)
            if self._seed is not None:
                self.begin(self._seed)
        except BaseException:
            self.__exit__()
            raise
        return self

    def begin(self, seed: int) -> None:
        """Let the following numbers come from this seed.

        numpy takes the upper half of it: torch takes the lower half for an algorithm that
        is numpy's too, so `torch.randint` and `np.random.randint` would give the same.
        """
        _default.manual_seed(seed)
        for each in self._others:
            each.manual_seed(seed)
        _Python.seed(_python, seed)
        _python.gauss_next = None
        mtrand.seed(seed >> 32 & 0xFFFFFFFF)

    def __exit__(self, *error: object) -> None:
        """Put the generators back."""
        try:
            _default.set_state(self._saved)
            if self._others:
                for each, saved in zip(self._others, self._saved_others, strict=True):
                    each.set_state(saved)
            _restore_python(self._python)
            _python.gauss_next = self._gauss
            mtrand.set_bit_generator(self._numpy)
            if self._normal[0]:
                put_back_normal_of_numpy(self._normal)
            _spares.append(self._spare)
        finally:
            self._held.give_back()


class Turn:
    """Had by one thread at a time: the one that draws.

    It is had by a block, and those in it, for as long as they live: where Ctrl-C comes just as
    a block ends, Python does not end it, and nobody would ever give back what it had.
    """

    __slots__ = ("_had",)

    def __init__(self) -> None:
        """Begin with nobody's."""
        self._had: list[weakref.ref[HeldTurn]] = []  # as they came; some live no more

    def take(self) -> "HeldTurn":
        """Return what gives it back, or is let go.

        Raises:
            WorldError: another thread has it.
        """
        held = HeldTurn(self._had)
        if len(self._had) == 1:  # as nearly always
            return held
        for each in tuple(self._had):
            first = each()
            if first is None:
                with suppress(ValueError):  # another thread has taken it out
                    self._had.remove(each)
            elif first.thread == held.thread:
                break
            else:
                held.give_back()
                _raise_other_thread()
        return held


class HeldTurn:
    """A turn that a block of a thread has."""

    __slots__ = ("__weakref__", "_had", "_mine", "thread")

    def __init__(self, had: "list[weakref.ref[HeldTurn]]") -> None:
        """Stand behind those that have it."""
        self.thread, self._had = threading.get_ident(), had
        self._mine: weakref.ref[HeldTurn] = weakref.ref(self)
        had.append(self._mine)

    def give_back(self) -> None:
        """Let who had it before have it."""
        try:  # noqa: SIM105 - in each step, where `suppress` takes longer
            self._had.remove(self._mine)
        except ValueError:  # another thread has taken it out
            pass


_default = torch.default_generator
_turn = Turn()
"""To draw from the default generators; simulated ranks, which are threads, have one each."""


def _reset_after_fork() -> None:
    """Let a process that was forked, in which no other thread lives, draw."""
    global _turn  # noqa: PLW0603 - as the generators are
    _turn = Turn()


os.register_at_fork(after_in_child=_reset_after_fork)


def _raise_other_thread() -> NoReturn:
    msg = (
        "This thread would draw at random while another thread of this process does, in a"
        " step, in af.evaluate, in af.rng, or where it reads data that draw: torch's default"
        " generators are the process's, so each would get the other's numbers. Let one wait"
        " for the other, or run each in a process of its own; to read ahead, write"
        " af.Data(num_workers=...)."
    )
    raise WorldError(msg)


_spares: list[Any] = []
"""What takes the place of numpy's generator and is in no block; to make one takes 0.1 ms."""


# Contexts that are entered at every step, where there is mostly nothing to do.


NOTHING = nullcontext()
"""A context that does nothing: of one instance, which costs no call."""
# asked at every step and batch: without a device's name to be parsed, or names to look up
_with_gradients, _for_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_any_autocast = torch._C._is_any_autocast_enabled  # pyright: ignore[reportPrivateUsage]


def own_modes(device: torch.device) -> AbstractContextManager[object]:
    """Return a context with gradients on, and inference mode and autocast off.

    A tensor made in inference mode could never be trained again, so whatever makes one for
    a state runs in here. It is entered at every step, where the modes are mostly right
    already: then nothing is done.
    """
    inference = _for_inference()
    autocast = _any_autocast() and torch.is_autocast_enabled(device.type)
    if _with_gradients() and not inference and not autocast:
        return NOTHING
    stack = ExitStack()
    if inference:
        stack.enter_context(torch.inference_mode(mode=False))
    stack.enter_context(torch.enable_grad())
    if autocast:
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def is_plain() -> bool:
    """Whether a step's own modes are on, and nothing is recorded: there is nothing to enter.

    For what takes so few microseconds that the contexts above would be a tenth of it.
    """
    return (
        _with_gradients()
        and not _for_inference()
        and not _any_autocast()
        and not profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
    )


def is_profiled() -> bool:
    """Whether torch's profiler records now."""
    return profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]


def span(*words: str) -> AbstractContextManager[object]:
    """Return a context whose time stands in a profiler's trace under these words.

    Where every step comes by, the caller asks torch's profiler itself, and saves a call.
    """
    return profiler.record_function(" ".join(words)) if is_profiled() else NOTHING
