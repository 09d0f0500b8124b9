# SPDX-License-Identifier: Apache-2.0
"""`World`: what the environment says, honoured or refused."""

import itertools
import math
import os
import re
import threading
import time
from contextlib import redirect_stderr
from functools import partial
from io import StringIO

import attrs
import pytest
import torch
import torch.distributed as dist

import accelfn as af
from accelfn.errors import AccelfnWarning, ArgumentError, PeerFailedError, WorldError
from tests.internals import Connection, RollCall, meeting, read_place, world
from tests.ports import free_port
from tests.states import linear_state
from tests.unit.test_place import OPEN_MPI, SLURM

NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELFN_AXES"),
)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def env(monkeypatch):
    """Return a function that sets the variables of a world, and only those."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def put(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return put


def rendezvous():
    """Return an address that nobody listens at yet."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}


def test_single_process_without_variables(env):
    """Without RANK and WORLD_SIZE, from_env is the world of one process."""
    env()
    world = af.World.from_env(device="cpu")
    assert (world.rank, world.size, world.group, world.is_main) == (0, 1, None, True)


def test_world_of_one_opens_and_closes_a_group(env):
    """With RANK=0 of WORLD_SIZE=1 a group is opened, and closed by the block."""
    env(RANK=0, WORLD_SIZE=1, **rendezvous())
    with af.World.from_env(device="cpu") as world:
        with world.split(size=1):
            pass  # a part is closed with its world
        assert dist.is_initialized()
        assert world.group is dist.group.WORLD
        asking = af.World.from_env(device="cpu", checked=True)
        assert (world.checked, asking.checked) == (False, True)
    assert not dist.is_initialized()
    world.close()  # twice is once


def test_axes_of_the_launcher(env):
    """A script that names no axes has the launcher's; an empty variable is none."""
    env(ACCELFN_AXES="tp=1,dp_shard=-1")
    world = af.World.from_env(device="cpu")
    assert list(world.axes.items()) == [("dp_shard", 1), ("tp", 1)]
    env(ACCELFN_AXES="")
    assert af.World.from_env(device="cpu").axes == {}


def test_open_group_is_used_and_left_open(env):
    """A group that is open already is used, and not closed by the block."""
    env(RANK=0, WORLD_SIZE=1, **rendezvous())
    dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        with af.World.from_env(device="cpu") as world:
            assert world.group is dist.group.WORLD
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_open_group_of_another_size_is_refused(env):
    """A group that contradicts the environment is named with both, and what to do."""
    env(RANK=0, WORLD_SIZE=1, **rendezvous())
    dist.init_process_group("gloo", rank=0, world_size=1)
    env(RANK=1, WORLD_SIZE=2)
    try:
        with pytest.raises(WorldError, match=r"rank 0 of 1.*RANK=1.*destroy"):
            af.World.from_env(device="cpu")
    finally:
        dist.destroy_process_group()


ALONE = {"RANK": 0, "WORLD_SIZE": 1}
TWO = {"RANK": 0, "WORLD_SIZE": 2}
FOUR = {"RANK": 0, "WORLD_SIZE": 4}
REFUSED = [
    ({"RANK": 0}, {}, "has RANK but lacks WORLD_SIZE, MASTER_ADDR.*torchrun"),
    ({"WORLD_SIZE": 2}, {}, "has WORLD_SIZE but lacks RANK.*accelfn launch"),
    (TWO, {}, "lacks MASTER_ADDR, MASTER_PORT"),
    ({"RANK": 2, "WORLD_SIZE": 2}, {}, "RANK=2, WORLD_SIZE=2, .*contradict"),
    ({"RANK": -1, "WORLD_SIZE": 2}, {}, "RANK=-1, WORLD_SIZE=2, .*contradict"),
    ({"RANK": 0, "WORLD_SIZE": 0}, {}, "RANK=0, WORLD_SIZE=0, .*contradict"),
    ({"RANK": "one", "WORLD_SIZE": 2}, {}, "RANK is 'one'.*integer"),
    ({"RANK": 0, "WORLD_SIZE": "2.0"}, {}, "WORLD_SIZE is '2.0'.*integer"),
    ({"RANK": 0, "WORLD_SIZE": ""}, {}, "WORLD_SIZE is ''.*integer"),
    ({**ALONE, "LOCAL_RANK": "x"}, {}, "LOCAL_RANK is 'x'"),
    (
        {**TWO, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 1},
        {},
        "LOCAL_RANK=1, LOCAL_WORLD_SIZE=1.*contradict",
    ),
    (
        {**TWO, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4},
        {},
        "LOCAL_WORLD_SIZE=4 contradict",
    ),
    *(
        ({**ALONE, "MASTER_PORT": port}, {}, "MASTER_PORT is")
        for port in ("http", "65536", "-1")
    ),
    *(
        (ranks, {"backend": "no_such_backend"}, "'no_such_backend'.*gloo")
        for ranks in ({}, ALONE)
    ),
    (
        {**FOUR, "ACCELFN_AXES": "dp_shard=2,dp_replicate=2"},
        {"axes": {"dp_shard": 4}},
        r"axes=\{'dp_shard': 4\}\) and ACCELFN_AXES=dp_shard=2,dp.*name different axes",
    ),
    (
        {**FOUR, "ACCELFN_AXES": "dp_shard=3"},
        {},
        "ACCELFN_AXES=dp_shard=3: the product of the sizes, 3",
    ),
    *(
        (ALONE, {"timeout": timeout}, "timeout=.*positive")
        for timeout in (0, -1.0, math.nan, math.inf, "60", True)
    ),
]


@pytest.mark.parametrize(("variables", "options", "words"), REFUSED)
@pytest.mark.filterwarnings("ignore:Device capability of no_such_backend unknown")
def test_what_is_missing_malformed_or_contradictory(env, variables, options, words):
    """A variable or an option is named with its value, before anything is opened."""
    address = rendezvous() if variables and "lacks" not in words else {}
    env(**{**address, **variables})
    is_argument = options.keys() & {"axes", "timeout"} or "ACCELFN_AXES" in variables
    with pytest.raises(ArgumentError if is_argument else WorldError, match=words) as it:
        af.World.from_env(device="cpu", **options)
    assert isinstance(it.value, RuntimeError) != bool(is_argument)
    assert not dist.is_initialized()


@pytest.mark.parametrize("launched", [TWO, OPEN_MPI, SLURM], ids=["two", "mpi", "srun"])
def test_a_world_of_one_does_not_hide_a_world_of_many(env, launched):
    """World.single() and create without world= are refused, and World() warns."""
    env(**launched)
    for alone in (partial(af.World.single, device="cpu"), linear_state):
        with pytest.raises(WorldError, match=r"is \d: each of the.*from_env"):
            alone()
    with pytest.warns(AccelfnWarning, match=r"is \d.*from_env"):
        af.World()


@no_gpu
@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (
            ["cuda", "cuda:1", torch.device("cuda", 0)],
            r"cuda:\d.*0 devices of this type",
        ),
        (["mps"], "mps"),
        (["xpu"], "xpu"),
        (["meta"], "meta"),
        (["nonsense"], "nonsense"),
        # torch_xla ends before this torch begins; what is there for TPUs now is named
        (["xla", "xla:0", torch.device("xla", 1)], r"torch_xla's .* 2\.9.*TorchTPU"),
    ],
)
def test_a_device_that_is_not_there(env, devices, words):
    """One that torch has not here, or that holds no values, is never replaced by the CPU."""
    env()
    for device in devices:
        for make in (af.World.single, af.World.from_env):
            with pytest.raises(WorldError, match=words):
                make(device=device)


def test_a_device_that_no_backend_joins():
    """Ranks of a device that torch.distributed knows nothing of are refused by name."""
    for kind, backend in (("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")):
        assert meeting._backend(torch.device(kind)) == backend
    with pytest.raises(
        WorldError, match=r"no default backend for .* 'maia'.*backend=.*maia:"
    ):
        meeting._backend(torch.device("maia"))


@no_gpu
def test_backend_that_cannot_be_had(env):
    """NCCL on a machine without a GPU is refused, not replaced."""
    env(RANK=0, WORLD_SIZE=1, **rendezvous())
    try:
        with pytest.raises(WorldError, match="nccl"):
            af.World.from_env(backend="nccl", device="cpu")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("rank", "who", "says"),
    [
        (0, "rank 1, 2", "no process connected as rank 1, 2 within 1 s"),
        (1, "rank 0", r"no process listens at 127.0.0.1:\d+ after [\d.]+ s"),
    ],
)
def test_rank_that_waits_alone(env, monkeypatch, capfd, rank, who, says):
    """Where others never come, the timeout ends the wait, and they are named, before too."""
    monkeypatch.setattr(meeting, "_SAYS_AFTER", 0.3)
    began = time.monotonic()
    env(RANK=rank, WORLD_SIZE=3, **rendezvous())
    with pytest.raises(WorldError, match=rf"Rank {rank} of 3 .*: {says}"):
        af.World.from_env(timeout=1, device="cpu")
    assert not dist.is_initialized()
    assert time.monotonic() - began < 10
    line = rf"accelfn: rank {rank} of 3 waits for {who} at 127.0.0.1:\d+, for [01] s more\."
    found = re.findall(r"^accelfn:.*$", capfd.readouterr().err, re.MULTILINE)
    assert [bool(re.fullmatch(line, each)) for each in found] == [True]


def test_all_parts_of_a_meeting_share_one_deadline(monkeypatch):
    """A rank that came and is never joined costs the others no more than one that never came."""
    monkeypatch.setattr(meeting, "_SAYS_AFTER", 2.5)
    monkeypatch.setattr(meeting, "_worlds", itertools.repeat(0))  # of two processes
    port = str(free_port())
    words = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in {**words, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    place = attrs.evolve(read_place(os.environ), rank=1)

    def come_late() -> None:
        time.sleep(2)
        meeting._meet(meeting.Meeting(place, 30.0))

    other = threading.Thread(target=come_late)
    other.start()
    began = time.monotonic()
    said = "Rank 0 of 2 cannot open a 'gloo' process"
    with (
        redirect_stderr(StringIO()) as err,
        pytest.raises(WorldError, match=said),
    ):
        af.World.from_env(timeout=3, device="cpu")
    other.join()
    assert time.monotonic() - began < 4.5  # the timeout once, and not anew
    assert "accelfn: rank 0 of 2 waits for rank 1 at" in err.getvalue()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with af.World.from_env(timeout=7, device="cpu", axes={"dp_shard": 1}) as world:
        assert world.connection.timeout(world.device) == 7


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rank": 1, "size": 1}, WorldError, r"0 to 0(?!.*to -1)"),
        ({"rank": -1, "size": 1}, WorldError, r"rank=-1(?!.*to -1)"),
        ({"rank": 0, "size": 0}, WorldError, r"size=0(?!.*to -1)"),
        ({"size": 2}, WorldError, r"size=2.*process group.*from_env"),
        ({"group": "gloo"}, ArgumentError, r"group='gloo'.*ProcessGroup"),
    ],
)
def test_a_record_that_cannot_be(options, error, words):
    """A rank outside its world, many without a group, and what is none, are named."""
    with pytest.raises(error, match=words):
        af.World(**options)


def test_a_rank_that_is_never_joined_closes_the_world(env, monkeypatch):
    """Who was joined waits until all are; if one never is, its name is told and nothing stays."""
    env(RANK=0, WORLD_SIZE=2, **rendezvous())
    store = dist.HashStore()
    roll_call = RollCall(store, 0, 2, rank_0_keeps_it=False)
    joined = Connection(dist.ProcessGroup(0, 2), roll_call=roll_call)
    joined.own()
    monkeypatch.setattr(world, "join", lambda *_, **__: joined)
    with pytest.raises(PeerFailedError, match=r"Rank 0 of 2 .* but rank 1 did not"):
        af.World.from_env(timeout=0.1, device="cpu")
    assert joined.is_closed
    heard = RollCall(store, 1, 2, rank_0_keeps_it=False).hear()
    assert heard[0].how.startswith(
        "raised PeerFailedError: Rank 0 of 2 opened its world"
    )
