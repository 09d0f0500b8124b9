# SPDX-License-Identifier: Apache-2.0
"""What Gloo does on wrong programs, and what a simulated world says of them.

The table of `docs/simulation-and-gloo.md` says what is expected; `PROGRAMS` has the programs. A
torch that does otherwise fails here.
"""

import multiprocessing
import os
import re
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

import accelfn as af
from accelfn.testing import Crash, simulate
from tests.internals import Connection as WorldConnection
from tests.internals import RankProcess, open_groups, sum_
from tests.processes import ranks_alone
from tests.waiting import HANGS

pytestmark = pytest.mark.ranks(4)

PAGE = Path(__file__).parents[2] / "docs/simulation-and-gloo.md"
ROWS = [
    line[2:-2].split(" | ")
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and "---" not in line
][1:]
SECONDS = 2.0
"""The timeout of a collective."""
LATE_SECONDS = 0.3
"""How much later one rank is where the other must be seen not to wait for it."""
F32, F64, I16, I64 = torch.float32, torch.float64, torch.int16, torch.int64
NAN = float("nan")

# The programs. Each gets a world, a number that differs by rank, which it may reduce in place, and
# the options of a collective. It returns None for that number.

Program = Callable[[af.World, torch.Tensor, dict[str, Any]], Any]


def numbers(*values: float, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def is_simulated() -> bool:
    return multiprocessing.parent_process() is None


def skips_one_of_two(world, x, g):
    y = 10 * x
    if world.rank == 0:
        dist.all_reduce(x, **g)
    dist.all_reduce(y, **g)
    return [x, y]


def swaps(world, x, g):
    y = 10 * x
    for each in (x, y) if world.rank == 0 else (y, x):
        dist.all_reduce(each, **g)
    return [x, y]


def swaps_labelled(world, x, _):
    y = 10 * x
    calls = [(x, "losses"), (y, "counts")]
    for each, label in calls if world.rank == 0 else reversed(calls):
        sum_(each, world, label=label)
    return [x, y]


def takes_axes_in_another_order(world, x, _):
    axes = ["dp_shard", "dp_replicate"]
    for axis in axes if world.rank != 3 else reversed(axes):
        dist.all_reduce(x, group=world.along(axis).group)


def meet(world, x, g, *, other):
    """Call `all_reduce` on rank 0, and another collective on rank 1."""
    calls = {
        "broadcast": lambda: dist.broadcast(x, src=0, **g),
        "all_gather": lambda: dist.all_gather([x.clone(), x.clone()], x, **g),
        "barrier": lambda: dist.barrier(**g),
    }
    calls[other]() if world.rank else dist.all_reduce(x, **g)


def differ(world, _, g, *, name, lengths=(2, 2), dtypes=(F64, F64)):
    """Call one collective on tensors whose lengths and dtypes differ by rank."""
    x = torch.full((lengths[world.rank],), world.rank + 1, dtype=dtypes[world.rank])
    is_root = world.rank == 0
    each = [torch.zeros_like(x) for _ in range(2)]
    match name:
        case "all_reduce":
            dist.all_reduce(x, **g)
        case "broadcast" | "reduce":
            getattr(dist, name)(x, 0, **g)
        case "gather":
            dist.gather(x, each if is_root else None, dst=0, **g)
            return each if is_root else [None]
        case "all_gather":
            dist.all_gather(each, x, **g)
            return each
        case "scatter":
            dist.scatter(x, [x, x + 1] if is_root else None, src=0, **g)
        case "reduce_scatter":
            dist.reduce_scatter(each[0], [x, x], **g)
            return each[0]
        case "send":
            (dist.send if is_root else dist.recv)(x, 1 - world.rank, **g)
    return x


def transposed(world, _, g, *, call, on=(0,)):
    """Call a collective on a 3 by 2 tensor, which is stored by columns on some ranks."""
    x = torch.arange(6, dtype=F64).view(3, 2)
    x = x.t().contiguous().t() if world.rank in on else x
    call(world, x, g)
    return x


def reduces(_, x, g):
    dist.all_reduce(x, **g)


def sends(world, x, g):
    (dist.recv if world.rank else dist.send)(x, 1 - world.rank, **g)


def reduces_some(_, __, g, *, make):
    x = make()
    dist.all_reduce(x, **g)
    return x


def raises(world, x, g):
    if world.rank == 1:
        raise KeyError("boom")
    dist.all_reduce(x, **g)


def ends(world, x, g):
    if world.rank == 1 and not is_simulated():  # there a planned fault does so
        os._exit(7)
    dist.all_reduce(x, **g)


def reads_before_waiting(world, x, g):
    if world.rank == 1 and not is_simulated():
        time.sleep(LATE_SECONDS)
    work = dist.all_reduce(x, async_op=True, **g)
    read = x.clone() if world.rank == 0 else x
    work.wait()
    return read


def never_waits(_, x, g):
    dist.all_reduce(x, async_op=True, **g)
    if not is_simulated():
        time.sleep(LATE_SECONDS)


def splits(world, _, g, *, of):
    """Give rows in splits that differ by rank, and take [2, 2]."""
    got = torch.zeros(4)
    dist.all_to_all_single(got, torch.arange(4.0), [2, 2], of[world.rank], **g)
    return got


def uneven_all_to_all(world, _, g):
    given = [numbers(4), numbers(5)] if world.rank else [numbers(1), numbers(2, 3)]
    got = [numbers(0), numbers(0)]
    dist.all_to_all(got, given, **g)
    return got


def both_send_first(world, x, g):
    dist.send(x, 1 - world.rank, **g)
    dist.recv(x, 1 - world.rank, **g)


def reduce_as(world, _, g, *, op, values, dtype):
    """Reduce in a way that may mean nothing."""
    x = torch.tensor([values[world.rank]], dtype=dtype)
    dist.all_reduce(x, op=getattr(dist.ReduceOp, op), **g)
    return x


def different_reductions(world, _, g):
    x = numbers(world.rank + 2, 5)
    dist.all_reduce(x, op=dist.ReduceOp.MAX if world.rank else dist.ReduceOp.SUM, **g)
    return x


def gathers_into(_, x, g, *, count, dtype):
    got = [numbers(0, dtype=dtype) for _ in range(count)]
    dist.all_gather(got, x, **g)
    return got[0]


def in_rows(world, x, _, *, axis_of_3):
    """Reduce along `dp_shard`; rank 3 does so along another axis, or not."""
    axis = axis_of_3 if world.rank == 3 else "dp_shard"
    if axis:
        dist.all_reduce(x, group=world.along(axis).group)


PROGRAMS: list[Program] = [  # in the order of the page's rows
    lambda w, x, g: None if w.rank else dist.all_reduce(x, **g),
    skips_one_of_two,
    swaps,
    swaps_labelled,
    *(partial(meet, other=name) for name in ("broadcast", "all_gather", "barrier")),
    *(
        partial(differ, name=name, lengths=lengths)
        for name, lengths in (
            *(("all_reduce", (3, 2)), ("all_reduce", (2, 3))),
            *(("reduce", (3, 2)), ("reduce", (2, 3))),
            *(("broadcast", (3, 2)), ("broadcast", (2, 3)), ("scatter", (3, 2))),
            *(("gather", (2, 3)), ("gather", (3, 2)), ("all_gather", (2, 3))),
            *(("reduce_scatter", (2, 3)), ("send", (3, 2)), ("send", (2, 3))),
        )
    ),
    partial(differ, name="all_reduce", dtypes=(F64, F32)),
    partial(differ, name="all_reduce", dtypes=(F64, I64)),
    partial(differ, name="broadcast", dtypes=(F32, F64)),
    different_reductions,
    lambda w, x, g: dist.broadcast(x, src=w.rank, **g),
    lambda w, x, g: dist.broadcast(x, src=w.rank // 2, **g),
    lambda w, x, g: dist.reduce(x, dst=w.rank, **g),
    partial(transposed, call=reduces, on=(0, 1)),
    partial(transposed, call=reduces),
    partial(reduces_some, make=lambda: torch.arange(6, dtype=F64)[::2]),
    partial(reduces_some, make=lambda: numbers(1).expand(3)),
    partial(transposed, call=lambda _, x, g: dist.broadcast(x, src=0, **g)),
    partial(transposed, call=sends),
    raises,
    ends,
    reads_before_waiting,
    never_waits,
    partial(splits, of=([1, 2], [2, 2])),
    partial(splits, of=([1, 3], [2, 2])),
    uneven_all_to_all,
    lambda w, x, g: dist.recv(x, 1 - w.rank, **g) and None,
    both_send_first,
    lambda w, x, g: None if w.rank else dist.send(x, 1, **g),
    lambda w, x, g: sends(w, x, {**g, "tag": w.rank}),
    partial(gathers_into, count=1, dtype=F64),
    partial(gathers_into, count=2, dtype=F32),
    partial(reduce_as, op="MIN", values=(1.0, NAN), dtype=F64),
    lambda w, _, __: af.all_reduce(numbers((1.0, NAN)[w.rank]), w, "min"),
    partial(reduce_as, op="AVG", values=(1, 2), dtype=I64),
    partial(reduce_as, op="BAND", values=(1, 2), dtype=F64),
    partial(reduce_as, op="SUM", values=(1, 2), dtype=I16),
    lambda _, x, __: dist.all_reduce(x),
    partial(in_rows, axis_of_3=None),
    partial(in_rows, axis_of_3="dp_replicate"),
    takes_axes_in_another_order,
]


def run(world: af.World, number: int) -> Any:
    x = numbers(world.rank + 1)
    found = PROGRAMS[number](world, x, {"group": world.group})
    if isinstance(found, list):
        return None if found[0] is None else [each.tolist() for each in found]
    return (found if isinstance(found, torch.Tensor) else x).tolist()


# A world of fresh Gloo processes with a short timeout, which programs may break.


@attrs.frozen
class Outcome:
    """How a program went on one rank.

    Attributes:
        how: "returned", "raised", "ended" or "hung".
        what: what it returned; the error's text; the exit code with the last words.
    """

    how: str
    what: Any = None


def outcomes(size: int, number: int) -> list[Outcome]:
    with (
        tempfile.TemporaryDirectory() as folder,
        ranks_alone(size, live, folder, size, number) as ranks,
    ):
        return wait_for(ranks, Path(folder))


def wait_for(ranks: list[RankProcess], folder: Path) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    ends_at = time.monotonic() + HANGS
    while len(found) < len(ranks) and (left := ends_at - time.monotonic()) > 0:
        awaited = {r.pipe: i for i, r in enumerate(ranks) if i not in found}
        for pipe in wait(list(awaited), left):
            i = awaited[pipe]
            try:
                found[i] = pipe.recv()
            except (EOFError, OSError):
                ranks[i].process.join(HANGS)
                last_words = (folder / f"{i}.txt").read_text()
                found[i] = Outcome("ended", (ranks[i].process.exitcode, last_words))
    return [found.get(i, Outcome("hung")) for i in range(len(ranks))]


def live(rank: int, folder: str, size: int, number: int, pipe: Connection) -> None:
    os.dup2(os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # aborts are expected
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    store.set(f"rank {rank} is up", "")  # a busy machine may take its time
    store.wait([f"rank {i} is up" for i in range(size)], timedelta(seconds=HANGS))
    timeout = timedelta(seconds=SECONDS)
    place = {"rank": rank, "world_size": size}
    dist.init_process_group("gloo", store=store, timeout=timeout, **place)
    connection, axes = WorldConnection(dist.group.WORLD), axes_of(size)
    for names, group in open_groups(axes, rank, SECONDS).items():
        connection.add_part(names, group)
    world = af.World(rank=rank, size=size, axes=axes, group=connection)
    try:
        outcome = Outcome("returned", run(world, number))
    except Exception as error:  # noqa: BLE001 - told to the parent
        outcome = Outcome("raised", f"{type(error).__name__}: {error}")
    pipe.send(outcome)
    pipe.poll(None)  # the others' connections to this rank stay until all have ended


# What the page says.

LOST = "Connection (closed|reset) by peer"
WAITED = f"Timed out waiting|Application timeout caused pair closure|{LOST}|Broken pipe"
"""Which of these Gloo says depends on whose clock, or which thread, comes first."""


def axes_of(size: int) -> dict[str, int]:
    """Return the axes of a world: ranks of four lie in a square."""
    return {"dp_replicate": 2, "dp_shard": 2} if size == 4 else {}


def by_rank(cell: str) -> list[str]:
    said = [re.sub(r"^(every rank|rank \d) ", "", e) for e in cell.split("<br>")]
    return said * 2 if cell.startswith("every") else said


def fits(said: str, outcome: Outcome) -> bool:
    """Whether a rank did what the page says of it."""
    how, what = outcome.how, outcome.what
    kind, words = said.replace("*", "").partition("`")[::2]
    match kind.strip():
        case "returns" | "wrongly returns":
            return (how, repr(what)) == ("returned", words.rstrip("`"))
        case "raises":
            words = words.rstrip("`")
            is_lost = re.search(LOST, words) and re.search(WAITED, what or "")
            return how == "raised" and bool(is_lost or words in what)
        case "waits until the timeout":
            return how == "raised" and bool(re.search(WAITED, what))
        case "aborts the process":
            last_words = "Received data size doesn't match expected size"
            return how == "ended" and what[0] == -6 and last_words in what[1]
        case "ends with exit code 7":
            return outcome == Outcome("ended", (7, ""))
    assert said == "raises, or returns any value"
    return how != "hung"


@pytest.fixture(scope="module")
def on_gloo() -> list[list[Outcome]]:
    """Every row's outcomes, several worlds side by side: most of them wait."""
    sizes = [len(by_rank(gloo)) for _, gloo, _ in ROWS]
    with ThreadPoolExecutor(8) as side_by_side:
        return [*side_by_side.map(outcomes, sizes, range(len(ROWS)))]


ids = [about for about, *_ in ROWS]


@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=ids)
def test_gloo_does_what_the_page_says(number, on_gloo):
    """Each rank returns, raises, waits or ends as its row says."""
    expected, found = by_rank(ROWS[number][1]), on_gloo[number]
    if not all(map(fits, expected, found)):  # alone: the machine may be busy
        found = outcomes(len(expected), number)
    for rank, (said, outcome) in enumerate(zip(expected, found, strict=True)):
        assert fits(said, outcome), f"rank {rank} {said}? {outcome}"


@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=ids)
def test_a_simulated_world_does_what_the_page_says(number):
    """It raises the error of the row, or gives each rank what stands there."""
    about, gloo, simulated = ROWS[number]
    size, program = len(by_rank(gloo)), partial(run, number=number)
    faults = [Crash(1)] if about == "Rank 1 ends its process" else []
    if refusal := re.fullmatch(r"`(\w+)`: (.*)", simulated):
        with pytest.raises(Exception, match=re.escape(refusal[2])) as caught:
            simulate(size, program, faults=faults, axes=axes_of(size))
        assert caught.type.__name__ == refusal[1]
        return
    results = simulate(size, program, axes=axes_of(size))
    for result, said in zip(results, by_rank(simulated), strict=True):
        assert fits(said, Outcome("returned", result))
