# SPDX-License-Identifier: Apache-2.0
"""What is held in another shape, dtype, or both, is refused with all in which it differs."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import accelfn as af
from accelfn.testing import simulate


@attrs.frozen
class Kind:
    """A shape and a dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Net(nn.Module):
    """A layer, and behind it a parameter of some kind."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.odd = nn.Parameter(torch.ones(kind.shape, dtype=kind.dtype))


SETUPS = {
    "ddp": af.wrap_ddp(),
    "fsdp": af.wrap_fsdp(nn.Linear),
    "local_sgd": af.local_sgd(sync_every=2),
}
Pair = tuple[Kind, Kind]


def state_of(kind: Kind, world: af.World, setup: str) -> af.TrainState:
    """Return a state whose model has a parameter of a kind."""
    return af.TrainState.create(
        model=partial(Net, kind),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        setup=SETUPS[setup],
        world=world,
    )


def built(pair: Pair, world: af.World, setup: str, folder: str) -> None:
    """Build a state on ranks of which the last has the other kind."""
    del folder
    af.prepare_engine(state_of(pair[world.rank == world.size - 1], world, setup))


def loaded(pair: Pair, world: af.World, setup: str, folder: str) -> None:
    """Load a saved state into one of the other kind."""
    af.save(state_of(pair[0], world, setup), folder)
    af.load(state_of(pair[1], world, setup), folder)


def converted(pair: Pair, world: af.World, setup: str, folder: str) -> None:
    """Load parameters, converted, into a state of the other kind."""
    af.save(state_of(pair[0], world, setup), folder)
    af.load_part(state_of(pair[1], world, setup), folder, ["params"], cast=True)


def imported(pair: Pair, world: af.World, setup: str, folder: str) -> None:
    """Import a file into a model of the other kind, each rank its own."""
    del setup
    path = Path(f"{folder}-{world.rank}.safetensors")
    save_file(Net(pair[0]).state_dict(), path)
    af.import_model(Net(pair[1]), path, strict=False)


def given_params(pair: Pair, world: af.World, setup: str, folder: str) -> None:
    """Give a state parameters of the other kind."""
    del setup, folder
    state = state_of(pair[1], world, "ddp")
    odd = torch.ones(pair[0].shape, dtype=pair[0].dtype)
    state.with_params({**state.params, "odd": odd})


WAYS: dict[str, Callable[..., None]] = {
    "build": built,
    "load": loaded,
    "load_part": converted,
    "import_model": imported,
    "with_params": given_params,
}
CONVERTING = ("load_part", "import_model")
kinds = st.builds(
    Kind,
    shape=st.sampled_from([(4,), (6,), (2, 3), (3, 2), (2, 2, 2)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)


@given(
    pair=st.tuples(kinds, kinds),
    way=st.sampled_from(sorted(WAYS)),
    setup=st.sampled_from(sorted(SETUPS)),
)
def test_a_shape_and_a_dtype_are_both_told(pair: Pair, way: str, setup: str) -> None:
    """By whichever way they meet, on both ranks; a dtype alone where nothing converts it."""
    assume(pair[0] != pair[1])

    def rank(world: af.World, folder: str) -> str:
        try:
            WAYS[way](pair, world, setup, f"{folder}/saved")
        except af.errors.Error as error:
            return str(error)
        return ""

    with tempfile.TemporaryDirectory() as folder:
        told = simulate(2, lambda world: rank(world, folder)).results
    one, other = pair
    expects = one.shape != other.shape or way not in CONVERTING
    for said in told:
        assert bool(said) == expects
        if not expects:
            continue
        assert "odd" in said
        if one.shape != other.shape:
            assert {str(k.shape) for k in pair} <= words(said, pair)
        if one.dtype != other.dtype:
            assert {str(k.dtype) for k in pair} <= words(said, pair)


def words(said: str, pair: Pair) -> set[str]:
    """Return the shapes and dtypes of a pair that a text names."""
    known = {str(each) for kind in pair for each in (kind.shape, kind.dtype)}
    return {each for each in known if each in said}
