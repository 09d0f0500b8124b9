# SPDX-License-Identifier: Apache-2.0
"""`simulate`: a distributed program on N ranks in one process, the same every time."""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Literal, TypeVar

import attrs
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

    Each rank is a thread, and one thread runs at a time. The turn passes only when a rank
    waits in a collective. Collectives run in memory; pass the world's group to torch's
    DistributedDataParallel and to other code that takes a process group. Each rank has
    separate torch, numpy and Python random generators, and the process's generators are
    restored afterwards. Worlds nest; worlds of several threads take turns.

    Args:
        size: the number of ranks.
        fn: the function of each rank; it gets the rank's `World`.
        schedule: the next rank, each time a rank waits, as an index into the ranks that can
            continue, counted from the waiting rank. At its end, and by default, the first.
        faults: the failures and their places: `Raise`, `Leave`, `Crash`, `Stall`, `Corrupt`,
            `Terminate`. Faults that did not happen are in `Run.missed`; a fault whose place
            is only an update raises instead.
        sums: the order of additions in a reduction, because the last bits of a float depend
            on it. "ranks" adds from the first rank to the last. "ring" begins each piece of a
            buffer at another rank, as Gloo and NCCL do. "tree" adds pairs. On 2 ranks all
            orders give the same.
        seed: the seed of the ranks' random generators; each rank draws other numbers.
        axes: the axes of the world, as `World.from_env` takes them: {"dp_shard": 4, "tp": 2}.
        device: the device of all ranks, "cpu" or a type of torch.accelerator: "cuda", "xpu", ...
            Ranks share the device, with separate random generators. On "meta" tensors have
            shapes and no values: communication is the same, and reading a value raises.
        elastic: the fewest ranks that may continue after others crashed; by default no rank
            continues. The remaining ranks get a `PeerFailedError` and call `af.regroup`, as
            under `accelfn launch --elastic`. A rank whose `Crash` has `returns` comes back; a
            rank that does not has the result None.
        also: "processes" runs the same on real processes joined by Gloo, and compares the
            results bit by bit. `fn` must then be importable.

    Raises:
        CollectiveMismatchError: ranks called different collectives; a table lists the calls.
        WorldError: the device is not available.
        SimulationError: a fault was planned for an update that its rank did not begin, or a
            rank read a value on meta.
        DeadlockError: all ranks wait.
        RankCrashedError: a rank crashed as planned.
        Exception: the first error of a rank, with a note on how to repeat the run.

    Law: the results and the log depend on the arguments alone. The results do not depend on
    `schedule` if ranks share no memory, do not receive from "any rank" and do not poll
    asynchronous calls.

    Cost: on two cores, 0.1 ms per collective on 2 ranks if torch computes in one thread, else
    twice that; see the benchmarks. With one thread, ranks share a core, and so do processes
    that they start; a DataLoader warns about that. Starting a training costs as much per rank
    on 256 ranks as on 2.

    Limits: there is no real network, and ranks do not run at the same time. A collective
    waits for all work of a device. The only groups are those of `axes`, `world.split` and
    `world.across`. A future of a collective is always completed. A thread that a rank starts
    does not belong to the world. Only an interrupt stops a rank that loops without a
    collective.

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
    """Run a plan in simulation and on real processes, and compare the results."""
    # imported here: few runs need it, and the import is slow
    from accelfn.testing import processes  # noqa: PLC0415

    processes.check_comparable(plan)
    leaves: dict[int, dict[str, Any]] = {}

    @wraps(plan.fn)
    def fn(world: World) -> Any:
        result = plan.fn(world)
        leaves[world.rank] = processes.leaves_by_path(result)  # needs the open world
        return result

    run = run_simulation(attrs.evolve(plan, fn=fn))
    processes.compare_with_processes(plan, [leaves[rank] for rank in range(plan.size)])
    return run
