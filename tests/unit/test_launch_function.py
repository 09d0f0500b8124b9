# SPDX-License-Identifier: Apache-2.0
"""`af.launch`: a function on ranks of its own, from a script or a notebook."""

import os
import signal
import subprocess
import sys
import threading

import nbformat
import pytest
import torch
import torch.distributed as dist
from nbclient import NotebookClient

import accelfn as af
from tests.internals import devices
from tests.waiting import HANGS

pytestmark = pytest.mark.ranks(2)


def observed():
    """Return what a launch might have changed in this process."""
    signals = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
    return (
        dict(os.environ),
        [signal.getsignal(number) for number in signals],
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
        dist.is_initialized(),
    )


@pytest.mark.slow
def test_results_and_surroundings(capfd):
    """A closure over a tensor travels, results come back by rank, this process is as it was."""
    given = torch.arange(3.0)

    def work(world, factor):
        torch.manual_seed(0)
        os.environ["CHANGED"] = "1"
        sys.stdout.write(f"rank {world.rank} works\n")
        return {
            "sum": af.all_reduce(given * factor * world.rank, world),
            "n": world.size,
            "waits": world.connection.timeout(world.device),
            "axes": dict(world.axes),
        }

    before, axes = observed(), {"dp_shard": -1}
    first, second = af.launch(2, work, 2.0, device="cpu", timeout=77, axes=axes)
    assert observed() == before
    for found in (first, second):
        assert found["n"] == 2
        assert found["waits"] == 77.0
        assert found["axes"] == {"dp_shard": 2}
        assert found["sum"].equal(given * 2.0)
    out = capfd.readouterr().out
    assert sorted(out.splitlines()) == [
        "[rank 0] rank 0 works",
        "[rank 1] rank 1 works",
    ]


def fails(world):
    if world.rank == 1:
        raise ValueError("out of luck")
    af.barrier(world)


LOCK = threading.Lock()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "fn", "said"),
    [
        # the traceback of the culprit comes first, and begins in the user's code
        (
            2,
            fails,
            (
                rf"(?s)^rank 1 failed first \(exit code 1, pid .*\n.*\n  File \"{__file__}\".*"
                "\nValueError: out of luck\n"
            ),
        ),
        (1, lambda _: object(), "the result of rank 0 is a object"),
        (1, lambda _: sys.exit(0), "rank 0 exited, .*without a result"),
    ],
)
def test_a_rank_that_fails_is_named(size, fn, said):
    """It raises, its result is no plain data, or it has none at all."""
    with pytest.raises(af.errors.RankFailedError, match=said):
        af.launch(size, fn, device="cpu")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(
            ({"size": size}, "number of ranks, 1 or more")
            for size in (0, -1, 1.0, True, "2", 10**9)
        ),
        ({"size": print, "fn": 2}, r"first argument .*af.launch\(2, fn"),
        ({"nproc": 2}, r"write af.launch\(2, fn, \*args\)"),
        ({"fn": 5}, r"launch\(2, 5\): expected a function"),
        ({"fn": lambda _, lock=LOCK: lock}, "cannot be pickled"),
        ({"timeout": -1}, "timeout=-1.*positive number of seconds"),
        *(
            ({"timeout": timeout}, f"timeout={timeout!r}")
            for timeout in (0, float("nan"), float("inf"), "x", True)
        ),
        ({"axes": {"dp_shard": 3}}, "af.launch.*3, is not the number of ranks, 2"),
        ({"axes": {"dp": 2}}, "'dp' is not an axis"),
        ({"device": "foo"}, "device='foo'.*torch does not know this device"),
        ({"device": 1.5}, "device=1.5.*torch does not know this device"),
        ({"device": "meta"}, "device='meta'.*its tensors have no values"),
        ({"device": "xla"}, "torch_xla.*TorchTPU"),
        ({"device": "cuda:99"}, "needs 100 devices of type 'cuda', but torch sees"),
    ],
)
def test_what_no_rank_could_do(monkeypatch, given, said):
    """It is refused before any process is started."""
    monkeypatch.setattr("accelfn.launching.function.run_here", None)
    size, fn = given.pop("size", 2), given.pop("fn", print)
    with pytest.raises((af.errors.ArgumentError, af.errors.CallError), match=said):
        af.launch(size, fn, **given)


def test_a_rank_launches_none(monkeypatch):
    """A process that is one of several starts no others for each."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(af.errors.LaunchError, match=r"as one of 2 \(WORLD_SIZE=2\)"):
        af.launch(2, print)


def test_more_ranks_than_devices(monkeypatch):
    """Each rank has a device of its own where there are some, unless it is told otherwise."""
    monkeypatch.setattr("accelfn.launching.function.run_here", None)
    monkeypatch.setattr(devices, "count", lambda: 2)
    monkeypatch.setattr(devices, "kind", lambda: "xpu")
    for device in (None, "xpu"):
        with pytest.raises(
            af.errors.ArgumentError, match="needs 3 devices of .*, but torch sees 2"
        ):
            af.launch(3, print, device=device)


@pytest.mark.slow
def test_a_script_needs_no_guard(tmp_path):
    """A function of the script that runs goes by value: the script is not run again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import accelfn as af\nk = 3\ndef f(world):\n    return k * world.rank\n"
        "print(af.launch(2, f, device='cpu'))\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS,
    )
    assert done.stdout == "[0, 3]\n", done.stderr


CELL = """
import torch
import accelfn as af
torch.ones(2, requires_grad=True).sum().backward()  # autograd has been used here

def fails(world):
    raise ValueError("in a cell")

af.launch(1, fails, device="cpu")
"""


@pytest.mark.slow
def test_a_notebook(tmp_path):
    """In a real kernel the error of a cell's function shows the cell's own line."""
    cell = nbformat.v4.new_code_cell(CELL)
    cell.metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=[cell])
    client = NotebookClient(notebook, timeout=HANGS, kernel_name="python3")
    client.execute(cwd=str(tmp_path))
    (error,) = (each for each in cell.outputs if each.output_type == "error")
    assert error.ename == "RankFailedError"
    assert "rank 0 failed first" in error.evalue
    assert 'raise ValueError("in a cell")' in error.evalue
