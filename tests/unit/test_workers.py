# SPDX-License-Identifier: Apache-2.0
"""Worker processes that are killed, hang or raise: who, when and what is said at once."""

import gc
import multiprocessing
import os
import re
import signal
import time
import warnings
from functools import partial

import attrs
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import accelfn as af
from accelfn.testing import simulate
from tests.internals import loaders
from tests.states import linear_state, read
from tests.waiting import is_gone, wait_until

# torch looks for the cause of a death by opening a file, where SIGCHLD's handler may raise
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    # a message that was being pickled when a worker was killed, on Python 3.13
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in.*BytesIO:pytest.PytestUnraisableExceptionWarning"
    ),
]


@pytest.fixture(autouse=True)
def collected():
    """Drop what torch opened to look for the cause when a worker's death interrupted it."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def of(dataset, size=4, workers=1, **options):
    return af.Data(dataset, global_batch_size=size, num_workers=workers, **options)


def raises(words, kind=af.errors.DataError):
    return pytest.raises(kind, match=words)


def said_by(error):
    """Return the words and notes of an exception that was raised."""
    return str(error.value) + "".join(getattr(error.value, "__notes__", ()))


def processes():
    """Return the processes that this one has started and that still run."""
    return {child.pid for child in torch.multiprocessing.active_children()}


class Noted:
    """Says in a file in which process it was finalized."""

    def __init__(self, file):
        self.itself, self.file = self, file

    def __del__(self):
        with self.file.open("a") as file:
            file.write(f"{os.getpid()} ")


class Collecting(Dataset):
    """Collects garbage for each sample."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        gc.collect()
        return torch.tensor([float(index)])


class CollectingStream(IterableDataset):
    """The same as a stream."""

    def __iter__(self):
        return map(Collecting().__getitem__, range(4))


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Collecting(), CollectingStream()])
def test_a_worker_leaves_the_garbage_of_its_parent_alone(dataset, tmp_path):
    """It is finalized once, and where its threads are."""
    file = tmp_path / "finalized"
    gc.collect()
    gc.disable()
    try:
        Noted(file)
        read(of(dataset, 2))
        assert not file.exists()
        gc.collect()
    finally:
        gc.enable()
    assert file.read_text().split() == [str(os.getpid())]


def test_another_fork_is_as_python_makes_it():
    """What the program forks itself keeps its garbage collector's whole work."""
    before = gc.get_freeze_count()
    loaders._leave_garbage()
    assert gc.get_freeze_count() == before


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(1000)


def leave():
    os._exit(3)


def end_later():
    """Be killed once what was read before has come."""
    time.sleep(0.5)
    kill()


def raising(error):
    """Return a function that raises an error."""

    def plant():
        raise error

    return plant


class Items(Dataset):
    """Ten samples, of which the eighth does something else."""

    def __init__(self, does):
        self.does = does

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 7:
            self.does()
        return torch.tensor([float(index)])


class Many(Items):
    def __getitems__(self, wanted):
        return [self[index] for index in wanted]


class Stream(IterableDataset):
    """The same, as a stream."""

    def __init__(self, does):
        self.does = does

    def __iter__(self):
        for index in range(10):
            if index == 7:
                self.does()
            yield torch.tensor([float(index)])


KINDS = {
    "items": (Items, {}, r"dataset indices:\n(  \[.*\]\n)*  \[4, 5, 6, 7\]"),
    "many": (Many, {}, r"dataset indices:\n(  \[.*\]\n)*  \[4, 5, 6, 7\]"),
    "stream": (Stream, {}, r"the stream from sample \d+ of epoch 0 on"),
    "sharded": (Stream, {"sharded": True}, r"rank 0's own stream, in epoch 0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("does", "words"), [(kill, "pid"), (leave, "pid"), (hang, "0.5 s (timeout=)")]
)
def test_a_worker_that_ends_or_hangs(kind, does, words):
    """Rank, update and what was being read are named, with torch's own word for it."""
    make_dataset, options, being_read = KINDS[kind]
    timeout = 0.5 if does is hang else 300  # an end is noticed without it
    data = of(make_dataset(does), workers=2, timeout=timeout, **options)
    with raises(r"rank 0 of 1.*update \d+ was complete") as error:
        read(data)
    error.match(f"{re.escape(words)}|before this process received")
    error.match(being_read)
    assert error.value.__cause__ is not None


def test_rank_and_update_are_those_of_the_state():
    """A resumed rank's error names its own rank, and the update that the state makes."""
    data = of(Items(kill))
    _, state = simulate(2, lambda world: linear_state(data=data, world=world))
    state = attrs.evolve(state, step=41, cursor=af.typing.Cursor(0, 4))
    with raises("rank 1 of 2.*update 41 was complete") as error:
        list(af.batches(state, until_epoch=1))
    error.match(r"\[4, 5, 6, 7\]\n  \[8, 9\]")


@pytest.mark.parametrize("kind", KINDS)
def test_the_update_that_was_due_is_named(kind):
    """It is that of the state and as many more as batches have come."""
    make_dataset, options, _ = KINDS[kind]
    data = of(make_dataset(end_later), 2, **options)
    state, came = attrs.evolve(linear_state(data=data), step=41), list[af.Batch]()
    with raises("the batch of update") as error:
        came.extend(af.batches(state, until_epoch=1))
    assert came
    ahead = kind == "sharded"  # where one more is read, to know which is the last
    error.match(f"the batch of update {41 + len(came) + ahead} was complete")


def test_a_worker_that_ends_while_the_step_computes():
    """Its end is raised where the next batch is asked for, not in the middle of a step."""
    state = linear_state(data=of(Items(kill), 1))
    computed, before = [], processes()

    def loop():
        for batch in af.batches(state, until_epoch=1):
            (worker,) = processes() - before
            if batch.indices == 5:  # the sample that kills is asked for
                # handlers run between any two of these, SIGCHLD's too
                wait_until(partial(is_gone, worker))
            computed.append(batch.indices.tolist())

    with raises("SIGKILL|exited unexpectedly|ended before this process received"):
        loop()
    assert computed in ([[index] for index in range(num)] for num in (6, 7))


def test_micro_batches_in_flight():
    """What was being read is listed by micro-batch, and a long list is cut."""
    data = of(Items(hang), 10, timeout=0.5)
    with raises(r"\[0, 1, 2, 3, 4, 5, 6, 7, \.\.\.\]"):
        read(data)
    with raises(r"\n  \[5, 6, 7, 8, 9\]$"):
        read(data, setup=af.accumulate(num_micro_batches=2))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("items", r"Items\[7\] raised .* sample at dataset index 7"),
        ("many", r"Many\.__getitems__\(\[4, 5, 6, 7\]\)"),
        ("stream", r"Stream raised .* sample 7 of epoch 0"),
        ("sharded", r"Stream raised .* sample 7 of epoch 0"),
    ],
)
def test_a_dataset_that_raises(kind, note, workers):
    """Its own exception arrives, with its traceback and the index of the sample."""
    make_dataset, options, _ = KINDS[kind]
    data = of(make_dataset(raising(KeyError("planted"))), 4, workers, **options)
    with raises("planted", KeyError) as error:
        read(data)
    assert workers == 0 or "in plant" in said_by(error)  # the other process's traceback
    assert re.search(note, said_by(error))


LIKE_A_WORKERS = RuntimeError("planted in DataLoader worker process")


@pytest.mark.parametrize("planted", [LIKE_A_WORKERS, FileNotFoundError("planted")])
@pytest.mark.parametrize("kind", ["items", "stream"])
def test_errors_that_look_like_a_failed_worker(kind, planted):
    """A dataset's own RuntimeError or OSError is not taken for the end of a worker."""
    with raises("planted", type(planted)) as error:
        read(of(KINDS[kind][0](raising(planted))))
    assert not isinstance(error.value, af.errors.Error)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["items", "many"])
def test_stop_iteration_does_not_end_the_epoch(kind, workers):
    """A dataset that raises StopIteration fails; no loader takes it for the end."""
    with raises("StopIteration", RuntimeError):
        read(of(KINDS[kind][0](raising(StopIteration)), 4, workers))


def refuse(samples):
    message = f"planted over {len(samples)}"
    raise ValueError(message)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_do_not_collate(workers):
    """An error, the collate function's own too, says of which samples a batch was made."""
    with raises("planted over 4", ValueError) as error:
        read(of(Items(int), collate=refuse, workers=workers))
    said = "made a batch of the samples at dataset indices [0, 1, 2, 3]"
    assert said in said_by(error)
    samples = [torch.ones(1), torch.ones(1), torch.ones(2), torch.ones(1)]
    with raises("size", RuntimeError) as error:
        read(of(samples, 2, workers))
    assert "indices [2, 3]" in said_by(error)


def nothing(_samples):
    return None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_that_returns_nothing(workers):
    """What it returns is the batch's value, whatever it is; a step then refuses it."""
    data = of(Items(int), 5, workers, collate=nothing)
    assert [batch.value for batch in read(data)] == [None, None]
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    with pytest.raises((TypeError, AttributeError, af.errors.Error)):
        step(linear_state(data=data), read(data)[0])


def unsendable(_samples):
    return lambda: None


def test_a_batch_that_cannot_be_sent(capfd):
    """What cannot be pickled is said to be a reason why a worker gave nothing."""
    said = ""
    for timeout in (0.5, 5.0, 50.0):  # until the worker had time to try
        with raises(r"\d s.*cannot be sent to another"):
            read(of(Items(int), 5, collate=unsendable, timeout=timeout))
        said += capfd.readouterr().err
        if "pickle" in said.lower():  # Python 3.13 names the pickler, not the act
            return
    pytest.fail(said)


@pytest.fixture
def forkserver():
    """Let Python start processes as it does since 3.14 if nobody says how."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("forkserver")
def test_a_dataset_that_cannot_be_sent():
    """Where workers get the dataset pickled, it is said who could not be started, and why."""
    told = r"(?s)of rank 0 of 1 could not be started for update 0: .*pickle.*\"fork\""
    with raises(told):
        read(of(Items(lambda: None), 5))


def test_breaking_off_ends_the_workers():
    """A loop that is left leaves no process behind."""
    before = processes()
    for _ in af.batches(linear_state(data=of(Items(int), 1, 2))):
        assert len(processes() - before) == 2
        break
    assert not processes() - before


def test_more_workers_than_there_can_be():
    """B8: a number that no machine has cores for is refused, and no process is started."""
    for number in (2**63, 4097):
        with raises("from 0 to 4096", af.errors.ArgumentError):
            of(torch.ones(4, 1), 2, number)


@pytest.mark.parametrize("size", [1, 2])
def test_more_workers_than_cores(size):
    """B8: it is told where reading begins, in simulated worlds too; as many as cores are not."""
    cores, ones = len(os.sched_getaffinity(0)), torch.ones(4, 1)
    simulate(size, lambda world: read(of(ones, 2, min(cores, 2)), world=world))
    words = rf"use only {cores} cores(.|\n)*={cores} or"
    with pytest.warns(af.errors.AccelfnWarning, match=words) as told:
        simulate(size, lambda world: read(of(ones, 2, cores + 1), world=world))
    kinds = [issubclass(each.category, af.errors.AccelfnWarning) for each in told]
    assert sum(kinds) == 1
