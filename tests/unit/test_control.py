# SPDX-License-Identifier: Apache-2.0
"""Code on some ranks: where it runs, in which order, and what becomes of errors."""

from contextlib import nullcontext, suppress

import attrs
import pytest
import torch

import accelfn as af
from accelfn.errors import ArgumentError, PeerFailedError
from accelfn.testing import simulate
from tests.internals import naming
from tests.states import STEP, linear_state

SCHEDULES = [(), (1, 1, 1), (2, 1, 0, 1), (0, 0, 2)]


@pytest.mark.parametrize("rank", [0, 1, 2, -1, -3])
def test_on_one_rank(rank):
    """A function runs on the one rank, which may be counted from the last; others get None."""

    def fn(world):
        @af.on_rank(world, rank)
        def there(left, *, right):
            return world.rank, left, right

        assert there.__name__ == "there"
        return there(1, right=2)

    expected = [None] * 3
    expected[rank] = (rank % 3, 1, 2)
    assert simulate(3, fn).results == tuple(expected)


def machines(world, local_size):
    """Return the world as if each machine had so many ranks."""
    node_rank, local_rank = divmod(world.rank, local_size)
    return attrs.evolve(
        world,
        group=world.group,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank,
    )


RANKS = r"on_rank\(rank=.*0 to 2.*-1 \(the last\) to -3"


def test_wrong_ranks_and_functions_are_refused():
    """Where it is decorated, on all ranks, by its own name."""
    for rank in (-4, 3, "0", True, 1.0):
        with pytest.raises(ArgumentError, match=RANKS):
            simulate(3, lambda world, rank=rank: af.on_rank(world, rank))
    with pytest.raises(ArgumentError, match="a local rank from 0 to 1"):
        simulate(4, lambda w: af.on_rank(machines(w, 2), 2, local=True))
    for on in (af.on_rank, af.on_main):
        with pytest.raises(ArgumentError, match=r"\(5\): expected a function"):
            on(af.World.single())(5)


@pytest.mark.parametrize("local_size", [1, 2, 4])
def test_once_on_each_machine(local_size, capsys):
    """On the first, any or the last rank there; without `local`, once in the world."""

    def fn(world):
        world = machines(world, local_size)
        af.print_once(world, "here", local=True)
        af.print_once(world, "there")
        return [
            on(lambda: world.node_rank)()
            for on in (
                af.on_main(world, local=True),
                af.on_rank(world, local_size - 1, local=True),
                af.on_rank(world, -1, local=True),
                af.on_main(world),
                af.on_rank(world, -1),
            )
        ]

    found = zip(*simulate(4, fn), strict=True)
    ran = [[rank for rank, node in enumerate(row) if node is not None] for row in found]
    firsts = list(range(0, 4, local_size))
    lasts = list(range(local_size - 1, 4, local_size))
    assert ran == [firsts, lasts, lasts, [0], [3]]
    assert sorted(capsys.readouterr().out.split()) == [*["here"] * len(firsts), "there"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fails", [None, 2])
def test_the_first_of_each_machine_goes_first(schedule, fails):
    """No other rank enters before the first of each machine has left, though one fails."""
    done = []

    def fn(world):
        world = machines(world, 2)
        with suppress(OSError), af.main_first(world, local=True):
            assert world.local_rank == 0 or sorted(done[:2]) == [0, 2]
            done.append(world.rank)
            if world.rank == fails:
                raise OSError

    simulate(4, fn, schedule=schedule)
    assert sorted(done) == [0, 1, 2, 3]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("outer", "inner"), [(False, False), (True, False), (False, True)]
)
def test_main_goes_first_once(schedule, outer, inner):
    """A block within a block is refused on all ranks, and no rank is let in by the inner one."""
    done = []

    def fn(world):
        world = machines(world, 2)
        with af.main_first(world, local=outer):
            with (
                pytest.raises(ArgumentError, match="main_first"),
                af.main_first(world, local=inner),
            ):
                done.append("inside")
            done.append(world.rank)
        with af.main_first(world):
            done.append("after")

    simulate(4, fn, schedule=schedule)
    first = {0, 2} if outer else {0}
    assert set(done[: len(first)]) == first
    assert sorted(map(str, done)) == ["0", "1", "2", "3", *["after"] * 4]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("local", [False, True])
def test_a_block_that_failed_is_tried_again(schedule, local):
    """An error is raised where it was, on one rank or on all, and nobody waits in vain."""
    done = []

    def fn(world):
        for fails in ([0], [0, 1, 2], []):
            is_bad = world.rank in fails
            told = pytest.raises(ZeroDivisionError) if is_bad else nullcontext()
            with told, af.main_first(world, local=local):
                if is_bad:
                    raise ZeroDivisionError
                done.append(world.rank)

    simulate(3, fn, schedule=schedule)
    assert sorted(done) == [0, 1, 1, 2, 2]


def test_printing_in_order(capsys):
    """Rank 0 prints a line a rank, whoever comes first."""
    simulate(
        3, lambda w: af.print_in_order(w, "at", 10 * w.rank), schedule=(2, 1, 2, 0)
    )
    assert capsys.readouterr().out == "rank 0: at 0\nrank 1: at 10\nrank 2: at 20\n"


def test_slots_that_are_each_rank_s_own():
    """What PowerSGD leaves out of a gradient differs by rank, and is no disagreement."""

    def fn(world):
        power = af.compress_grads("powersgd", start_powerSGD_iter=2)
        setup = af.chain(af.shard_data(), af.wrap_ddp(), power)
        data = af.Data(torch.arange(96.0).reshape(16, 6).sin(), global_batch_size=4)
        state = linear_state(6, 6, world=world, setup=setup, data=data)
        for batch in af.batches(state, until_epoch=1):
            state, _ = STEP(state, batch)
        af.assert_replicas_agree(state)
        return repr(state.slots)

    first, second = simulate(2, fn)
    assert first != second


SIGNS = {
    "Timed out waiting 1000ms for recv operation to complete": "Timed out waiting 1000ms",
    "Application timeout caused pair closure": "Application timeout caused",
    "[../pair.cc:525] Connection closed by peer [127.0.0.1]:2222": "(Connection closed by",
    "[a/b/pair.cc:5] Connection closed by peer [::1]:2. This is typically. GLHF!": (
        "(Connection closed by peer [::1]:2)"
    ),
    "Read error: Connection reset by peer": "(Read error: Connection reset by peer)",
    "writev: Broken pipe": "(writev: Broken pipe)",
    "NCCL error: remote process exited": "(NCCL error: remote process exited)",
}


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize(("size", "other"), [(2, "rank 1"), (3, "another rank")])
def test_a_lost_rank_is_told(sign, size, other):
    """D: whatever the backend's words, and with them, but for its chatter, as the reason."""

    def wait(world):
        with naming("sum", world):
            raise RuntimeError(sign + "\nand more")

    says = (
        rf"Rank 0 of {size} waited in 'sum', but {other} failed, left or did not arrive"
    )
    with pytest.raises(PeerFailedError, match=says) as caught:
        simulate(size, wait)
    said = str(caught.value)
    assert SIGNS[sign] in said
    assert not any(word in said for word in ("pair.cc", "GLHF", "and more"))
    assert caught.value.__suppress_context__  # its traceback would say nothing more
    assert sign in str(caught.value.__context__)


def test_other_failures_stay_what_they_are():
    """An error that says nothing of a connection is not laid at another rank's door."""

    def fail(world):
        with naming("sum", world):
            raise RuntimeError("of another kind")

    with pytest.raises(RuntimeError, match="of another kind") as caught:
        simulate(2, fail)
    assert not isinstance(caught.value, PeerFailedError)


def test_blocks_lie_in_one_another():
    """What is done inside another thing is that one again afterwards, also when it failed."""

    def run(world):
        connection = world.connection
        seen = [connection.activity.label]
        with naming("outer", world):
            with naming("inner", world):
                seen.append(connection.activity.label)
            seen.append(connection.activity.label)
            with pytest.raises(KeyError), naming("failing", world):
                raise KeyError
            seen.append(connection.activity.label)
        return [*seen, connection.activity.label]

    for seen in simulate(2, run):
        assert seen == [None, "inner", "outer", "outer", None]
