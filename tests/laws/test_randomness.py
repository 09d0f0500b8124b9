# SPDX-License-Identifier: Apache-2.0
"""Every draw has a stream of its own: no two purposes share one, and replays repeat it."""

import itertools
import random
from collections.abc import Generator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.internals import devices, draws

CPU = torch.device("cpu")
Draws = tuple[float, ...]

numbers = st.one_of(
    st.integers(-2, 9),
    st.integers(0, 9).map(lambda n: n + 2**32),
    st.integers(0, 9).map(lambda n: n * 2**32),
    st.sampled_from([-1, 2**63, 2**100]),
    st.integers(-(2**70), 2**70),
)
parts = st.lists(
    st.one_of(numbers, st.text("ab;:1", max_size=3)), min_size=1, max_size=4
)


def drawn(key: int, count: int = 8) -> Draws:
    """Return the first numbers of a stream."""
    with draws.seeded(key, CPU):
        return tuple(torch.rand(count, dtype=torch.float64).tolist())


def distinct(drawn: list[Draws]) -> bool:
    """Whether no two streams have a number in common, in any place."""
    every = list(itertools.chain(*drawn))
    return len(set(every)) == len(every)


def like(key: tuple) -> list[tuple]:
    """Return keys that read alike: of other types, or cut in other places."""
    texts = [str(part) for part in key]
    return [key, tuple(texts), ("".join(texts),), (";".join(texts),), (*key, "")]


@given(keys=st.lists(parts.map(tuple), min_size=1, max_size=4))
def test_different_keys_draw_differently(keys: list[tuple]) -> None:
    """Keys of different parts, of any size and type, have streams with nothing in common."""
    every = {repr(each): each for key in keys for each in like(key)}
    assert distinct([drawn(draws.key(*key)) for key in every.values()])
    for key in keys:
        assert drawn(draws.key(*key)) == drawn(draws.key(*key))


@given(
    parents=st.lists(parts.map(tuple), min_size=1, max_size=4, unique_by=repr),
    numbers=st.sets(numbers, min_size=1, max_size=6),
)
def test_different_numbers_under_a_key_draw_differently(parents, numbers):
    """Every step and micro-batch under a key has a stream with nothing in common."""
    keys = [draws.fold(draws.key(*p), n) for p in parents for n in numbers]
    assert distinct([drawn(key) for key in [*keys, *map(draws.key, numbers)]])


def test_folded_keys_differ_in_the_low_bits():
    """A run's updates and micro-batches have keys that differ in 32 bits, nearly all."""
    parent = draws.key(0, "state", "loss", 0)
    found = {
        draws.fold(draws.fold(parent, step), part) % 2**32
        for step in range(5000)
        for part in range(4)
    }
    assert len(found) >= 20_000 - 2


class Unseedable:
    """A device's generator that is lost."""

    def get_state(self):
        return torch.zeros(0)

    def set_state(self, state):
        pass

    def manual_seed(self, seed):
        raise RuntimeError(seed)


def test_a_device_that_cannot_be_seeded_leaves_the_cpu_as_it_was(monkeypatch):
    """The generator that was seeded before it is put back."""
    monkeypatch.setattr(devices, "generators", lambda _: (Unseedable(),))
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), draws.seeded(1, torch.device("cuda")):
        pass
    assert torch.equal(before, torch.get_rng_state())


def rolled() -> Draws:
    """Draw from each default generator, of numpy and Python normal numbers, which come in pairs."""
    drawn = np.random.random(), np.random.standard_normal()  # noqa: NPY002
    gauss = random.gauss(0, 1)
    return torch.rand(1).item(), *drawn, random.random(), gauss  # noqa: S311


@contextmanager
def callers(number: int) -> Generator[None]:
    """Seed the default generators as a caller does, and put them back."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        np.random.seed(number)  # noqa: NPY002
        random.seed(number)
        yield
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002


@given(seed=numbers, number=st.integers(0, 9), raises=st.booleans())
def test_a_stream_leaves_the_generator_as_it_was(seed, number, raises):
    """What is drawn before and after a stream, even one that raises, does not know of it."""
    with callers(number):
        expected = [rolled() for _ in range(2)]
    with callers(number):
        found = [rolled()]
        with suppress(ZeroDivisionError), draws.seeded(draws.key(seed), CPU):
            rolled()
            random.seed(1 // (not raises))
        assert [*found, rolled()] == expected


def test_default_generators_draw_apart():
    """torch, numpy and Python use one algorithm, and give other numbers by one seed."""
    with draws.seeded(draws.key("a"), CPU):
        found = torch.randint(0, 2, (64,)).tolist()
        assert found != np.random.randint(0, 2, 64).tolist()  # noqa: NPY002
        found = [random.random() for _ in range(4)]  # noqa: S311
        assert found != np.random.RandomState(draws.key("a") >> 32).rand(4).tolist()
        assert (
            found != np.random.RandomState(draws.key("a") & 2**32 - 1).rand(4).tolist()
        )


def test_pythons_generator_is_found_in_memory_or_asked(monkeypatch):
    """If Python keeps its generator in another way, it is read and written by `random`."""
    read, write = draws._memory_of_python()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(random, "getstate", lambda: (3, (0,), None))
    asked = draws._memory_of_python()  # pyright: ignore[reportPrivateUsage]
    assert asked == (random.getstate, random.setstate)
    monkeypatch.undo()
    with draws.seeded(7):
        expected = rolled()
    monkeypatch.setattr(draws, "_save_python", random.getstate)
    monkeypatch.setattr(draws, "_restore_python", random.setstate)
    with draws.seeded(7):
        assert rolled() == expected
    with callers(0):
        state, before = read(), random.getstate()
        drawn = random.random()  # noqa: S311
        write(state)
        assert (random.getstate(), random.random()) == (before, drawn)  # noqa: S311


def drawn_within(seeds: list[int]) -> list[Draws]:
    """Return what each of several blocks draws that lie in one another, the outermost first."""
    if not seeds:
        return []
    with draws.seeded() as drawing:
        drawing.begin(seeds[0])
        before = rolled()
        inner = drawn_within(seeds[1:])
        return [before + rolled(), *inner]


@given(seeds=st.lists(st.integers(0, 99), min_size=1, max_size=5))
def test_blocks_that_draw_within_one_another_are_apart(seeds: list[int]) -> None:
    """However deep blocks that read data lie in one another, each draws what it would alone."""
    found = drawn_within(seeds)
    assert found == [each for seed in seeds for each in drawn_within([seed])]
