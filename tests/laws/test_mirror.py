# SPDX-License-Identifier: Apache-2.0
"""Copies of checkpoints in an object store, cut off at any request."""

import contextlib
from functools import partial
from pathlib import Path
from unittest import mock

import attrs
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.disks import lent

URL = "memory://run"
REQUESTS = (
    *("exists", "find", "get_file", "ls", "makedirs"),
    *("put_file", "rm", "rm_file"),
)


@attrs.define
class Requests:
    """Counts the requests to the object store; those from `first_failing` to `last` fail."""

    first_failing: int
    last: int
    made: int = 0
    patches: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)

    def __call__(self, request):
        def make(filesystem, *args, **kwargs):
            self.made += 1
            if self.first_failing <= self.made <= self.last:
                if request is MemoryFileSystem.put_file:  # half of the file is there
                    path = filesystem._strip_protocol(args[1])
                    filesystem.pipe_file(path, Path(args[0]).read_bytes()[:10])
                raise OSError(5, "the connection was cut")
            return request(filesystem, *args, **kwargs)

        return make

    def __enter__(self):
        for name in REQUESTS:
            wrapped = self(getattr(MemoryFileSystem, name))
            self.patches.enter_context(
                mock.patch.object(MemoryFileSystem, name, wrapped)
            )
        return self

    def __exit__(self, *_):
        self.patches.close()


def create(world, seed=0):
    return af.TrainState.create(
        model=lambda: torch.nn.Linear(3, 2),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        setup=af.wrap_fsdp(),
        seed=seed,
        world=world,
    )


def saved(world, folder, keep, saves):
    """Train and save; return the parameters of each step, and the last step whose save ended."""
    state, step = create(world), af.make_step(lambda model, x: model(x).square().mean())
    params, confirmed = {}, 0
    with af.CheckpointStore(folder, keep=keep, async_=False, mirror=URL) as store:
        for _ in range(saves):
            state, _ = step(state, torch.full((2, 3), world.rank + 1.0))
            params[state.step] = af.full_params(state)
            with contextlib.suppress(af.errors.CheckpointWriteError):
                store.save(state)
                confirmed = state.step
    return params, confirmed


def restored(world, folder, step=None):
    with af.CheckpointStore(folder, async_=False, mirror=URL) as store:
        state = store.restore(create(world, seed=1), step=step)
    return state.step, af.full_params(state)


def whole_steps():
    """Return the steps with a manifest at the URL; all their files are there as well."""
    found = MemoryFileSystem.store
    names = [name for name in found if name.endswith("/manifest.json")]
    return {int(name.split("/")[-2].removeprefix("step-")) for name in names}


@given(
    keep=st.integers(1, 2),
    saves=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    first_failing=st.integers(1, 60),
    num_failing=st.sampled_from([1, 3, 1000]),
)
@example(keep=1, saves=3, sizes=(1, 2), first_failing=10, num_failing=1000)
@example(keep=2, saves=4, sizes=(2, 1), first_failing=20, num_failing=1)
def test_what_is_cut_off_leaves_whole_checkpoints(
    keep, saves, sizes, first_failing, num_failing
):
    """B7: a step with a manifest is whole; the newest is confirmed or newer; ranks may differ."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    size, other_size = sizes
    with lent() as root:
        with Requests(first_failing, first_failing + num_failing - 1):
            run = simulate(size, lambda world: saved(world, root / "one", keep, saves))
        params, confirmed = run[0]
        steps = whole_steps()
        assert len(steps) <= keep + 1 + (num_failing > 1) * saves
        assert max(steps, default=0) >= confirmed
        for number, step in enumerate([None, *sorted(steps)] if steps else []):
            folder = root / f"other-{number}"
            again = simulate(other_size, partial(restored, folder=folder, step=step))
            for at, values in again:
                assert at == (max(steps) if step is None else step)
                assert all(torch.equal(values[n], p) for n, p in params[at].items())


def test_a_failed_copy_is_made_up_for_by_the_next():
    """B7: the save raises an error, and the next one copies both checkpoints."""
    MemoryFileSystem.store.clear()
    state = create(af.World())
    step = af.make_step(lambda model, x: model(x).square().mean())
    with lent() as root, af.CheckpointStore(root, async_=False, mirror=URL) as store:
        state, _ = step(state, torch.ones(2, 3))
        with Requests(5, 1000), pytest.raises(af.errors.CheckpointWriteError) as caught:
            store.save(state)
        assert "the connection was cut" in str(caught.value)
        assert store.steps == (1,)
        assert whole_steps() == set()
        state, _ = step(state, torch.ones(2, 3))
        store.save(state)
        assert whole_steps() == {1, 2}


@pytest.mark.parametrize("num_updates", [1, 2])
def test_another_run_at_the_url_is_not_mixed_with_this_one(num_updates):
    """The first save raises an error, if the URL has another checkpoint or a newer one."""
    MemoryFileSystem.store.clear()
    step = af.make_step(lambda model, x: model(x).square().mean())
    for seed, number in ((0, 2), (1, num_updates)):
        state, expected = create(af.World(), seed), contextlib.nullcontext()
        if seed == 1:
            expected = pytest.raises(
                af.errors.CheckpointWriteError, match="another run's"
            )
        with (
            lent() as root,
            af.CheckpointStore(root, async_=False, mirror=URL) as store,
        ):
            for _ in range(number):
                state, _ = step(state, torch.ones(2, 3))
            with expected:
                store.save(state)


def test_an_impossible_url_is_rejected():
    """The error shows what was passed."""
    call = r"CheckpointStore\(mirror="
    with lent() as root:
        with pytest.raises(af.errors.ArgumentError, match=call):
            af.CheckpointStore(root, mirror="no-such-protocol://run")
        with pytest.raises(af.errors.ArgumentError, match=call):
            af.CheckpointStore(root, mirror=3)
