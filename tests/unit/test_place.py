# SPDX-License-Identifier: Apache-2.0
"""Which rank this is, in the words of each launcher; what is contradictory is refused."""

import sys

import pytest

from accelfn.errors import WorldError
from tests.internals import asked_size, read_place
from tests.ranks.commands import run

MASTER = {"MASTER_ADDR": "head", "MASTER_PORT": "4000"}
WHERE = ("5", "8", "1", "4")


def mpi(*names: str) -> dict[str, str]:
    """Return what an MPI says by these names: rank, size, and the same of the machine."""
    return dict(zip(names, WHERE, strict=True))


NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
OPEN_MPI = mpi(*(f"OMPI_COMM_WORLD_{name}" for name in NAMES))
MVAPICH = mpi(*(f"MV2_COMM_WORLD_{name}" for name in NAMES))
PMI = mpi("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM = {
    "SLURM_PROCID": "5",
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "7"),
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],cpu1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
}
SHELL = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"}  # that of salloc
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", **MASTER}


def without(env, *names):
    return {name: value for name, value in env.items() if name not in names}


def test_each_step_of_slurm_meets_at_a_port_of_its_own():
    """At the first machine of its own, whatever machines its job has beside."""
    place = read_place(SLURM)
    assert place.address == "gpu07"
    assert 10_000 <= place.port < 30_000
    assert read_place({**SLURM, "SLURM_STEP_ID": "3"}).port != place.port
    assert asked_size(SLURM) == ("SLURM_STEP_NUM_TASKS", 7)
    env = {**SLURM, "SLURM_JOB_NODELIST": "gpu[01-12]", "SLURM_NODELIST": "gpu[01-12]"}
    assert read_place(env).address == "gpu07"
    assert read_place(without(env, "SLURM_STEP_NODELIST")).address == "gpu01"


def test_slurm_is_told_where_to_meet():
    """MASTER_ADDR and MASTER_PORT come before what SLURM says, each on its own."""
    for change, where in (
        (MASTER, ("head", 4000)),
        ({"MASTER_PORT": "5"}, ("gpu07", 5)),
        ({"MASTER_ADDR": "fe80::1", "MASTER_PORT": "5"}, ("fe80::1", 5)),
    ):
        place = read_place({**SLURM, **change})
        assert (place.address, place.port) == where


def test_first_machine_of_a_list():
    """Names with ranges are read as SLURM writes them."""
    for nodes, first in (
        ("node1", "node1"),
        ("a-1.b,c", "a-1.b"),
        ("rack[0-1]node[02-03],x", "rack0node02"),
        ("n[5,7-9]-ib,m[1-2]", "n5-ib"),
    ):
        assert read_place({**SLURM, "SLURM_STEP_NODELIST": nodes}).address == first


AGENTS = "TORCHELASTIC_USE_AGENT_STORE"
PODS = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "2"}
PYTORCH_JOB = {"RANK": "2", "WORLD_SIZE": "3", **MASTER, **PODS}
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
UNEVEN = {**TORCHRUN, "WORLD_SIZE": "3", **LOCAL, "RANK": "2"}
RAY = {"RANK": "3", "WORLD_SIZE": "4", **LOCAL, "NODE_RANK": "1", **MASTER}
SAGEMAKER = {
    **without(RAY, "NODE_RANK"),
    "GROUP_RANK": "1",
    "MASTER_ADDR": "algo-1",
    "MASTER_PORT": "7777",
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "2",
}
ALONE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "JOB_COMPLETION_INDEX": "2"}
INDEXED_JOB = {"RANK": "2", "WORLD_SIZE": "3", **ALONE, **MASTER}
TORCHRUN_JOB = {**PYTORCH_JOB, **RAY, "GROUP_RANK": "1"}
CLUSTERS = {
    "by hand": (TORCHRUN, (1, 2, 1, 2, 0)),
    "MVAPICH": ({**MVAPICH, **MASTER}, (5, 8, 1, 4, 1)),
    "PyTorchJob, python": (PYTORCH_JOB, (2, 3, 0, 1, 2)),
    "PyTorchJob, torchrun": (TORCHRUN_JOB, (3, 4, 1, 2, 1)),
    "Indexed Job": (INDEXED_JOB, (2, 3, 0, 1, 2)),
    "SageMaker": (SAGEMAKER, (3, 4, 1, 2, 1)),
}


@pytest.mark.parametrize("system", CLUSTERS)
def test_a_rank_of_a_cluster(system):
    """What each system sets in the environment gives the place that it means."""
    env, where = CLUSTERS[system]
    place = read_place(env)
    found = place.rank, place.size, place.local_rank, place.local_size, place.node_rank
    assert found == where
    assert asked_size(env)[1] == where[1]


def test_machines_that_ranks_do_not_fill_have_numbers():
    """Of uneven machines the number cannot be told from the ranks, and is asked for."""
    assert read_place({**UNEVEN, "NODE_RANK": "1"}).node_rank == 1


SCRIPT = {**SHELL, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
STEP = {**SCRIPT, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"}
IDS = {name: "0" for name in SLURM if name.endswith("ID")}
ONE_RANK = {
    "a script": {"SLURM_PROCID": "0"},
    "a script of one task": {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    "a step": {**SHELL, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "all of SLURM": {**IDS, **{name: "1" for name in SLURM if "TASKS" in name}},
    "a step of many machines": {
        **STEP,
        "SLURM_NTASKS": "1",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    },
    "MPICH": dict(zip(PMI, ("0", "1", "0", "1"), strict=True)),
}


@pytest.mark.parametrize("env", ONE_RANK.values(), ids=ONE_RANK)
def test_one_rank_meets_nobody(env):
    """A task alone, or the body of a batch script, is a world of 1 without a group."""
    place = read_place(env)
    assert place.is_alone
    assert place.address is None


ONE_POD = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}


@pytest.mark.parametrize(
    "env",
    [{}, {"SLURM_NTASKS": "4"}, SHELL, MASTER, ONE_POD, {"PET_NNODES": "1:4"}],
)
def test_no_launcher(env):
    """What srun or torchrun is to do is no rank, nor is the shell of an allocation of one task."""
    assert read_place(env) is None
    assert asked_size(env) == ("WORLD_SIZE", 1)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        *(
            (
                {**env, name: number},
                f"{name}={number}, but srun did not start.*srun.*acc",
            )
            for env in (SHELL, SCRIPT, STEP)
            for name, number in (("SLURM_NTASKS", "2"), ("SLURM_JOB_NUM_NODES", "3"))
        ),
        *(
            ({"PET_NNODES": nodes, "PET_NPROC_PER_NODE": each}, "did not st.*`torchrun")
            for nodes, each in (("3", "1"), ("1", "4"), ("2", "auto"))
        ),
    ],
)
def test_several_ranks_that_nobody_started(env, words):
    """Neither the script or shell of an allocation nor a pod trains alone in silence."""
    with pytest.raises(WorldError, match=words):
        read_place(env)
    assert asked_size(env)[1] == 1  # World.single() may


def test_the_innermost_launcher_is_believed():
    """torchrun comes before mpirun, mpirun before SLURM, and SLURM before its own PMI."""
    assert read_place({**SLURM, **OPEN_MPI, **TORCHRUN}).launcher == "torchrun"
    assert read_place({**SLURM, **OPEN_MPI, **MASTER}).launcher == "Open MPI"
    assert read_place({**SLURM, **PMI, **MASTER}).launcher == "MPICH or Intel MPI"
    with_pmi = {**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7"}
    assert read_place(with_pmi).launcher == "SLURM"


@pytest.mark.parametrize("env", [OPEN_MPI, MVAPICH, PMI])
def test_half_an_mpi_environment(env):
    """What is missing is named, and what is there."""
    rank, *others = env
    for name in (rank, *others):
        kept = without(env, name)
        if set(kept) & set(list(env)[:2]):
            with pytest.raises(WorldError, match=f"lacks {name}"):
                read_place({**kept, **MASTER})
    for name in MASTER:
        with pytest.raises(WorldError, match=f"Set {name} to .*: mpi.* {name}[ =]"):
            read_place({**env, **without(MASTER, name)})


def test_mpi_on_one_machine():
    """Ranks of one machine meet there; of a run that has a name, at a port of its own."""
    env = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "5"}
    env["OMPI_COMM_WORLD_LOCAL_SIZE"] = "8"
    place = read_place({**env, "MASTER_PORT": "5"})
    assert (place.address, place.port) == ("127.0.0.1", 5)
    names = "prterun-vm-1@1", "prterun-vm-2@1"
    places = [read_place({**env, "PMIX_NAMESPACE": name}) for name in names]
    assert {place.address for place in places} == {"127.0.0.1"}
    assert all(10_000 <= place.port < 30_000 for place in places)
    assert places[0].port != places[1].port
    with pytest.raises(WorldError, match=r"no job name \(PMIX_NAMESPACE\)"):
        read_place(env)


MISSING = {
    **{
        f"SLURM_{word}": f"lacks SLURM_{word}"
        for word in ("LOCALID", "NODEID", "NTASKS")
    },
    "SLURM_STEP_NUM_TASKS": "SLURM_NTASKS=7, but srun did not start",
    "SLURM_STEP_TASKS_PER_NODE": "lacks SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST": "lacks SLURM_STEP_NODELIST",
    "SLURM_JOB_ID": "lacks SLURM_JOB_ID and MASTER_PORT",
}
BY_MPI = {**OPEN_MPI, **MASTER}
CHANGES = [
    (BY_MPI, "OMPI_COMM_WORLD_RANK", "8", "OMPI_COMM_WORLD_RANK=8.*contradict"),
    (BY_MPI, "OMPI_COMM_WORLD_RANK", "-3", "OMPI_COMM_WORLD_RANK=-3.*contradict"),
    (BY_MPI, "OMPI_COMM_WORLD_RANK", "0", "are not consecutive"),
    (BY_MPI, "OMPI_COMM_WORLD_RANK", "two", "OMPI_COMM_WORLD_RANK is 'two'"),
    (BY_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "4", "contradict"),
    (BY_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "2", "consecutive.*map-by slot.*GROUP_RANK"),
    (BY_MPI, "OMPI_COMM_WORLD_SIZE", "7", "different numbers of ranks.*GROUP_RANK"),
    (BY_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "0", "contradict"),
    (BY_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "9", "contradict"),
    (BY_MPI, "MASTER_PORT", "http", "MASTER_PORT is 'http'"),
    (SLURM, "SLURM_PROCID", "7", "SLURM_PROCID=7.*contradict"),
    (SLURM, "SLURM_LOCALID", "2", "SLURM_LOCALID=2.*contradict"),
    (SLURM, "SLURM_NODEID", "4", "SLURM_NODEID=4 .*contradict"),
    (SLURM, "SLURM_STEP_TASKS_PER_NODE", "2(x2)", "SLURM_NTASKS=7.*contradict"),
    (SLURM, "SLURM_STEP_TASKS_PER_NODE", "two", "'two'; expected text such as"),
    (SLURM, "SLURM_STEP_NODELIST", "[", "expected a list such as"),
    (SLURM, "SLURM_STEP_NUM_TASKS", "1", "SLURM_NTASKS=7, but srun did not start"),
    (SLURM, "SLURM_STEP_NUM_TASKS", "6", "SLURM_STEP_NUM_TASKS=6.*contradict"),
    (SLURM, "PMI_RANK", "4", "SLURM_PROCID=5 and PMI_RANK=4 contradict"),
    # WORLD_SIZE counts the ranks and RANK the pods, so torchrun is to be started
    (PYTORCH_JOB, "WORLD_SIZE", "6", "PET_NNODES=3 and WORLD_SIZE=6.*`torchrun"),
    (UNEVEN, "LOCAL_RANK", "1", "are not consecutive.*GROUP_RANK"),
]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        *((without(SLURM, name), words) for name, words in MISSING.items()),
        *(({**env, name: value}, words) for env, name, value, words in CHANGES),
    ],
)
def test_an_environment_that_says_too_little_or_contradicts_itself(env, words):
    """What is missing is named, values that cannot be together are shown, nothing is made up."""
    with pytest.raises(WorldError, match=words):
        read_place(env)


@pytest.mark.slow
def test_a_world_that_nobody_closes_is_closed_at_the_end():
    """The interpreter's end closes it, before torch would abort the process."""
    code = (
        "import atexit, socket, torch.distributed as dist, accelfn as af\n"
        "atexit.register(lambda: print('open', dist.is_initialized()))\n"
        "world = af.World.from_env(device='cpu')\n"
        "print('open', dist.is_initialized())"
    )
    env = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    done = run(sys.executable, "-c", code, **env)
    assert done[:2] == (0, "open True\nopen False\n"), done


@pytest.mark.parametrize(
    ("said", "has_store"),
    [({}, False), ({AGENTS: "False"}, False), ({AGENTS: "True"}, True)],
)
def test_torchrun_says_whether_it_has_a_store(said, has_store):
    """Where it says that it has none, rank 0 opens one; and so it does where nothing is said."""
    assert read_place({**TORCHRUN, **said}).has_store is has_store
