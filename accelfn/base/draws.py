# SPDX-License-Identifier: Apache-2.0
"""Keys and seeded draws: every random draw is a function of what it is for.

A key is a 64-bit integer mixed from named parts. `seeded` sets torch's default generators
from a key and puts them back after, so code that draws from them (dropout, `torch.randn`)
needs no change, and a resumed run draws what the uninterrupted one draws.

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
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Self

import numpy as np
import torch

from accelfn.base import accelerator
from accelfn.errors import WorldError

_MASK = (1 << 64) - 1


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
    return [torch.default_generator, *accelerator.generators(device)]


class seeded(AbstractContextManager[None]):
    """Let draws from torch's default generators come from `seed` inside a `with` block.

    The generators are put back after it, also when the block raises. A class and not a
    generator function, and the CPU's generator written out, because a step enters one
    with its code out of the processor's caches.
    """

    __slots__ = ("_held", "_others", "_saved", "_saved_others", "_seed")

    def __init__(self, seed: int, device: torch.device, *numbers: int) -> None:
        """Take a key, the device whose code will draw, and numbers to fold into the key."""
        self._seed = fold(seed, *numbers) if numbers else seed
        self._others = () if device.type == "cpu" else accelerator.generators(device)

    def __enter__(self) -> None:
        """Keep the generators' states, and seed them."""
        held = self._held = _turn.take()
        try:
            self._saved = _default.get_state()
            if self._others:
                self._saved_others = [each.get_state() for each in self._others]
        except BaseException:  # a device that failed, or Ctrl-C
            held.give_back()
            raise
        try:
            _default.manual_seed(self._seed)
            for each in self._others:
                each.manual_seed(self._seed)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        """Put the generators back."""
        try:
            _default.set_state(self._saved)
            if self._others:
                for each, saved in zip(self._others, self._saved_others, strict=True):
                    each.set_state(saved)
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
        self._had: list[weakref.ref[Held]] = []  # as they came; some live no more

    def take(self) -> "Held":
        """Return what gives it back, or is let go.

        Raises:
            WorldError: another thread has it.
        """
        held = Held(self._had)
        if len(self._had) == 1:  # as nearly always
            return held
        for each in tuple(self._had):
            first = each()
            if first is None:
                forget(each, self._had)
            elif first.thread == held.thread:
                break
            else:
                held.give_back()
                _refuse()
        return held


class Held:
    """A turn that a block of a thread has."""

    __slots__ = ("__weakref__", "_had", "_mine", "thread")

    def __init__(self, had: "list[weakref.ref[Held]]") -> None:
        """Stand behind those that have it."""
        self.thread, self._had = threading.get_ident(), had
        self._mine: weakref.ref[Held] = weakref.ref(self)
        had.append(self._mine)

    def give_back(self) -> None:
        """Let who had it before have it."""
        forget(self._mine, self._had)


def forget(one: object, of: list[Any]) -> None:
    """Take one of a list out of it, if no other thread has."""
    try:  # noqa: SIM105 - in each step, where `suppress` takes longer
        of.remove(one)
    except ValueError:
        pass


_default = torch.default_generator
_turn = Turn()
"""To draw from the default generators; simulated ranks, which are threads, have one each."""


def _begin_anew() -> None:
    """Let a process that was forked, in which no other thread lives, draw."""
    global _turn  # noqa: PLW0603 - as the generators are
    _turn = Turn()


os.register_at_fork(after_in_child=_begin_anew)


def _refuse() -> NoReturn:
    msg = (
        "This thread would draw at random while another thread of this process does, in a"
        " step, in af.evaluate, in af.rng, or where it reads data that draw: torch's default"
        " generators are the process's, so each would get the other's numbers. Let one wait"
        " for the other, or run each in a process of its own; to read ahead, write"
        " af.Data(num_workers=...)."
    )
    raise WorldError(msg)


class drawing(AbstractContextManager["drawing"]):
    """Let what reads data draw from torch's, numpy's and Python's default generators.

    Inside a `with` block `begin(seed)` sets all three, any number of times; they are put back
    after it. numpy's is exchanged for another, which is a hundred times cheaper than to copy
    its state. Blocks may lie in one another, as data that are read by other data do.
    """

    __slots__ = ("_held", "_normal", "_numpy", "_python", "_spare", "_torch")

    def __enter__(self) -> Self:
        """Keep the generators' states."""
        held = self._held = _turn.take()
        try:
            self._torch = _default.get_state()
            self._python = random.getstate()
            legacy = _legacy()
            self._numpy, self._normal = legacy.get_bit_generator(), normal_of_numpy()
            self._spare = _spares.pop() if _spares else np.random.MT19937(0)
            legacy.set_bit_generator(self._spare)
        except BaseException:  # Ctrl-C
            held.give_back()
            raise
        return self

    def begin(self, seed: int) -> None:
        """Let what follows be drawn from this seed."""
        _default.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - it is the one that code draws from

    def __exit__(self, *error: object) -> None:
        """Put the generators back."""
        try:
            _default.set_state(self._torch)
            random.setstate(self._python)
            _legacy().set_bit_generator(self._numpy)
            put_back_normal_of_numpy(self._normal)
            _spares.append(self._spare)
        finally:
            self._held.give_back()


_spares: list[Any] = []
"""What takes the place of numpy's generator and is in no block; to make one takes 0.1 ms."""


class _NoBits:
    """Stands in for numpy's generator of bits, whose state takes 30 µs to read or set."""

    @property
    def state(self) -> dict[str, Any]:
        """What numpy adds its number to, so another one each time."""
        return {"bit_generator": "MT19937", "state": None}

    @state.setter
    def state(self, value: object) -> None: ...


_NO_BITS = _NoBits()


def normal_of_numpy() -> dict[str, Any]:
    """Return what numpy keeps beside its bits: the second normal number of a pair."""
    legacy = _legacy()._rand
    bits, legacy._bit_generator = legacy._bit_generator, _NO_BITS
    try:
        return legacy.get_state(legacy=False)
    finally:
        legacy._bit_generator = bits


def put_back_normal_of_numpy(normal: dict[str, Any]) -> None:
    """Let numpy have that number again, which it forgets with its generator."""
    legacy = _legacy()._rand
    bits, legacy._bit_generator = legacy._bit_generator, _NO_BITS
    try:
        legacy.set_state(normal)
    finally:
        legacy._bit_generator = bits


def _legacy() -> Any:
    """Return where numpy's global generator is; imported when data are read, and not before."""
    from numpy.random import mtrand  # noqa: PLC0415

    return mtrand
