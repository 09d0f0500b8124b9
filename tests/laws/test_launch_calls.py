# SPDX-License-Identifier: Apache-2.0
"""Settings of a launch, and which rank a process is, as each launcher tells it."""

import math
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import groupby
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from tests.internals import (
    OPTIONS,
    Settings,
    asked_size,
    edit_settings,
    main,
    read_place,
)
from tests.laws.disks import lent

GOOD: dict[str, list[Any]] = {
    "nproc": ["auto", 1, 2, 7],
    "num_machines": [1, 2, 3, "1:1", "2:4"],
    "machine_rank": [0, 1, 2],
    "main_address": ["127.0.0.1", "localhost"],
    "main_port": [1, 29400, 65535],
    "rdzv_endpoint": ["127.0.0.1:29400", "localhost:1"],
    "rdzv_id": ["mine", "7"],
    "join_timeout": [1, 7.5, 1000000],
    "axes": ["dp_shard=-1", "dp_shard=2", "dp_replicate=2, dp_shard=-1", "tp=1,cp=1"],
    "max_restarts": [0, 3],
    "elastic": ["1:1", "2:4"],
}
BAD: dict[str, list[Any]] = {
    "nproc": [0, -1, "many", 1.5],
    "num_machines": [0, "2:1", "0:2", ":", "1:2:3"],
    "machine_rank": [-1, 0.5],
    "main_address": ["", "a\tb"],
    "main_port": [0, 65536],
    "rdzv_endpoint": [""],
    "rdzv_id": [""],
    "join_timeout": [0.5, 1000001, "soon"],
    "axes": [
        *("", "dp=2", "dp_shard", "tp=0", "tp=x", "pp=2"),
        *("tp=-1,cp=-1", "tp=1,tp=1"),
    ],
    "max_restarts": [-1, "often"],
    "elastic": ["4", "3:2", "0:2", "", "2:x"],
}
KINDS = {
    "alone": ("nproc", "axes", "max_restarts"),
    "numbered": (
        *("nproc", "num_machines", "machine_rank", "main_address", "main_port"),
        *("axes", "join_timeout"),
    ),
    "dynamic": (*("nproc", "num_machines", "rdzv_endpoint", "rdzv_id"), "join_timeout"),
    "come and go": ("elastic", "join_timeout", "nproc", "max_restarts"),
    "any": tuple(OPTIONS),
}


BESIDE: dict[str, Any] = {
    "nproc": "auto",
    "num_machines": 1,
    "max_restarts": 0,
    "axes": None,
    **dict.fromkeys(("machine_rank", "main_address", "main_port")),
    **dict.fromkeys(("rdzv_endpoint", "rdzv_id")),
}
"""What says something of a launch that --elastic says, or cannot be beside it."""


@st.composite
def given_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Draw settings that often go together."""
    names = KINDS[draw(st.sampled_from(sorted(KINDS)))]
    found: dict[str, Any] = {}
    for name in names:
        if draw(st.sampled_from([True, True, False])):
            found[name] = draw(st.sampled_from(GOOD[name]))
    if draw(st.sampled_from([False] * 7 + [True])):
        name = draw(st.sampled_from(names))
        found[name] = draw(st.sampled_from(BAD[name]))
    return found


def multiply(values: Mapping[str, Any]) -> bool:
    """Whether the axes' sizes multiply to the ranks of one machine; of several they tell."""
    parts = [part.split("=") for part in values.get("axes", "").split(",") if part]
    if not parts or str(values.get("num_machines", 1)) not in ("1", "1:1"):
        return True
    nproc = 1 if values.get("nproc", "auto") == "auto" else values["nproc"]
    sizes = [int(size) for _, size in parts]
    known = math.prod(size for size in sizes if size > 0)
    return nproc % known == 0 if -1 in sizes else nproc == known


def may_be(values: Mapping[str, Any], sources: Mapping[str, str]) -> bool:
    """Whether these settings can be, each for itself and together."""
    beside = {name for name in BESIDE if values.get(name, BESIDE[name]) != BESIDE[name]}
    bad = any(value in BAD[name] for name, value in values.items())
    if bad or not multiply(values) or ("elastic" in values and beside):
        return False
    numbered = {"machine_rank", "main_address", "main_port"} & values.keys()
    dynamic = {"rdzv_endpoint", "rdzv_id"} & values.keys()
    count = values.get("num_machines", 1)
    if dynamic:
        return not numbered and {"rdzv_endpoint", "rdzv_id"} <= dynamic
    if isinstance(count, str):
        return False
    if count > 1:
        needed = {"machine_rank", "main_address"} <= numbered
        return needed and values["machine_rank"] < count
    if numbered and sources["num_machines"] == "default":
        return False
    return values.get("machine_rank", 0) < 1


def meeting(values: Mapping[str, Any]) -> list[str]:
    """Return the lines that say how machines meet, if they do, and whom they trust."""
    count = values.get("num_machines", 1)
    if "rdzv_endpoint" in values:
        fewest, _, most = str(count).rpartition(":")
        where = values["rdzv_endpoint"]
        meets = f"waits for {fewest or most} to {most} machines at {where}"
        trusts = (
            f"machines unpickle data from {where}: anyone who can reach that port can"
        )
        trusts += " run code as you; --machine-rank and --main-address avoid pickle"
        return [*([meets] if int(most) > 1 else []), trusts]
    address, port = values.get("main_address"), values.get("main_port")
    if count == 1 and port is None and address in (None, "127.0.0.1"):
        return []  # as of a launch that was told nothing
    where = f"{address or '127.0.0.1'}:{port or (0 if count == 1 else 29500)}"
    rank = values.get("machine_rank", 0)
    return [f"connects as machine {rank} of {count} at {where}"]


@given(
    line=given_settings(),
    file=given_settings(),
    both=st.sampled_from(["line", "file"]),
)
def test_a_launch_is_what_its_settings_say(
    line: dict[str, Any], file: dict[str, Any], both: str
) -> None:
    """Each is the command line's, or the file's, or the default; together they can be, or not."""
    if both == "line":
        file = {name: value for name, value in file.items() if name in line}
    words = [f"{'--' + n.replace('_', '-')}={value}" for n, value in line.items()]
    with lent() as root:
        path = root / "settings.toml"
        path.write_text(edit_settings("", file), encoding="utf-8")
        sources = dict.fromkeys(OPTIONS, "default")
        sources |= dict.fromkeys(file, str(path)) | dict.fromkeys(line, "command line")
        out, err = StringIO(), StringIO()
        with (
            redirect_stdout(out),
            redirect_stderr(err),
            mock.patch.dict("os.environ", {"OMP_NUM_THREADS": "1"}),
        ):
            code = main(["launch", "--config", str(path), "--show", *words])
    bad = any(value in BAD[name] for name, value in file.items())
    values = {**file, **line}
    if bad or not may_be(values, sources):
        assert code == 2, out.getvalue()
        assert err.getvalue().count("\n") == 1
        return
    assert code == 0, err.getvalue()
    rows = out.getvalue().splitlines()
    for row, (name, option) in zip(rows, OPTIONS.items(), strict=False):
        value = values.get(name, option.default)
        shown = [] if value is None else [str(value)]
        assert row.split() == [name, *" ".join(shown).split(), *sources[name].split()]
    nproc = 1 if values.get("nproc", "auto") == "auto" else values["nproc"]
    least, _, most = values.get("elastic", "").rpartition(":")
    nproc = int(most) if least else nproc
    started = f"starts {nproc} process{'es' if nproc > 1 else ''} on this machine"
    goes_on = f"continues if ranks are killed, as long as {least} are left"
    more = [row for row in rows[len(OPTIONS) :] if not row.startswith("sets ")]
    assert more == [started, *meeting(values), *([goes_on] if least else [])]


@given(count=st.integers(1, 4), rank=st.integers(0, 5))
def test_a_machine_is_one_of_those_that_are_counted(count: int, rank: int) -> None:
    """Machines have the numbers from 0; another one would wait for others that have all come."""
    words = [f"--num-machines={count}", f"--machine-rank={rank}"]
    err = StringIO()
    with redirect_stdout(StringIO()), redirect_stderr(err):
        code = main(["launch", "--show", "--main-address=127.0.0.1", *words])
    assert code == (0 if rank < count else 2)
    assert (f"expected 0 to {count - 1}" in err.getvalue()) == (rank >= count)


@given(line=given_settings())
def test_machines_meet_as_they_were_told(line: dict[str, Any]) -> None:
    """What torch is given: numbers, counts, names and patience."""
    if not may_be(
        line, {"num_machines": "line" if "num_machines" in line else "default"}
    ):
        return
    found = Settings.of({n: str(value) for n, value in line.items()}, {}, "").machines()
    count = line.get("num_machines", 1)
    fewest, _, most = str(count).rpartition(":")
    assert (found.fewest, found.most) == (int(fewest or most), int(most))
    assert found.address == "127.0.0.1"
    if "rdzv_endpoint" in line:
        assert found.rank is None
        assert (found.endpoint, found.run_id) == (
            line["rdzv_endpoint"],
            line["rdzv_id"],
        )
        assert found.join_seconds == line.get("join_timeout", 300)
        return
    assert found.rank == line.get("machine_rank", 0)
    if {"main_address", "main_port"} & line.keys():
        assert found.join_seconds == line.get("join_timeout", 300)


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
