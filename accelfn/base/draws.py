# SPDX-License-Identifier: Apache-2.0
"""Random keys and seeded generators, so that each random number depends on its purpose only.

A key is a 64-bit hash of strings and integers. `seeded` seeds the default generators of
torch, numpy and Python from a key, and restores the generators afterwards. Code that uses
the default generators (dropout, `np.random.beta`) needs no change. A resumed run gets the
random numbers of an uninterrupted run.

A process has one default generator of each kind, so only one thread at a time may use them.
Otherwise a thread would take random numbers from another thread's sequence, and restoring a
generator would repeat random numbers.

torch's CPU generator keeps only the low 32 bits of a seed. Two different keys have equal low
bits with probability 1 in 2**32, the best possible for 32 bits. The same holds for the 32 bits
that seed numpy, and for those that seed Python.
"""

import hashlib
import random
import sys
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
from numpy.random import MT19937, RandomState, mtrand
from torch.autograd import profiler

from accelfn.base import devices, system
from accelfn.errors import WorldError

_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15
_CPU = torch.device("cpu")


def key(*parts: int | str) -> int:
    """Return a 64-bit key: a hash of strings and of integers of any size."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{type(part).__name__}:{part};"
        digest.update(text.encode())
    return int.from_bytes(digest.digest(), "little")


def fold(parent: int, *numbers: int) -> int:
    """Fold numbers into a key, one after another.

    It uses the finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable
    pseudorandom number generators"), a bijection. Every input bit affects every output
    bit. Folding a number takes 0.3 µs.
    """
    for number in numbers:
        z = (parent + (number + 1) * _MIX) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        parent = z ^ (z >> 31)
    return parent


def generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's default generators for code on a device: the CPU's and the device's."""
    return [torch.default_generator, *devices.generators(device)]


def _memory_of_python() -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return functions that read and write the state of Python's default generator.

    CPython stores a position and 624 words inside the object, and copying this memory takes
    0.1 µs. If the memory layout is different, the functions are `random.getstate` and
    `random.setstate`, which take 10 µs.
    """
    size, start = 625 * 4, object.__basicsize__
    if size + start <= _Python.__basicsize__:
        buffer = (c_char * size).from_address(id(_python) + start)
        memory = memoryview(buffer).cast("B")
        position, *words = memory.cast("I")
        if (*words, position) == random.getstate()[1]:
            return partial(bytes, memory), partial(memory.__setitem__, slice(None))
    return random.getstate, random.setstate


_python: Any = random.random.__self__
_save_python, _restore_python = _memory_of_python()
_bits = MT19937(0)
_seed_bits = RandomState(_bits).seed
_words = memoryview((c_char * 2496).from_address(_bits.ctypes.state_address)).cast("B")
"""The 624 words of `_bits`, in the memory of numpy."""
_ALL_USED = (624).to_bytes(4, sys.byteorder)


def _seed_python(seed: int) -> None:
    """Seed Python's default generator as numpy seeds one of the same kind, with 32 bits.

    A call takes 2 µs. The `seed` of Python's generator takes 10 µs.
    """
    _seed_bits(seed)
    if _restore_python is random.setstate:
        random.setstate((3, (*_words.cast("I"), 624), None))
    else:
        _restore_python(_ALL_USED + _words)
    _python.gauss_next = None


_NO_BITS = SimpleNamespace(state=None)
"""A stand-in for numpy's bit generator, because reading the real state takes 30 µs."""


def normal_of_numpy() -> tuple[int, float]:
    """Return numpy's cached second normal random number: whether it exists, and its value."""
    legacy = cast("Any", mtrand)._rand
    bits, legacy._bit_generator = legacy._bit_generator, _NO_BITS
    _NO_BITS.state = {"bit_generator": "MT19937"}  # numpy adds the number here
    try:
        normal = legacy.get_state(legacy=False)
        return normal["has_gauss"], normal["gauss"]
    finally:
        legacy._bit_generator = bits


def put_back_normal_of_numpy(normal: tuple[int, float]) -> None:
    """Restore numpy's cached normal number, which is lost when its generator is exchanged."""
    has_gauss, gauss = normal
    if has_gauss:
        state = mtrand.get_state(legacy=False)
        mtrand.set_state({**state, "has_gauss": has_gauss, "gauss": gauss})


def generator_states(device: torch.device) -> list[Any]:
    """Return the states of all default generators in a form that can be compared."""
    numpy = [str(item) for item in mtrand.get_state(legacy=False).items()]
    return [
        *(g.get_state().tolist() for g in generators(device)),
        random.getstate(),
        numpy,
    ]


class seeded(AbstractContextManager["seeded"]):
    """Seed the default generators of torch, numpy and Python within a `with` block.

    If a seed is given, the block begins with generators seeded from it. `begin(seed)` seeds
    the generators again, any number of times. At its end, also after an error, the block
    restores the generators. Blocks may be nested, for example when a dataset reads another
    dataset.

    The block exchanges numpy's generator and copies the memory of Python's generator, because
    saving and restoring their states would take 30 µs and 10 µs. Every step enters such a
    block, so `seeded` is a class, and has a faster path for the CPU's generator.
    """

    __slots__ = ("_gauss", "_held", "_normal", "_numpy", "_others", "_python")
    __slots__ += ("_saved", "_saved_others", "_seed", "_spare")

    def __init__(
        self, seed: int | None = None, device: torch.device = _CPU, *numbers: int
    ) -> None:
        """Prepare the seed, with `numbers` folded in, and the generators of the device."""
        self._seed = seed if seed is None or not numbers else fold(seed, *numbers)
        self._others = () if device.type == "cpu" else devices.generators(device)

    def __enter__(self) -> Self:
        """Save the generators' states, and seed the generators if a seed was given."""
        turn = self._held = _turn.take()
        self._numpy = mtrand.get_bit_generator()
        try:
            self._saved = _default.get_state()
            if self._others:
                self._saved_others = [other.get_state() for other in self._others]
            self._python, self._gauss = _save_python(), _python.gauss_next
            self._normal = normal_of_numpy()
            self._spare = _spares.pop() if _spares else MT19937(0)
        except BaseException:  # a device failed, or Ctrl-C
            mtrand.set_bit_generator(self._numpy)
            turn.give_back()
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
        """Seed the generators again.

        torch uses the lower half of the seed. numpy gets the upper half, and Python a mixture,
        because all three use the same algorithm. With the same 32 bits, `torch.randint` and
        `np.random.randint` would return the same numbers.
        """
        _default.manual_seed(seed)
        for other in self._others:
            other.manual_seed(seed)
        mtrand.seed(seed >> 32 & 0xFFFFFFFF)
        _seed_python(seed * _MIX >> 32 & 0xFFFFFFFF)

    def __exit__(self, *error: object) -> None:
        """Restore the generators."""
        try:
            _default.set_state(self._saved)
            if self._others:
                for other, state in zip(self._others, self._saved_others, strict=True):
                    other.set_state(state)
            _restore_python(self._python)
            _python.gauss_next = self._gauss
            mtrand.set_bit_generator(self._numpy)
            if self._normal[0]:
                put_back_normal_of_numpy(self._normal)
            _spares.append(self._spare)
        finally:
            self._held.give_back()


class Turn:
    """A lock on the default generators, held by the thread that uses them.

    The lock has only weak references to its holders. Ctrl-C at the end of a `with` block can
    skip `__exit__`. An ordinary lock would then never be released, but here the dead reference
    no longer counts.
    """

    __slots__ = ("_had",)

    def __init__(self) -> None:
        """Create a free lock."""
        # oldest first; references may be dead
        self._had: list[weakref.ref[HeldTurn]] = []

    def take(self) -> "HeldTurn":
        """Acquire the lock for this thread; `give_back` of the result releases the lock.

        Raises:
            WorldError: another thread holds the lock.
        """
        turn = HeldTurn(self._had)
        if len(self._had) == 1:  # the usual case
            return turn
        for ref in tuple(self._had):
            first = ref()
            if first is None:
                with suppress(ValueError):  # another thread removed it
                    self._had.remove(ref)
            elif first.thread == turn.thread:
                break
            else:
                turn.give_back()
                _raise_other_thread()
        return turn


class HeldTurn:
    """One holder of the lock: a `with` block of a thread."""

    __slots__ = ("__weakref__", "_had", "_mine", "thread")

    def __init__(self, holders: "list[weakref.ref[HeldTurn]]") -> None:
        """Add this object to the list of the lock's holders."""
        self.thread, self._had = threading.get_ident(), holders
        self._mine: weakref.ref[HeldTurn] = weakref.ref(self)
        holders.append(self._mine)

    def give_back(self) -> None:
        """Release the lock: remove this object from the list of holders."""
        try:  # noqa: SIM105 - runs in each step, and `suppress` is slower
            self._had.remove(self._mine)
        except ValueError:  # another thread removed it
            pass


_default = torch.default_generator
_turn = Turn()
"""The lock on the default generators; each simulated rank (a thread) has its own lock."""


def _reset_after_fork() -> None:
    """Create a free lock in a forked process, which has only one thread."""
    global _turn  # noqa: PLW0603 - the generators are global, too
    _turn = Turn()


system.call_after_fork(_reset_after_fork)


def _raise_other_thread() -> NoReturn:
    msg = (
        "This thread needs random numbers while another thread of this process uses them, in a"
        " step, af.evaluate, af.fork_rng or a dataset. Both would use torch's default generators,"
        " so the numbers would not be reproducible. Let one thread wait for the other, or use two"
        " processes. To load data in the background, write af.Data(num_workers=...)."
    )
    raise WorldError(msg)


_spares: list[Any] = []
"""Unused generators that can replace numpy's; creating a generator takes 0.1 ms."""


# Contexts that every step enters, and that usually do nothing.


NOTHING = nullcontext()
"""A context that does nothing; all code shares this object, so no call creates it."""
# every step and batch calls these functions, so they are looked up only once, here
_with_gradients, _for_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_any_autocast = torch._C._is_any_autocast_enabled  # pyright: ignore[reportPrivateUsage]


def own_modes(device: torch.device) -> AbstractContextManager[object]:
    """Return a context with gradients on, and inference mode and autocast off.

    A tensor created in inference mode could never be trained, so all code that creates
    tensors for a state runs in this context. If the modes are already right, as in most
    steps, the context does nothing.
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
    """Return whether gradients are on, and inference mode, autocast and profiler are off.

    Code that takes only microseconds calls this first. If it is true, the code skips
    `own_modes` and `span`, which would take a tenth of its time.
    """
    return (
        _with_gradients()
        and not _for_inference()
        and not _any_autocast()
        and not profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
    )


def is_profiled() -> bool:
    """Return whether torch's profiler is recording."""
    return profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]


def span(*words: str) -> AbstractContextManager[object]:
    """Return a context that appears under this name in a trace of torch's profiler.

    Code that every step runs checks the profiler's flag itself, and so saves this call.
    """
    return profiler.record_function(" ".join(words)) if is_profiled() else NOTHING
