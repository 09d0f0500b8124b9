# SPDX-License-Identifier: Apache-2.0
"""Which rank a process is, as each launcher tells it."""

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from tests.internals import asked_size, read_place

MASTER = {"MASTER_ADDR": "head", "MASTER_PORT": "4000"}


def by_torchrun(rank: int, local: int, node: int, tasks: list[int]) -> dict[str, str]:
    found = numbers(
        RANK=rank, WORLD_SIZE=sum(tasks), LOCAL_RANK=local, LOCAL_WORLD_SIZE=tasks[node]
    )
    if len(set(tasks)) == 1:  # ranks that fill machines alike need not be told
        return found
    name = "GROUP_RANK" if len(tasks) % 2 else "NODE_RANK"  # torchrun's, Ray Train's
    return found | {name: str(node)}


def by_open_mpi(rank: int, local: int, node: int, tasks: list[int]) -> dict[str, str]:
    found = numbers(
        RANK=rank, SIZE=sum(tasks), LOCAL_RANK=local, LOCAL_SIZE=tasks[node]
    )
    named = {f"OMPI_COMM_WORLD_{name}": value for name, value in found.items()}
    return named | {"GROUP_RANK": str(node)} if len(set(tasks)) > 1 else named


def by_mpich(rank: int, local: int, node: int, tasks: list[int]) -> dict[str, str]:
    named = by_open_mpi(rank, local, node, tasks)
    of_mpich = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return dict(zip([*of_mpich, "GROUP_RANK"], named.values(), strict=False))


def by_srun(rank: int, local: int, node: int, tasks: list[int]) -> dict[str, str]:
    runs = [(count, len(list(alike))) for count, alike in groupby(tasks)]
    return numbers(
        SLURM_PROCID=rank,
        SLURM_NTASKS=sum(tasks),
        SLURM_STEP_NUM_TASKS=sum(tasks),
        SLURM_LOCALID=local,
        SLURM_NODEID=node,
        SLURM_JOB_ID=77,
    ) | {
        "SLURM_STEP_TASKS_PER_NODE": ",".join(
            str(count) if times == 1 else f"{count}(x{times})" for count, times in runs
        ),
        "SLURM_STEP_NODELIST": f"gpu[07-{6 + len(tasks):02d}]"
        if tasks[1:]
        else "gpu07",
    }


def numbers(**values: int) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


BY = {
    "torchrun": by_torchrun,
    "Open MPI": by_open_mpi,
    "MPICH or Intel MPI": by_mpich,
    "SLURM": by_srun,
}


@given(
    tasks=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    launcher=st.sampled_from(sorted(BY)),
    outer=st.booleans(),
    at=st.integers(0, 11),
    told=st.booleans(),
)
def test_a_rank_is_where_its_launcher_says(
    tasks: list[int], launcher: str, outer: bool, at: int, told: bool
) -> None:
    """Of any machines and ranks, also where SLURM has started the launcher itself."""
    places = [
        (node, local) for node, count in enumerate(tasks) for local in range(count)
    ]
    rank = at % len(places)
    node, local = places[rank]
    env = BY[launcher](rank, local, node, tasks)
    asked = asked_size(env)[1]
    many = len(places) > 1
    is_told = told or launcher == "torchrun" or (launcher != "SLURM" and many)
    if outer:
        env = by_srun(0, 0, 0, [1]) | env
    place = read_place(env | (MASTER if is_told else {}))
    assert place is not None
    assert place.launcher == launcher
    assert (place.rank, place.size, asked) == (rank, len(places), len(places))
    assert (place.local_rank, place.local_size) == (local, tasks[node])
    assert place.node_rank == node
    meets = many or launcher == "torchrun"
    assert place.is_alone != meets
    if meets and is_told:
        assert (place.address, place.port) == ("head", 4000)
    elif meets:
        everyone = {
            (other.address, other.port)
            for r, (n, i) in enumerate(places)
            if (other := read_place(BY[launcher](r, i, n, tasks)))
        }
        assert everyone == {(place.address, place.port)}
        assert place.address == ("gpu07" if tasks[1:] else "127.0.0.1")
