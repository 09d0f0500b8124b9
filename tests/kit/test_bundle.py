# SPDX-License-Identifier: Apache-2.0
"""Crash bundles: a step that raised is run again as it was."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import accelfn as af
from accelfn.errors import ArgumentError, CheckpointError, SimulationError
from accelfn.testing import crash_bundles, replay, simulate
from tests.states import linear_state

SETUP = af.chain(
    af.shard_data(), af.wrap_ddp(), af.accumulate(num_micro_batches=2), af.ema(0.5)
)


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found = model(batch)
    if (batch == 7).any() and model.weight.std() > 0:
        msg = f"met a seven among {batch.flatten().tolist()}"
        raise FloatingPointError(msg)
    return found.square().mean()


MADE: list[int] = []
"""On how many ranks each state was made."""


def make(world: af.World) -> Any:
    MADE.append(world.size)
    data = torch.arange(10.0).view(10, 1)
    state = linear_state(
        1,
        2,
        optimizer=partial(torch.optim.Adam, lr=0.1),
        data=af.Data(data, global_batch_size=4),
        setup=SETUP,
        world=world,
    )
    return state, af.make_step(loss)


def train(world: af.World, folder: Path) -> None:
    state, step = make(world)
    step = crash_bundles(step, folder, make=make)
    for batch in af.batches(state, until_epoch=1):
        state, _ = step(state, batch)


def failed(size: int, folder: Path) -> BaseException:
    """Return what a run raised that left its bundles in a folder."""
    with pytest.raises(FloatingPointError) as caught:
        simulate(size, partial(train, folder=folder))
    return caught.value


def bundle_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "rank-00000.json").read_text())


def changed(folder: Path, **fields: Any) -> None:
    """Write other fields into the bundle of a run of one rank, which is made anew."""
    failed(1, folder)
    bundle = json.dumps({**bundle_of(folder), **fields})
    (folder / "rank-00000.json").write_text(bundle)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_bundle_raises_what_the_run_raised(size, tmp_path):
    """States are saved as they were before the step."""
    first = failed(size, tmp_path)
    with pytest.raises(FloatingPointError) as again:
        replay(tmp_path)
    assert str(first).splitlines()[0] == str(again.value).splitlines()[0]
    bundle = bundle_of(tmp_path)
    assert bundle["size"] == size
    assert bundle["setup"] == [repr(SETUP)]
    (fields,) = bundle["states"]
    assert fields["dict"]["step"] == 1
    assert fields["dict"]["cursor"] == {"list": [0, 4, None]}
    assert ("backward at update 0" in str(bundle["latest"])) == (size > 1)


def test_a_step_that_does_not_raise_leaves_nothing(tmp_path):
    state, step = make(af.World.single(device="cpu"))
    step = crash_bundles(step, tmp_path / "none", make=make)
    step(state, next(iter(af.batches(state))))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("size", [1, 2])
def test_an_older_run_on_more_ranks_is_not_replayed(size, tmp_path):
    """Though what its further ranks left is there still."""
    for each in (4, size):
        failed(each, tmp_path)
    MADE.clear()
    with pytest.raises(FloatingPointError):
        replay(tmp_path)
    assert [size] * size == MADE


def test_an_older_bundle_is_not_that_of_a_rank_that_left_none(tmp_path):
    """Where a rank was killed, what it had left in a run on fewer ranks is there still."""
    kept = ""
    for size in (2, 4):
        failed(size, tmp_path)
        kept = kept or (tmp_path / "rank-00001.json").read_text()
    (tmp_path / "rank-00001.json").write_text(kept)
    with pytest.raises((CheckpointError, FloatingPointError)) as caught:
        replay(tmp_path)
    assert "the bundle of rank 1 is missing (of 4 ranks)" in str(caught.value)


def test_a_missing_rank_is_named(tmp_path):
    failed(2, tmp_path)
    (tmp_path / "rank-00001.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"bundle of rank 1 is missing \(of 2 ranks\)"
    ):
        replay(tmp_path)
    with pytest.raises(CheckpointError, match="contains no crash bundle"):
        replay(tmp_path / "elsewhere")


def test_a_run_that_does_not_raise_again_says_so(tmp_path):
    changed(tmp_path, make={"module": __name__, "name": "make_calm"})
    with pytest.raises(SimulationError, match="this time the step raised no error"):
        replay(tmp_path)


@pytest.mark.slow
def test_a_bundle_is_replayed_beside_its_script(tmp_path):
    """The command finds modules of the directory in which it is called, as the script did."""
    changed(tmp_path, make={"module": "mine", "name": "make"})
    (tmp_path / "mine.py").write_text(
        "def make(world):\n    raise OSError('it is mine')\n"
    )
    command = [Path(sys.executable).with_name("accelfn"), "replay", str(tmp_path)]
    bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=bare, capture_output=True, text=True
    )
    assert "OSError: it is mine" in done.stderr
    assert done.returncode == 1


def make_calm(world: af.World) -> Any:
    return make(world)[0], lambda state, _: (state, {})


def make_scaled(world: af.World) -> Any:
    """Return a state, and a step whose loss takes a factor that may not be 0."""

    def scaled(model: torch.nn.Module, batch: torch.Tensor, factor: float) -> Any:
        if factor == 0:
            msg = "no factor"
            raise ZeroDivisionError(msg)
        return model(batch).square().mean() / factor

    state, _ = make(world)
    return state, af.make_step(scaled)


def test_what_a_step_was_given_beside_its_batch_is_given_again(tmp_path):
    """The replay's step gets the extras, and raises what they made the first raise."""

    def run(world: af.World) -> None:
        state, step = make_scaled(world)
        careful = crash_bundles(step, tmp_path, make=make_scaled)
        batch = next(iter(af.batches(state)))
        careful(state, batch, 0.0)

    with pytest.raises(ZeroDivisionError, match="no factor"):
        simulate(2, run)
    with pytest.raises((ZeroDivisionError, TypeError)) as again:
        replay(tmp_path)
    assert "no factor" in str(again.value)


def make_telling(world: af.World) -> Any:
    """Return a state, and a step that raises all that it was given."""

    def telling(state: af.TrainState, batch: Any, *extras: Any) -> Any:
        batch = attrs.asdict(batch, recurse=False)
        batch["parts_indices"] = [each.tolist() for each in batch["parts_indices"]]
        batch["parts_filler"] = [np.asarray(f).tolist() for f in batch["parts_filler"]]
        batch["shares"] = [*map(list, batch["shares"]())]
        msg = f"{state.step} {state.cursor} {batch} {extras}"
        raise LookupError(msg)

    return make(world)[0], telling


@pytest.mark.parametrize("is_of_a_stream", [False, True])
def test_a_batch_is_given_again_in_all_its_parts(is_of_a_stream, tmp_path):
    """Values, weights, indices, filler, and where the data stood, which streams do not tell."""

    def run(world: af.World) -> None:
        state, step = make_telling(world)
        *_, batch = af.batches(state, until_epoch=1)
        if is_of_a_stream:
            batch = attrs.evolve(batch, start=None, cursor=None)
        crash_bundles(step, tmp_path, make=make_telling)(state, batch, "an extra", None)

    with pytest.raises(LookupError) as first:
        simulate(2, run)
    with pytest.raises(LookupError) as again:
        replay(tmp_path)
    assert str(again.value) == str(first.value)
    assert ("Cursor" in str(first.value).partition("{")[2]) == (not is_of_a_stream)


@pytest.mark.parametrize("number", [0, 2, "1", None])
def test_another_format_is_not_read(number, tmp_path):
    """A bundle of another version is named, with what it is of and what is read."""
    changed(tmp_path, format=number)
    told = rf"rank-00000.json has the format {number!r}, but this version of accelfn reads only 1"
    with pytest.raises(CheckpointError, match=told):
        replay(tmp_path)


def test_a_bundle_without_states_shows_what_was_raised(tmp_path):
    """A step that raised in the middle of an update cannot run again, and its trace is there."""
    changed(tmp_path, states=None)
    with pytest.raises(CheckpointError, match="in the middle of an update") as told:
        replay(tmp_path)
    assert "Traceback (most recent call last)" in str(told.value)
    assert "FloatingPointError: met a seven" in str(told.value)


@pytest.mark.parametrize("module", ["__main__", "a_script_of_no_path"])
def test_what_a_script_defined_is_found_by_its_file(module, tmp_path):
    """Its part that runs by itself does not run; a file that is no Python is named."""
    script = tmp_path / "train.py"
    script.write_text(
        "def begin(world):\n    raise OSError('it is the script of this run')\n"
        "if __name__ == '__main__':\n    raise SystemExit('it was run')\n"
    )
    source = {"module": module, "name": "begin", "file": str(script)}
    changed(tmp_path, make=source)
    with pytest.raises(OSError, match="it is the script of this run"):
        replay(tmp_path)
    changed(tmp_path, make={**source, "file": str(tmp_path / "train.txt")})
    with pytest.raises(CheckpointError, match=r"Python cannot import .*train\.txt"):
        replay(tmp_path)


def test_a_function_without_a_name_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="top level"):
        crash_bundles(lambda *_: ((), ()), tmp_path, make=partial(make))


def test_what_cannot_be_saved_does_not_hide_the_error(tmp_path):
    state, _ = make(af.World.single(device="cpu"))

    def step(_: Any, batch: Any) -> Any:
        raise KeyError(batch)

    with pytest.raises(KeyError) as caught:
        crash_bundles(step, tmp_path, make=make)(state, object())
    assert "No crash bundle was written" in caught.value.__notes__[0]


@pytest.mark.parametrize("given", [0, 1])
def test_states_of_which_one_is_over_are_not_saved(given, tmp_path):
    """The bundle tells all but the states, be it the first or the last that was given away."""

    def step(states: Any, batch: Any) -> Any:
        af.make_step(loss)(states[given], af.micro_batches(batch, 2))
        raise KeyError

    states = tuple(make(af.World.single(device="cpu"))[0] for _ in range(2))
    with pytest.raises(KeyError) as caught:
        crash_bundles(step, tmp_path, make=make)(states, torch.ones(4, 1))
    assert "The arguments of the step are in" in caught.value.__notes__[0]
    bundle = bundle_of(tmp_path)
    assert bundle["states"] is None
    assert len(bundle["setup"]) == 2
