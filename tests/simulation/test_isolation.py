# SPDX-License-Identifier: Apache-2.0
"""A simulated world leaves no trace in the process, and its ranks none in one another."""

# ranks draw as users do, from the generators of the process
# ruff: noqa: ARG001, ARG005, NPY002, S311

import contextlib
import gc
import io
import os
import random
import signal
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import accelfn as af
from accelfn.testing import Crash, Leave, Stall, simulate
from tests.waiting import wait_until

ONE_CORE = not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2


def process():
    """Return what a process and the calling thread have once, to compare."""
    world = distributed_c10d._world
    gauss = np.random.get_state(legacy=False)
    return {
        "threads": threading.active_count(),
        "environment": dict(os.environ),
        "affinity": os.sched_getaffinity(0),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": (gauss["state"]["key"].tolist(), gauss["state"]["pos"]),
        "numpy's normal": (gauss["has_gauss"], gauss["gauss"]),
        "numpy's bits": id(np.random.get_bit_generator()),
        "registry": (id(world), world.default_pg, len(world.pg_map), world.group_count),
        "groups": [len(world.pg_group_ranks), len(world.pg_names)],
        "coalescing": len(world.pg_coalesce_state),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "cache": torch.is_autocast_cache_enabled(),
        "device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "num_threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filters": (id(warnings.filters), list(warnings.filters)),
        "showwarning": (warnings.showwarning, warnings._showwarnmsg_impl),
        "streams": (sys.stdout, sys.stderr),
    }


class PlannedError(Exception):
    """What a rank raises in these tests."""


def rude(world):
    """Change all that a rank can change of its process, around collectives."""
    random.random()
    np.random.randn()
    torch.rand(3)
    os.environ["ACCELFN_TEST"] = str(world.rank)
    os.environ.pop("PATH", None)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(mode=True)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.set_default_device("meta")
    torch.set_default_device("cpu")
    warnings.simplefilter("ignore")
    torch.set_autocast_enabled("cpu", enabled=True)
    torch.inference_mode().__enter__()
    contextlib.redirect_stdout(io.StringIO()).__enter__()
    distributed_c10d._coalescing_manager(world.group).__enter__()
    dist.barrier(group=world.group)


def planned(world):
    """Raise what was planned."""
    raise PlannedError


ENDS = {
    "returns": lambda w: None,
    "raises": planned,
    "calls another shape": lambda w: dist.all_gather(
        [torch.ones(1)] * 2, torch.ones(1 + w.rank), w.group
    ),
    "waits for ever": lambda w: w.rank and dist.recv(torch.ones(1), 0, w.group),
    "exits": lambda w: sys.exit(w.rank),
    "nests": lambda w: simulate(2, lambda inner: (rude(inner), w.rank and planned(w))),
    "destroys": lambda w: dist.destroy_process_group(),
}
OUTCOMES = [
    *((end, ()) for end in ENDS),
    *(("returns", [fault]) for fault in (Crash(1), Leave(0), Stall(0))),
]


@pytest.mark.parametrize(("end", "faults"), OUTCOMES)
def test_the_process_is_as_before(end, faults):
    """After any outcome: threads, random states, environment, registries, modes."""
    np.random.seed(3)
    np.random.randn()  # numpy keeps the second of a pair of normals
    torch.manual_seed(3)
    before = process()
    with contextlib.suppress(BaseException):
        simulate(2, lambda w: (rude(w), ENDS[end](w)), faults=faults)
    after = process()
    for name, value in before.items():
        assert value == after[name], name


def test_a_process_group_of_the_process_is_untouched():
    """Neither seen by ranks nor changed by them, and it works on afterwards."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        before = process()
        sizes = simulate(3, lambda world: dist.get_world_size()).results
        with pytest.raises(af.errors.SimulationError):
            simulate(2, lambda world: dist.destroy_process_group())
        assert sizes == (3, 3, 3)
        assert before == process()
        assert dist.get_world_size() == 1
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


# The caller's modes


@pytest.mark.parametrize(
    "mode",
    [
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
        lambda: torch.device("meta"),
    ],
)
def test_ranks_are_in_the_callers_modes(mode):
    """As if the function were called here; on all ranks, also after they waited."""

    def modes():
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.get_default_device(),
            torch.ones(1).device,
            torch.get_num_threads(),
        )

    def fn(world):
        before = modes()
        dist.barrier(group=world.group)
        return before, modes()

    with mode():
        assert simulate(2, fn, schedule=[1]).results == ((modes(), modes()),) * 2
        assert simulate(2, lambda _: simulate(2, fn)[1])[0] == (modes(), modes())


def test_the_default_device_of_the_caller():
    """Set for good and not by a `with`, it holds in ranks, and they may unset it."""

    def fn(world):
        before = torch.ones(1).device.type
        torch.set_default_device(None)
        dist.barrier(group=world.group)
        return before, torch.ones(1).device.type

    torch.set_default_device("meta")
    try:
        assert simulate(2, fn).results == (("meta", "cpu"),) * 2
        assert torch.ones(1).device.type == "meta"
    finally:
        torch.set_default_device(None)


def test_function_modes_of_the_caller():
    """What watches torch's functions here watches them in ranks."""

    class Watch(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += func is torch.add
            return func(*args, **(kwargs or {}))

    def fn(world):
        for _ in range(3):
            torch.add(torch.ones(1), 1)

    with Watch() as watch:
        simulate(2, fn)
    assert watch.seen == 6


@pytest.mark.parametrize("schedule", [(), (1,), (1, 1, 0)])
def test_modes_of_a_rank_see_what_the_rank_does(schedule):
    """Not what is computed for all ranks when it happens to come last."""

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen = []

    def fn(world):
        x = torch.ones(2)
        if world.rank:
            dist.all_reduce(x, dist.ReduceOp.PRODUCT, group=world.group)
            return None
        with Dispatched(), torch.inference_mode():
            dist.all_reduce(x, dist.ReduceOp.PRODUCT, group=world.group)
        return len(seen), any("mul" in name for name in seen), x.is_inference()

    count, *others = simulate(2, fn, schedule=schedule)[0]
    assert others == [False, False]
    seen.clear()
    assert simulate(2, fn)[0][0] == count > 0


def test_autocast_in_a_rank_is_the_ranks():
    """Its block may span a collective; the weights that it casts are kept as usual."""

    def fn(world):
        layer = nn.Linear(2, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=world.rank == 0):
            first = layer(torch.ones(1, 2))
            dist.barrier(group=world.group)
            second = layer(torch.ones(1, 2))
        return first.dtype, second.dtype, torch.is_autocast_enabled("cpu")

    half, full = torch.bfloat16, torch.float32
    assert simulate(2, fn).results == ((half, half, False), (full, full, False))


def test_what_with_blocks_change_is_the_ranks():
    """Blocks of several ranks overlap in time, and each sees and restores its own."""

    def fn(world):
        dist.barrier(group=world.group)
        with (
            contextlib.redirect_stdout(io.StringIO()) as printed,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            dist.barrier(group=world.group)
            print(world.rank, end="")  # noqa: T201 - it is caught
            warnings.warn(f"of {world.rank}", stacklevel=1)
            dist.barrier(group=world.group)
        torch.set_default_dtype(torch.float64 if world.rank else torch.float32)
        dist.barrier(group=world.group)
        dtype = torch.ones(1).dtype
        return printed.getvalue(), [str(each.message) for each in caught], dtype

    before = process()
    for schedule in ((), (1, 1, 0, 0, 1, 0, 1)):
        assert simulate(2, fn, schedule=schedule).results == (
            ("0", ["of 0"], torch.float32),
            ("1", ["of 1"], torch.float64),
        )
    assert before == process()


@pytest.mark.parametrize("schedule", [(), (1,), (2, 0), (0, 1, 0)])
def test_each_rank_begins_where_the_caller_stands(schedule):
    """Whatever ranks that had their turn before have made of the process."""

    def fn(world):
        stands = {**process(), "torch": None, "python": None, "numpy": None}
        begun = {
            name: stands[name]
            for name in ("dtype", "filters", "showwarning", "streams", "device", "grad")
        }
        begun["filters"] = begun["filters"][1]
        contextlib.redirect_stdout(io.StringIO()).__enter__()
        contextlib.redirect_stderr(io.StringIO()).__enter__()
        warnings.simplefilter("ignore")
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        dist.barrier(group=world.group)
        return begun

    first, *others = simulate(3, fn, schedule=schedule)
    stands = process()
    assert others == [first] * 2
    assert first == {**{n: stands[n] for n in first}, "filters": stands["filters"][1]}


# Random streams


def draws(world, number=3):
    """Draw from all generators, with collectives in between."""
    got = []
    for _ in range(number):
        got += [
            random.random(),
            np.random.rand(),
            np.random.randn(),
            torch.rand(()).item(),
            random.gauss(0, 1),
        ]
        dist.barrier(group=world.group)
    return got


@given(schedule=st.lists(st.integers(0, 2), max_size=20), seed=st.integers(0, 2**40))
def test_draws_depend_on_seed_and_rank(schedule, seed):
    """And not on the schedule, the number of ranks, or what the process drew before."""
    wanted = simulate(3, draws, seed=seed).results
    others = simulate(3, draws, seed=seed + 1).results
    for drawn in zip(*wanted, *others, strict=True):  # of each generator
        assert len(set(drawn)) == 6
    random.random()
    torch.rand(1)
    assert simulate(3, draws, schedule=schedule, seed=seed).results == wanted
    assert simulate(2, draws, seed=seed).results == wanted[:2]


@given(schedule=st.lists(st.integers(0, 1), max_size=9))
def test_draws_go_on_after_a_nested_world(schedule):
    """As if it had not been; and inside it they are as in a world alone."""

    def nesting(world):
        got = draws(world, 1)
        inner = simulate(2, draws, schedule=schedule, seed=5).results
        return got + draws(world, 2), inner

    alone, inner = simulate(2, draws).results, simulate(2, draws, seed=5).results
    for rank, (got, within) in enumerate(simulate(2, nesting, schedule=schedule)):
        assert alone[rank] == got
        assert inner == within


# Worlds beside and inside each other


def trained(world):
    """Train a little, and return the parameters."""
    model = DistributedDataParallel(nn.Linear(3, 2), process_group=world.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.rand(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.tolist() for each in model.parameters()]


def test_worlds_nest():
    """To any depth; a world inside another gives what it gives alone."""

    def outer(world):
        first = trained(world)
        inner = simulate(3, lambda _: simulate(2, trained).results, schedule=[2, 1])
        return first, inner.results, trained(world)

    alone = simulate(2, trained).results

    def twice(world):
        return trained(world), trained(world)

    for (first, inner, last), wanted in zip(
        simulate(2, outer, schedule=[1]), simulate(2, twice), strict=True
    ):
        assert (first, last) == wanted
        assert inner == (alone,) * 3


def test_worlds_of_several_threads():
    """Called from four threads at once, each gives what it gives alone."""
    before = process()
    alone = [simulate(1 + i, trained, seed=i).results for i in range(4)]
    found = [[] for _ in range(4)]

    def call(i):
        found[i] = [simulate(1 + i, trained, seed=i).results for _ in range(5)]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[each] * 5 for each in alone]
    assert before == process()


# What stays in memory


class Kept:
    """Something that can be referred to weakly, and holds a tensor."""

    def __init__(self):
        self.tensor = torch.ones(1000)


def test_results_live_as_long_as_the_run():
    """No cycle keeps what ranks return: it is gone with the run, without a collection."""

    def fn(world):
        kept = Kept()
        dist.all_reduce(kept.tensor, group=world.group)
        return kept

    gc.collect()
    gc.disable()
    try:
        run = simulate(2, fn)
        kept = [weakref.ref(each) for each in run]
        assert all(each() is not None for each in kept)
        del run
        assert all(each() is None for each in kept)
    finally:
        gc.enable()


def test_models_are_let_go_of():
    """DistributedDataParallel refers to itself; nothing else holds it, or its group."""
    kept = []

    def fn(world):
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=world.group)
        model(torch.ones(1, 2)).sum().backward()
        kept.extend((weakref.ref(model), weakref.ref(model.module), weakref.ref(world)))

    simulate(2, fn)
    gc.collect()
    assert [each() for each in kept] == [None] * 6


@pytest.mark.parametrize("who", [0, 1])
def test_what_ranks_held_is_let_go_of_after_an_error(who):
    """An error holds its own rank's frames while it lives, and those of no other."""
    kept = {}

    def fn(world):
        mine = Kept()
        kept[world.rank] = weakref.ref(mine)
        dist.all_reduce(mine.tensor, group=world.group)
        if world.rank == who:
            raise PlannedError
        dist.all_reduce(mine.tensor, group=world.group)

    gc.collect()
    gc.disable()
    try:
        try:
            simulate(2, fn)
        except PlannedError:
            assert kept[1 - who]() is None
        assert kept[who]() is None
    finally:
        gc.enable()


# Interrupts


@contextlib.contextmanager
def _interrupted(*moments):
    """Interrupt this process as soon as each event has come."""

    def interrupt():
        for moment in moments:
            moment.wait()
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("nested", [False, True])
def test_an_interrupt_ends_a_rank_that_loops(nested):
    """It is raised in the rank that runs; the others end, and then it is raised here."""
    errors, loops = {}, threading.Event()

    def fn(world):
        try:
            if world.rank:
                loops.set()
                while True:
                    pass
            dist.barrier(group=world.group)
        except BaseException as error:
            errors[world.rank] = type(error)
            raise

    def outer(world):
        if world.rank == 0:
            simulate(2, fn)
        dist.barrier(group=world.group)

    before = process()
    with _interrupted(loops), pytest.raises(KeyboardInterrupt):
        simulate(2, outer if nested else fn)
    assert errors == {0: af.errors.PeerFailedError, 1: KeyboardInterrupt}
    assert before == process()


def test_a_second_interrupt_leaves_a_rank_that_will_not_end():
    """It is raised at once; what such ranks do later does not touch the process."""
    loops, stays, free = (threading.Event() for _ in range(3))

    def fn(world):
        while world.rank and not free.is_set():
            try:
                loops.set()
                time.sleep(0.01)
            except BaseException:  # noqa: BLE001 - it will not end
                stays.set()
        dist.barrier(group=world.group)

    before = process()
    with _interrupted(loops, stays), pytest.raises(KeyboardInterrupt):
        simulate(2, fn)
    free.set()
    while threading.active_count() > before["threads"]:
        time.sleep(0.01)
    assert before == process()


@pytest.mark.skipif(ONE_CORE, reason="there is no other core to go to")
def test_ranks_that_get_little_of_their_core_go_to_another():
    """They go together, to where the thread that waits for them is woken; that one is free."""
    caller, cores = threading.get_native_id(), os.sched_getaffinity(0)

    def fn(world):
        here = os.sched_getaffinity(0)
        if world.rank == 0:
            os.sched_setaffinity(caller, cores - here)  # there it is woken
            wait_until(lambda: os.sched_getaffinity(0) != here)  # as if others computed
        dist.barrier(group=world.group)
        return here, os.sched_getaffinity(0)

    try:
        (first, second), others = simulate(2, fn).results
    finally:
        os.sched_setaffinity(caller, cores)
    assert len(first) == len(second) == 1
    assert not first & second
    assert others[1] == second


def test_threads_that_cannot_be_started(monkeypatch):
    """Where the system has no more threads, those that were started end."""
    started = []
    start = threading.Thread.start

    def fail(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    before = process()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        simulate(3, lambda world: None)
    assert before == process()


def test_what_no_rank_asked_for_is_not_imported(monkeypatch):
    """Torch's DTensors, which take a second, come with the first world that has a mesh."""
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor", raising=False)

    def fn(world):
        dist.barrier(group=world.group)
        return world.group.group_name

    assert len(set(simulate(2, fn))) == 2
    assert "torch.distributed.tensor" not in sys.modules
