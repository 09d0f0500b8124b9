# SPDX-License-Identifier: Apache-2.0
"""`simulate`: run a distributed program on N ranks in one process, reproducibly."""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Literal, TypeVar

import attrs
import torch

from accelfn import World
from accelfn.errors import ArgumentError
from accelfn.plug import arguments
from accelfn.testing import processes
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

    Each rank is a thread, and only one of the threads runs at a time. The next rank runs when
    this rank waits in a collective. Collectives run in memory. Pass `world.group` to torch's
    DistributedDataParallel and to other code that needs a process group. Each rank has
    separate torch, NumPy and Python random generators, and the process's generators are
    restored afterwards. A simulated rank may call `simulate`. If several threads call
    `simulate`, their worlds run one after the other.

    Args:
        size: the number of ranks.
        fn: the function that each rank runs. Its argument is the rank's `World`.
        schedule: the order of turns. Each time a rank waits, the next number of the schedule
            selects one of the ranks that can continue, counted from the waiting rank. By default,
            and after the last number, the first of these ranks continues.
        faults: the planned failures: `Raise`, `Leave`, `Crash`, `Stall`, `Corrupt`,
            `Terminate`. `Run.missed` lists the faults that did not happen. If a fault has only
            an update as its place and does not happen, `simulate` raises an error.
        sums: the order of additions in a reduction. The last bits of a float sum depend on this
            order. "ranks" adds from the first rank to the last. "ring" starts each piece of a
            buffer at another rank, as Gloo and NCCL do. "tree" adds pairs. On 2 ranks all
            orders give the same result.
        seed: the seed of the ranks' random generators. Each rank draws different numbers.
        axes: the axes of the world, as for `World.from_env`: {"dp_shard": 4, "tp": 2}.
        device: the device of all ranks: "cpu", or an accelerator type such as "cuda" or "xpu".
            Ranks share the device, but have separate random generators. On "meta", tensors have
            shapes but no values: communication is the same, and reading a value raises an error.
        elastic: the smallest number of ranks that may continue after other ranks crashed. By
            default no rank continues. The remaining ranks get a `PeerFailedError` and call
            `af.regroup`, as under `accelfn launch --elastic`. A rank whose `Crash` has
            `returns` comes back. The result of a rank that does not come back is None.
        also: "processes" also runs `fn` on real processes with Gloo, and compares the results
            bit by bit. The processes must be able to import `fn`.

    Raises:
        CollectiveMismatchError: ranks called different collectives. The error message has a
            table of the calls.
        WorldError: the device is not available.
        SimulationError: a fault was planned for an update that its rank did not begin, or a
            rank read the value of a meta tensor.
        DeadlockError: all ranks wait for each other.
        RankCrashedError: a rank crashed as planned.
        Exception: the first error of a rank, with a note on how to repeat the run.

    Law: the results and the log depend only on the arguments. The results do not depend on
    `schedule` if ranks share no memory, do not receive from "any rank" and do not poll
    asynchronous calls.

    Cost: on two cores, 0.1 ms per collective on 2 ranks if torch computes in one thread,
    otherwise 0.2 ms. See the benchmarks. With one torch thread, all ranks run on one core, and
    so do the processes that ranks start; a DataLoader warns about that. The start of a training
    run takes as long per rank on 256 ranks as on 2.

    Limits: ranks do not use a network, and do not run at the same time. A collective waits
    until the device has finished all work. The only process groups are those of `axes`,
    `world.split` and `world.across`. The future of a collective is always completed. A thread
    that a rank starts does not belong to the world. If a rank loops without a collective, only
    an interrupt (Ctrl-C) stops the rank.

    Example:
        >>> import accelfn as af
        >>> from accelfn.testing import simulate
        >>> simulate(2, lambda world: world.rank).results
        (0, 1)
    """
    plan = Plan(
        size, fn, schedule or (), faults, sums, seed, axes or {}, device, elastic
    )
    if also not in (None, "processes"):
        msg = f'simulate(also={also!r}): expected "processes" or None.'
        raise ArgumentError(msg)
    return run_simulation(plan) if also is None else _run_both(plan)


def _run_both(plan: Plan) -> Run[Any]:
    """Run a plan in simulation and on real processes, and compare the results."""
    processes.check_comparable(plan)
    leaves: dict[int, dict[str, Any]] = {}

    @wraps(plan.fn)
    def fn(world: World) -> Any:
        result = plan.fn(world)
        # read here, because a result may need the world, which closes after this function
        leaves[world.rank] = processes.leaves_by_path(result)
        return result

    run = run_simulation(attrs.evolve(plan, fn=fn))
    processes.compare_with_processes(plan, [leaves[rank] for rank in range(plan.size)])
    return run
