# SPDX-License-Identifier: Apache-2.0
"""`af.launch`: a function on ranks of its own, from a script or a notebook."""

import os
import signal
import subprocess
import sys
import textwrap
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


@pytest.mark.slow
def test_a_rank_that_raises():
    """The error begins with the culprit's traceback, which begins in the user's code."""

    def work(world):
        if world.rank == 1:
            raise ValueError("out of luck")
        af.barrier(world)

    with pytest.raises(af.errors.RankFailedError) as caught:
        af.launch(2, work, device="cpu")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("rank 1 failed first (exit code 1, pid ")
    assert lines[2].startswith(f'  File "{__file__}"')
    assert "ValueError: out of luck" in lines


@pytest.mark.slow
def test_what_cannot_come_back_or_go():
    """A result that is no plain data, and none at all, are named with the rank."""
    with pytest.raises(
        af.errors.RankFailedError, match="the result of rank 0 is a object"
    ):
        af.launch(1, lambda _: object(), device="cpu")
    with pytest.raises(
        af.errors.RankFailedError, match="rank 0 exited, .*without a result"
    ):
        af.launch(1, lambda _: sys.exit(0), device="cpu")
    lock = threading.Lock()
    with pytest.raises(af.errors.ArgumentError, match="cannot be pickled"):
        af.launch(1, lambda _: lock)


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "2", 10**9])
def test_a_number_of_ranks(size):
    """Anything but a whole number from 1 on is refused with its value."""
    with pytest.raises(af.errors.ArgumentError, match=r"number of ranks, 1 or more"):
        af.launch(size, print)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fn": 5}, r"launch\(2, 5\): expected a function"),
        ({"timeout": -1}, "timeout=-1.*positive number of seconds"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"timeout": "x"}, "timeout='x'"),
        ({"timeout": True}, "timeout=True"),
        (
            {"axes": {"dp_shard": 3}},
            "af.launch.*sizes, 3, is not the number of ranks, 2",
        ),
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
    fn = given.pop("fn", print)
    with pytest.raises(af.errors.ArgumentError, match=said):
        af.launch(2, fn, **given)


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


def test_a_rank_launches_none(monkeypatch):
    """A process that is one of several starts no others for each."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(af.errors.LaunchError, match=r"as one of 2 \(WORLD_SIZE=2\)"):
        af.launch(2, print)


def test_the_order_of_before_is_refused():
    """The number of ranks comes first, as in `simulate`."""
    with pytest.raises(
        af.errors.ArgumentError, match=r"first argument .*af.launch\(2, fn"
    ):
        af.launch(print, 2)
    with pytest.raises(af.errors.CallError, match=r"write af.launch\(2, fn, \*args\)"):
        af.launch(2, print, nproc=2)


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


@pytest.mark.slow
def test_a_thread_launches_too():
    """The ranks of a thread live as long as it does, and that is to the end of the call."""
    results = []

    def launch():
        results.extend(af.launch(2, lambda world: world.rank, device="cpu"))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join(HANGS)
    assert results == [0, 1]


CELLS = [
    """
    import torch
    import accelfn as af
    torch.ones(2, requires_grad=True).sum().backward()  # autograd has been used here
    shift = torch.tensor(10.0)
    """,
    """
    def train(world, lr):
        print("hello from", world.rank)
        state = af.TrainState.create(
            model=lambda: torch.nn.Linear(2, 1),
            optimizer=lambda named: torch.optim.SGD(named, lr=lr),
            setup=af.chain(af.shard_data(), af.wrap_ddp()),
            data=af.Data(torch.ones(8, 2), global_batch_size=4),
            world=world,
        )
        step = af.make_step(lambda model, batch: (model(batch) - shift).square().mean())
        for batch in af.batches(state, until_epoch=2):
            state, metrics = step(state, batch)
        return metrics.all_reduce_mean(world)["loss"]

    losses = af.launch(2, train, 0.01, device="cpu")
    assert losses[0] == losses[1] > 0
    """,
    """
    def fails(world):
        raise ValueError("in a cell")

    af.launch(1, fails, device="cpu")
    """,
]


@pytest.mark.slow
def test_a_notebook(tmp_path):
    """In a real kernel a cell's function trains on two ranks, whose lines the cell shows."""
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(text)) for text in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    cells[-1].metadata["tags"] = ["raises-exception"]
    NotebookClient(notebook, timeout=HANGS, kernel_name="python3").execute(
        cwd=str(tmp_path)
    )
    trained, failed = notebook.cells[1].outputs, notebook.cells[2].outputs
    shown = "".join(each.text for each in trained if each.output_type == "stream")
    assert "[rank 0] hello from 0" in shown
    assert "[rank 1] hello from 1" in shown
    (error,) = (each for each in failed if each.output_type == "error")
    assert error.ename == "RankFailedError"
    assert "rank 0 failed first" in error.evalue
    assert 'raise ValueError("in a cell")' in error.evalue  # the cell's own line
