# SPDX-License-Identifier: Apache-2.0
"""A checkpoint holds every bit, is there whole or not at all, and notices what changed."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.catalog import stacks
from tests.internals import codec
from tests.laws.disks import lent
from tests.laws.test_collectives import LAYOUTS, laid_out
from tests.laws.worlds import Found
from tests.states import bits
from tests.strategies import Run, differences, runs, tensors

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@contextmanager
def folder() -> Iterator[Path]:
    """Lend the name of a checkpoint to be."""
    with tempfile.TemporaryDirectory() as parent:
        yield Path(parent) / "saved"


@st.composite
def any_bits(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any dtype, shape and layout, of any bits: NaN, -0.0 and all."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
    count = torch.Size(shape).numel() * dtype.itemsize
    one_byte = st.sampled_from([b"\x80", b"\xff"]).map(lambda byte: byte * count)
    drawn = draw(st.one_of(st.binary(min_size=count, max_size=count), one_byte))
    raw = torch.tensor(list(drawn), dtype=torch.uint8)
    if dtype is torch.bool:
        values = raw > 127
    else:
        values = raw.view(dtype) if count else torch.empty(0, dtype=dtype)
    layout = draw(st.sampled_from(LAYOUTS))
    return laid_out(values.view(shape), layout)


floats = st.floats() | st.floats().map(np.float64)  # which comes back as a plain float
plain = st.one_of(st.none(), st.booleans(), st.integers(), floats, st.text(max_size=5))
trees = st.recursive(
    st.one_of(any_bits(), plain),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)


def same(one: Any, two: Any) -> bool:
    """Whether two trees have the same types, keys in the same order, and bits."""
    if isinstance(one, float) and isinstance(two, float):
        return repr(float(one)) == repr(float(two))
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return bits(one) == bits(two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@given(tree=trees, shared=any_bits())
def test_any_tree_comes_back(tree: Any, shared: torch.Tensor) -> None:
    """A slot's types, order, dtypes and bits survive, and one tensor in two places is one."""
    slot = {"tree": tree, "one": shared, "two": [shared]}
    state = Run().state().with_slot("mine", slot)
    with folder() as saved:
        af.save(state, saved)
        loaded = af.load(Run().state(), saved).slots["mine"]
    assert same(slot, loaded)
    assert loaded["one"] is loaded["two"][0]
    assert same(slot, state.slots["mine"])


# of which some, one within the other, read as another does, and some are no names
KEYS = st.sampled_from(["a", "a.a", "a[0]", "\u00e9"])
full_trees = st.recursive(
    st.integers(0, 99).map(torch.tensor),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, min_size=1, max_size=4)
    ),
    max_leaves=12,
)


@given(tree=full_trees)
def test_tensors_are_told_apart_by_their_places(tree: Any) -> None:
    """Whatever keys are on the way to them, and however these read one after the other."""
    assert same(tree, codec.from_bytes(codec.to_bytes(tree)))


@st.composite
def seen_otherwise(draw: st.DrawFn) -> list[torch.Tensor]:
    """Draw a tensor a rank, of the same bytes, each in a dtype and a shape of its own."""
    count = draw(st.sampled_from([0, 1, 2, 6]))
    raw = torch.tensor(list(draw(st.binary(min_size=4 * count, max_size=4 * count))))
    shapes = [(count,), (1, count), (count, 1), (1, 1, count)]
    shapes += [(count // 2, 2), (2, count // 2)] if count % 2 == 0 else []
    kinds = st.tuples(
        st.sampled_from([torch.float32, torch.int32, torch.uint32]),
        st.sampled_from(shapes),
    )
    return [
        raw.to(torch.uint8).view(dtype).view(shape)
        for dtype, shape in draw(st.lists(kinds, min_size=2, max_size=3))
    ]


@given(each=seen_otherwise())
def test_what_ranks_see_otherwise_is_each_ones_own(each: list[torch.Tensor]) -> None:
    """The same bytes of another shape or dtype are another tensor, and come back to each rank."""

    def one(world: af.World) -> None:
        own = each[world.rank]
        af.save(Run().state(world).with_slot("mine", own), saved)
        assert same(af.load(Run().state(world), saved).slots["mine"], own)

    with folder() as saved:
        simulate(len(each), one)


@given(run=runs(), setup=stacks(), updates=st.integers(0, 3))
def test_what_is_loaded_is_saved_alike(run: Run, setup: tuple, updates: int) -> None:
    """Saving what was loaded writes the very same bytes."""
    run = attrs.evolve(run, setup=af.chain(*setup), n=12)
    state, _ = run.train(run.state(), updates)
    with folder() as first, folder() as second:
        af.save(state, first)
        af.save(af.load(run.state(), first), second)
        one, two = (
            {path.name: path.read_bytes() for path in each.iterdir()}
            for each in (first, second)
        )
    assert one == two


@given(
    size=st.sampled_from([1, 2]),
    data=st.data(),
    how=st.sampled_from(["flip", "cut", "add", "remove"]),
    joint=st.booleans(),
)
def test_any_change_of_a_file_is_noticed(size, data, how, joint):
    """One bit flipped, a tail cut off or added, a file gone: load refuses on each rank."""
    setup = af.chain(af.shard_data(), af.local_sgd(sync_every=2))
    run = Run(n=12, updates=1, setup=setup, dyadic=False, loss="squared")
    with folder() as saved:

        def save(world: af.World) -> Found:
            state, _ = run.train(run.state(world))
            af.save({"one": state} if joint else state, saved)
            return tensors(state)

        expected = simulate(size, save)
        paths = sorted(path for path in saved.rglob("*") if path.is_file())
        path = data.draw(st.sampled_from(paths), label="file")
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1), label="byte")
        match how:
            case "flip":
                content[at] ^= 1 << data.draw(st.integers(0, 7), label="bit")
            case "cut":
                del content[at:]
            case "add":
                content.insert(at, 0)
        if how == "remove":
            path.unlink()
        else:
            path.write_bytes(content)

        def load(world: af.World) -> bool:
            fresh = run.state(world)
            try:
                given = {"one": fresh} if joint else fresh
                found = af.load(given, saved)
                loaded = tensors(found["one"] if joint else found)
            except af.errors.CheckpointError as error:
                assert path.name in str(error)  # noqa: PT017 - either of two ways is right
                return False
            assert differences(expected[world.rank], loaded) == []
            return True

        for rank, went_on in enumerate(simulate(size, load)):
            if path.name in (f"rank-{rank:05d}.safetensors", "manifest.json"):
                assert not went_on  # another's file is read for what it has for all


def bytes_in(folder: Path) -> dict[str, bytes]:
    """Return what is in a folder's files, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


SETUPS = {
    "ddp": (af.wrap_ddp(), af.ema(0.5)),
    "local": (af.local_sgd(sync_every=2),),
    "fsdp": (af.wrap_fsdp(), af.ema(0.5)),
}
KINDS = st.sampled_from(sorted(SETUPS))


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kinds=st.tuples(KINDS, KINDS),
    updates=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    mixed=st.sampled_from(["one", "two"]),
)
def test_states_that_are_saved_together_are_what_each_alone_is(
    sizes, kinds, updates, mixed
):
    """Files and loaded values are those of each alone; moments of two saves never mix."""
    runs = {
        name: Run(n=12, setup=af.chain(af.shard_data(), *SETUPS[kind]), dyadic=False)
        for name, kind in zip(("one", "two"), kinds, strict=True)
    }

    def fresh(world: af.World) -> dict[str, af.TrainState]:
        return {name: run.state(world) for name, run in runs.items()}

    def save(world: af.World) -> None:
        states = fresh(world)
        for more in (0, 1):
            for (name, run), count in zip(runs.items(), updates, strict=True):
                states[name], _ = run.train(states[name], more or count)
            af.save(states, root / f"both {more}")
            for name, state in states.items():
                af.save(state, root / f"{name} {more}")

    def load(world: af.World) -> None:
        found = af.load(fresh(world), root / "both 0")
        for name, state in fresh(world).items():
            alone = af.load(state, root / f"{name} 0")
            assert differences(tensors(alone), tensors(found[name])) == []
            assert (alone.step, alone.cursor) == (found[name].step, found[name].cursor)

    def refuse(world: af.World) -> None:
        with pytest.raises(
            af.errors.CheckpointCorruptError, match=f"{mixed}/manifest.json"
        ):
            af.load(fresh(world), root / "both 0")

    with lent() as root:
        simulate(sizes[0], save)
        for name in runs:
            assert bytes_in(root / f"{name} 0") == bytes_in(root / "both 0" / name)
        simulate(sizes[1], load)
        shutil.rmtree(root / "both 0" / mixed)
        shutil.copytree(root / "both 1" / mixed, root / "both 0" / mixed)
        simulate(sizes[1], refuse)
