# SPDX-License-Identifier: Apache-2.0
"""Ranks that have parts of one model load a checkpoint all, or none of them does."""

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from tests.internals import SAVED_FIELDS as FIELDS
from tests.laws.split_models import Run, runs
from tests.laws.test_layouts import LAYOUTS, layouts, stepped

DAMAGES = ["a byte", "a file", "the manifest", "nothing"]


def damaged(copy: Path, what: str) -> None:
    """Let a rank's files be others than were saved."""
    if what == "the manifest":
        (copy / "manifest.json").unlink()
    for file in copy.glob("*.safetensors"):
        if what == "a file":
            file.unlink()
        elif what == "a byte":
            file.write_bytes(file.read_bytes()[:-1] + b"\x7e")


@example(
    run=Run(4, 4, "mean", "adamw", in_list=True, micro=1),
    one=LAYOUTS[0],
    other=LAYOUTS[2],
    frozen="hash",
    what="a byte",
    in_part=False,
    place=1,
)
@given(
    run=runs(),
    one=layouts,
    other=layouts,
    frozen=st.sampled_from(["write", "hash"]),
    what=st.sampled_from(DAMAGES),
    in_part=st.booleans(),
    place=st.integers(0, 3),
)
def test_a_file_that_one_rank_cannot_read_is_told_to_all(
    run, one, other, frozen, what, in_part, place
):
    """If the model is split all ranks raise the same error, else the rank alone; none waits."""
    bad = place % other.size
    load: Any = partial(af.load_part, only=FIELDS) if in_part else af.load
    with tempfile.TemporaryDirectory() as folder:
        saved, copies = Path(folder) / "saved", Path(folder) / "copy"

        def save(world: af.World) -> None:
            state = stepped(run, run.state(world, one.engine), 1)
            af.save(state, saved, frozen=frozen)

        def told(world: af.World) -> af.errors.Error | None:
            state, error = run.state(world, other.engine), None
            try:
                load(state, copies / str(world.rank))
            except af.errors.CheckpointError as raised:
                error = raised
            af.barrier(world, label="what comes next")
            return error

        one.on_ranks(save)
        for rank in range(other.size):
            shutil.copytree(saved, copies / str(rank))
        damaged(copies / str(bad), what)
        found = other.on_ranks(told)
        failed = [error for error in found if error is not None]
        expected = 0 if what == "nothing" else other.size if other.splits else 1
        assert expected == len(failed)
        assert what == "nothing" or found[bad] is not None
        assert len({type(error) for error in failed}) <= 1
        assert all(str(copies / str(bad)) in str(error) for error in failed)
