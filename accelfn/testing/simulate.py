# SPDX-License-Identifier: Apache-2.0
"""`simulate`: a distributed program on N ranks in one process, the same every time."""

from collections.abc import Callable, Iterable, Mapping
from typing import (
    Any,
    Literal,
    TypeVar,
)

import torch

from accelfn import World
from accelfn.errors import ArgumentError
from accelfn.plug import arguments
from accelfn.testing.simulation.calls import Fault, Sums
from accelfn.testing.simulation.plan import Plan, Run
from accelfn.testing.simulation.ranks import run_simulation

T = TypeVar("T")


@arguments.explain_call_errors
def simulate(
    size: int,
    fn: Callable[[World], T],
    *,
    schedule: Iterable[int] | None = None,
    faults: Iterable[Fault] = (),
    sums: Sums = "ranks",
    seed: int = 0,
    axes: Mapping[str, int] | None = None,
    device: str | torch.device = "cpu",
    elastic: int | None = None,
    also: Literal["processes"] | None = None,
) -> Run[T]:
    """Run `fn(world)` on every rank of a simulated world, in this process.

    Each rank is a thread, of which one runs at a time; the turn passes only where a rank
    waits in a collective. Collectives are carried out in memory, under torch's own
    DistributedDataParallel and all else that takes a process group explicitly. Each rank
    has torch, numpy and Python random generators of its own; the process has its own back
    afterwards. Worlds nest; those of several threads take turns.

    Args:
        size: the number of ranks.
        fn: what each rank does; it gets its `World`.
        schedule: which of the ranks that can go on does, each time one waits: indices,
            counted from the rank whose turn it was. When they end, and by default, the
            first.
        faults: what goes wrong, and where: `Raise`, `Leave`, `Crash`, `Stall`, `Corrupt`,
            `Terminate`. Those that found no place to happen are in `Run.missed`; of one
            whose place is an update alone, that is an error.
        sums: in which order what is reduced is added up, on which the last bits of a float
            depend: "ranks", from the first to the last; "ring", each piece of a buffer from
            another rank on, as Gloo and NCCL do; "tree", by pairs. On 2 ranks all are one.
        seed: of the ranks' random generators; each rank draws its own.
        axes: the axes of the world, as `World.from_env` takes them: {"dp_shard": 4, "tp": 2}.
        device: on which all ranks compute, "cpu" or any of torch.accelerator: "cuda", "xpu", ...
            They share it, and each has random generators of its own on it. On "meta" tensors
            have shapes and no values: what is sent is the same, and who asks for a value is
            refused.
        elastic: how many ranks may go on where others have crashed, at least; by default none
            does. Those that are left get a `PeerFailedError` and go on by `af.regroup`, as under
            `accelfn launch --elastic`; a rank whose `Crash` says when it `returns` comes back.
            The result of one that does not is None.
        also: "processes" runs the same on real processes joined by Gloo, and compares the
            results bit by bit. `fn` must then be importable.

    Raises:
        CollectiveMismatchError: ranks met in different collectives; a table says which.
        WorldError: the device is not there.
        SimulationError: a fault was planned for an update that its rank did not begin; or a
            value was asked for on meta.
        DeadlockError: ranks wait for what no rank will do.
        RankCrashedError: a rank crashed, as was planned.
        Exception: what a rank raised first, with a note on how to repeat the run.

    Law: the results and the log depend on the arguments alone. The results do not depend on
    `schedule` if ranks share no memory, receive from no "any rank" and do not ask whether
    an asynchronous call is completed.

    Cost: on two cores, 0.1 ms a collective on 2 ranks, and no sockets; see the benchmarks.
    That is where torch computes in one thread: ranks then share a core, and so do processes
    that they start, of which a DataLoader warns; where other work takes that core, ranks go
    to another. In several threads it is twice that. What starts a training costs as much a
    rank on 256 as on 2.

    Limits: no real network, no two ranks at once, and a collective waits for all that a
    device was given, on any stream; no groups but those of `axes`, `world.split` and
    `world.across`.
    The future of a collective is done when it is asked for. A thread that a rank starts is
    none of its world. A rank that loops without a collective is stopped by an interrupt only.

    Example:
        >>> import accelfn as af
        >>> from accelfn.testing import simulate
        >>> simulate(2, lambda world: world.rank).results
        (0, 1)
    """
    plan = Plan(
        size, fn, schedule, faults, sums, seed, axes or {}, device, elastic=elastic
    )
    if also not in (None, "processes"):
        msg = f'simulate(also={also!r}): expected "processes" or None.'
        raise ArgumentError(msg)
    return run_simulation(plan) if also is None else _run_both(plan)


def _run_both(plan: Plan) -> Run[Any]:
    """Run, and compare with real processes."""
    # here, since few runs ask for it, and it brings all that starting processes needs
    from accelfn.testing import processes  # noqa: PLC0415

    processes.check_comparable(plan)
    run = run_simulation(plan)
    processes.compare_with_processes(plan, run)
    return run
