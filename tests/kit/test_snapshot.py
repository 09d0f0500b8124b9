# SPDX-License-Identifier: Apache-2.0
"""`assert_collectives`: one text for one program, and no change of what is sent escapes it."""

from collections.abc import Callable

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.errors import LawError
from accelfn.testing import Entry, Run, assert_collectives, simulate
from tests import strategies
from tests.strategies import runs

DDP = af.chain(af.shard_data(), af.wrap_ddp())
LOCAL = af.chain(af.shard_data(), af.local_sgd(sync_every=2))
schedules = st.lists(st.integers(0, 3), max_size=20)


def text_of(run: Run, folder) -> str:
    """Return what a run's file says."""
    path = folder / "collectives.txt"
    assert_collectives(run, path, update=True)
    assert_collectives(run, path)
    return path.read_text()


def refused(run: Run, path) -> str:
    with pytest.raises(LawError) as caught:
        assert_collectives(run, path)
    return str(caught.value)


def training(run: strategies.Run, *, mean_every: int = 2) -> Callable[[af.World], None]:
    """Return a program that trains, and now and then reduces its metrics."""

    def train(world: af.World) -> None:
        state = run.state(world)
        for update in range(run.updates):
            state, metrics = run.train(state, 1)
            if update % mean_every == mean_every - 1:
                metrics[0].all_reduce_mean(world)
        af.finalize(state)

    return train


def logged(*entries: Entry) -> Run:
    return Run((None, None), entries)


def entry(**fields: object) -> Entry:
    usual: dict[str, object] = {
        "kind": "all_reduce",
        "label": "grads",
        "step": 0,
        "num_bytes": 8,
        "shapes": "(1,) float64",
        "op": "SUM",
        "root": None,
        "ranks": (0, 1),
        "site": "train.py:1",
    }
    return Entry(**{**usual, **fields})


@given(
    run=runs(n=4, batch_size=4, updates=3),
    setup=st.sampled_from([DDP, LOCAL]),
    size=st.sampled_from([1, 2, 3]),
    schedule=schedules,
)
def test_one_program_has_one_text(tmp_path_factory, run, setup, size, schedule):
    """Whatever the order of turns: the file of one run fits all others."""
    path = tmp_path_factory.mktemp("run") / "collectives.txt"
    program = training(attrs.evolve(run, setup=setup))
    assert_collectives(simulate(size, program), path, update=True)
    assert_collectives(simulate(size, program, schedule=schedule, seed=1), path)


def sends(world: af.World) -> None:
    """Send from ranks 1 and 2 to rank 0, which takes whichever comes first."""
    value = torch.ones(world.rank + 1)
    if world.rank:
        dist.send(value, group_dst=0, group=world.group)
    else:
        awaited = [
            dist.irecv(torch.zeros(peer + 1), group_src=peer, group=world.group)
            for peer in (1, 2)
        ]
        for each in awaited:
            each.wait()
    af.barrier(world)


@given(schedule=schedules)
def test_sends_are_listed_in_order_of_ranks(tmp_path_factory, schedule):
    """After the collectives, for their order in time is the schedule's."""
    run = simulate(3, sends, schedule=schedule)
    assert text_of(run, tmp_path_factory.mktemp("run")) == (
        "3 ranks\n"
        "\n"
        "before any update: 3 calls, 24 bytes\n"
        "  all_reduce SUM, 4 bytes, 'barrier'\n"
        "  send between ranks 0 and 1, 8 bytes, no label\n"
        "  send between ranks 0 and 2, 12 bytes, no label\n"
    )


def test_equal_updates_are_listed_once(tmp_path):
    """Ranges of updates, and periods; equal calls in a row are counted."""
    run = strategies.Run(setup=DDP, updates=6)
    assert text_of(simulate(2, training(run, mean_every=3)), tmp_path) == (
        "2 ranks\n"
        "\n"
        "before any update: 6 calls, 220 bytes\n"
        "  all_reduce SUM, 48 bytes, 'compare definitions'\n"
        "  all_reduce SUM, 48 bytes, 'compare data'\n"
        "  all_reduce SUM, 48 bytes, 'compare replicas', 2 times\n"
        "  broadcast root 0, 24 bytes, 'build DistributedDataParallel'\n"
        "  broadcast root 0, 4 bytes, 'build DistributedDataParallel'\n"
        "\n"
        "each of updates 0, 1, 3, 4: 1 call, 168 bytes\n"
        "  all_reduce SUM, 168 bytes, 'DistributedDataParallel backward'\n"
        "\n"
        "each of updates 2, 5: 2 calls, 296 bytes\n"
        "  all_reduce SUM, 168 bytes, 'DistributedDataParallel backward'\n"
        "  all_reduce SUM, 128 bytes, 'mean of metrics'\n"
    )


@pytest.mark.parametrize(
    ("updates", "title"),
    [
        ([0], "update 0"),
        ([0, 1], "each of updates 0, 1"),
        ([0, 1, 2, 5, 7, 8], "each of updates 0 to 2, 5, 7, 8"),
        ([7, 15, 23, 31], "each of updates 7 to 31 by 8"),
        ([7, 15], "each of updates 7, 15"),
    ],
)
def test_updates_are_listed_as_ranges(tmp_path, updates, title):
    """Shortly, for there may be many."""
    run = logged(*(entry(step=update, site=f"x.py:{update}") for update in updates))
    assert text_of(run, tmp_path) == (
        f"2 ranks\n\n{title}: 1 call, 8 bytes\n  all_reduce SUM, 8 bytes, 'grads'\n"
    )


def test_equal_calls_in_a_row_are_one_line(tmp_path):
    """With their number."""
    run = logged(*[entry(num_bytes=1)] * 3, entry(label=None, op=None))
    assert text_of(run, tmp_path) == (
        "2 ranks\n\nupdate 0: 4 calls, 11 bytes\n"
        "  all_reduce SUM, 1 byte, 'grads', 3 times\n"
        "  all_reduce, 8 bytes, no label\n"
    )


def test_a_run_without_collectives_has_a_text(tmp_path):
    """So that one that comes to call some is found."""
    run = simulate(1, lambda world: world.rank)
    assert text_of(run, tmp_path) == "1 rank\n"
    refused(simulate(2, lambda world: world.rank), tmp_path / "collectives.txt")


entries = st.builds(
    entry,
    kind=st.sampled_from(["all_reduce", "broadcast", "send"]),
    label=st.sampled_from(["grads", "local_sgd", None]),
    step=st.sampled_from([None, 0, 1, 2]),
    num_bytes=st.integers(0, 3),
    op=st.sampled_from(["SUM", "MAX", None]),
    root=st.sampled_from([0, 1, None]),
)


@given(log=st.lists(entries, max_size=6), one=entries, at=st.integers(0, 6))
def test_one_more_collective_is_found(tmp_path_factory, log, one, at):
    """Anywhere; and as one less, seen from the other side."""
    folder = tmp_path_factory.mktemp("run")
    more = logged(*log[:at], one, *log[at:])
    text_of(logged(*log), folder)
    refused(more, folder / "collectives.txt")
    text_of(more, folder)
    refused(logged(*log), folder / "collectives.txt")


CHANGES = {"kind": "gather", "label": "x", "num_bytes": 99, "op": "MIN", "root": 7}


@given(
    log=st.lists(
        entries.filter(lambda each: each.kind != "send"), min_size=1, max_size=4
    ),
    data=st.data(),
)
def test_another_collective_is_found(tmp_path_factory, log, data):
    """Another kind, label, size, reduction, root or update; lines of code do not count."""
    folder = tmp_path_factory.mktemp("run")
    at = data.draw(st.integers(0, len(log) - 1))
    text_of(logged(*log), folder)
    moved = [attrs.evolve(each, site="train.py:2", shapes="") for each in log]
    assert_collectives(logged(*moved), folder / "collectives.txt")
    changed = list(log)
    name = data.draw(st.sampled_from([*CHANGES, "step"]))
    changed[at] = attrs.evolve(log[at], **{name: CHANGES.get(name, 9)})
    refused(logged(*changed), folder / "collectives.txt")


def test_the_order_of_collectives_counts(tmp_path):
    """Within an update."""
    one, two = entry(), entry(kind="broadcast", root=0)
    text_of(logged(one, two), tmp_path)
    refused(logged(two, one), tmp_path / "collectives.txt")


def test_a_refusal_is_a_diff(tmp_path):
    """Of the text that is expected and the text that was found."""
    path = tmp_path / "collectives.txt"
    text_of(logged(entry()), tmp_path)
    assert refused(logged(entry(num_bytes=16)), path).splitlines() == [
        (
            f"The collectives of the run differ from those in {path}. If the change is intended,"
            " call assert_collectives(run, path, update=True) once."
        ),
        "--- expected",
        "+++ found",
        "@@ -1,4 +1,4 @@",
        " 2 ranks",
        " ",
        "-update 0: 1 call, 8 bytes",
        "-  all_reduce SUM, 8 bytes, 'grads'",
        "+update 0: 1 call, 16 bytes",
        "+  all_reduce SUM, 16 bytes, 'grads'",
    ]


def test_a_missing_file_is_not_written_by_itself(tmp_path):
    """A test that writes what it compares with cannot fail."""
    path = tmp_path / "collectives.txt"
    said = refused(logged(entry()), path)
    assert f"{path} does not exist." in said
    assert "update=True" in said
    assert said.endswith("\n  all_reduce SUM, 8 bytes, 'grads'\n")
    assert not path.exists()


def test_line_endings_do_not_count(tmp_path):
    """A checkout may have its own."""
    path = tmp_path / "collectives.txt"
    text = text_of(logged(entry()), tmp_path)
    path.write_bytes(text.replace("\n", "\r\n").encode())
    assert_collectives(logged(entry()), path)


def test_what_is_no_run_is_refused(tmp_path):
    """Its log alone, say."""
    with pytest.raises(af.errors.ArgumentError, match="expected the Run"):
        assert_collectives([entry()], tmp_path / "collectives.txt")
