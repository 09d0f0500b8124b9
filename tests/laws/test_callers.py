# SPDX-License-Identifier: Apache-2.0
"""What one caller promises, all do: directories are written, and buffers evaluated, alike."""

import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import main

Files = dict[str, bytes]


class Own(nn.Linear):
    """A model that writes itself, in a folder of its own too."""

    def __init__(self) -> None:
        super().__init__(3, 2)

    def save_pretrained(
        self, directory: str, state_dict: Any = None, **_: object
    ) -> None:
        found = self.state_dict() if state_dict is None else state_dict
        folder = Path(directory, "weights")
        folder.mkdir()
        (Path(directory) / "config.json").write_text("{}")
        (folder / "model.bin").write_bytes(
            b"".join(each.numpy().tobytes() for each in found.values())
        )


def state_of(world: af.World) -> af.TrainState:
    return af.TrainState.create(
        model=Own,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5),
        setup=af.chain(af.shard_data(), af.wrap_ddp(), af.ema(0.5)),
        world=world,
    )


def by_store(state: af.TrainState, path: Path, *, async_: bool) -> None:
    with af.CheckpointStore(path.parent, async_=async_) as store:
        store.save(state)


@cache
def saved() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with a checkpoint."""
    folder = tempfile.TemporaryDirectory()
    af.save(state_of(af.World()), f"{folder.name}/saved")
    return folder


def by_command(state: af.TrainState, path: Path, *options: str) -> None:
    if not state.world.is_main:
        return
    words = ["checkpoint", "export", f"{saved().name}/saved", str(path), *options]
    with redirect_stderr(io.StringIO()) as told, redirect_stdout(io.StringIO()):
        code = main(words)
    if code:
        raise af.errors.CheckpointWriteError(told.getvalue())


WRITERS: dict[str, Callable[[af.TrainState, Path], object]] = {
    "save": af.save,
    "save, together": lambda state, path: af.save({"one": state, "two": state}, path),
    "a store": partial(by_store, async_=False),
    "export_model": partial(af.export_model, at="eval"),
    "export_model, in several files": partial(
        af.export_model, max_shard_size=16, at="eval"
    ),
    "save_pretrained": partial(af.save_pretrained, at="eval"),
    "accelfn checkpoint export": by_command,
    "accelfn checkpoint export --format dcp": lambda state, path: by_command(
        state, path, "--format", "dcp"
    ),
}
writers = pytest.mark.parametrize("writer", WRITERS)


@contextmanager
def folder() -> Iterator[Path]:
    """Lend the name of a directory to be."""
    with tempfile.TemporaryDirectory() as parent:
        yield Path(parent) / "step-00000000"


def written(size: int, writer: str, path: Path) -> None:
    """Write on so many ranks."""
    simulate(size, lambda world: WRITERS[writer](state_of(world), path))


def files_of(path: Path) -> Files:
    """Return what a directory has, but for when it was made."""
    found = (each for each in path.rglob("*") if each.is_file())
    return {str(each.relative_to(path)): each.read_bytes() for each in found}


@writers
@given(size=st.integers(1, 3))
def test_whatever_has_its_name_is_on_the_disk(writer: str, size: int) -> None:
    """When a directory gets its name, all in it, and it itself, was flushed; then its parent."""
    flushed: set[tuple[int, int]] = set()
    named: list[Path] = []
    fsync, rename = os.fsync, Path.rename

    def identity(found: os.stat_result) -> tuple[int, int]:
        return found.st_ino, found.st_size if found.st_mode & 0o100000 else 0

    def noting(handle: int) -> None:
        fsync(handle)
        flushed.add(identity(os.fstat(handle)))

    def checking(source: Path, target: Path) -> Path:
        if target == path:
            for each in [source, *source.rglob("*")]:
                assert identity(each.stat()) in flushed, each
            flushed.discard(identity(path.parent.stat()))
            named.append(target)
        return rename(source, target)

    with (
        folder() as path,
        mock.patch.object(os, "fsync", noting),
        mock.patch.object(Path, "rename", checking),
    ):
        written(size, writer, path)
        assert named == [path]
        assert identity(path.parent.stat()) in flushed


class KilledError(BaseException):
    """Ends a process between two of its acts."""


@pytest.mark.parametrize(
    "writer", sorted(WRITERS.keys() - {"a store"})
)  # it has a lock
@given(size=st.integers(1, 2), at=st.integers(0, 20))
@example(size=1, at=2)
@example(size=1, at=3)
@example(size=1, at=4)
def test_whatever_is_cut_off_is_there_whole_or_not(writer, size, at):
    """Cut off before any act on the disk, a directory has its name and all its files, or none.

    What is left does not keep the next one from being written.
    """
    left = [at]

    def dying(act: Any) -> Any:
        def acts(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                raise KilledError
            left[0] -= 1
            return act(*args, **kwargs)

        return acts

    with folder() as whole, folder() as path:
        written(size, writer, whole)
        expected = files_of(whole)
        with (
            mock.patch.object(os, "fsync", dying(os.fsync)),
            mock.patch.object(Path, "open", dying(Path.open)),
            mock.patch.object(Path, "rename", dying(Path.rename)),
            suppress(KilledError, af.errors.Error),
        ):
            written(size, writer, path)
        if not path.exists():
            written(size, writer, path)
        assert expected == files_of(path)


# Buffers that ranks have for themselves


class Norm(nn.Module):
    """Its statistics are what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.norm(batch)


def looked_at(world: af.World, means: list[float], n: int) -> tuple[float, Any]:
    """Return what evaluate and predict give with this rank's own statistics."""
    data = af.Data(torch.arange(2.0 * n).reshape(n, 2), global_batch_size=3)
    setup = af.chain(af.shard_data(), af.wrap_ddp() if world.size > 1 else None)
    state = af.TrainState.create(
        model=Norm, optimizer=partial(torch.optim.SGD, lr=0.1), setup=setup, world=world
    )
    buffers = {name: each.clone() for name, each in state.buffers.items()}
    buffers["norm.running_mean"].fill_(means[world.rank])
    state = attrs.evolve(state, buffers=buffers)
    loss = af.evaluate(state, data, lambda model, batch: model(batch).mean())
    rows = [each.tolist() for each in af.predict(state, data, lambda m, x: m(x))]
    assert torch.equal(
        state.buffers["norm.running_mean"], torch.full((2,), means[world.rank])
    )
    return loss["value"], rows


@given(
    means=st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=4),
    n=st.integers(1, 7),
)
def test_whatever_looks_at_buffers_sees_those_of_rank_0(means, n):
    """`evaluate` and `predict` are those of one process with rank 0's; each keeps its own."""
    mean, rows = looked_at(af.World.single(device="cpu"), means, n)
    for found, same in simulate(len(means), lambda world: looked_at(world, means, n)):
        assert pytest.approx(mean, rel=1e-5, abs=1e-6) == found
        assert rows == same
