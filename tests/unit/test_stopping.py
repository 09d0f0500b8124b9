# SPDX-License-Identifier: Apache-2.0
"""`stopping`: signals are noted, agreed at a step's end, and then end the process."""

# ruff: noqa: PT012, TRY301 - it is the whole block that is left or raised from

import signal
import threading
from signal import SIGINT, SIGTERM, SIGUSR1

import pytest
import torch

import accelfn as af
from tests.states import linear_state

WORLD = af.World.single()


@pytest.fixture
def came():
    """Return the signals that come to this process's handlers, which are there afterwards."""
    found, numbers = [], (SIGTERM, SIGINT, SIGUSR1)
    before = [signal.signal(n, lambda number, _: found.append(number)) for n in numbers]
    ours = [signal.getsignal(number) for number in numbers]
    yield found
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == ours


def test_a_signal_ends_the_block_with_its_code(came):
    """SIGTERM is noted, is what was requested, and leaving is exit code 143.

    Schedulers send it twice; the save that the first led to is finished.
    """
    with pytest.raises(SystemExit) as ended, af.stopping(WORLD) as stop:
        assert not stop.requested()
        signal.raise_signal(SIGTERM)
        assert stop.signal is None  # before it is asked for, at which ranks agree on it
        for _ in range(2):
            assert stop.requested()
            assert stop.signal is SIGTERM
            signal.raise_signal(SIGTERM)
        assert stop.requested()
    assert (ended.value.code, came) == (143, [])


def test_a_second_interrupt_interrupts():
    """The first Ctrl-C is noted, the second raises KeyboardInterrupt at once."""
    with pytest.raises(KeyboardInterrupt), af.stopping(WORLD) as stop:
        signal.raise_signal(SIGINT)
        assert stop.requested()
        signal.raise_signal(SIGINT)


@pytest.mark.parametrize("how", ["left", "raised", "asked"])
def test_handlers_are_put_back(came, how):
    """However the block ends, the process's handlers are what they were."""
    asked = (SIGTERM, SIGINT, SIGUSR1)
    before = {signal.getsignal(each) for each in asked}
    try:
        with af.stopping(WORLD, signals=[*asked, SIGUSR1]) as stop:
            assert not {signal.getsignal(each) for each in asked} & before
            if how == "raised":
                raise KeyError
            if how == "asked":
                signal.raise_signal(SIGUSR1)
                assert stop.requested()
    except (KeyError, SystemExit):
        assert how != "left"
    assert came == []


def test_a_signal_that_nobody_asked_for_comes_again(came):
    """What came after the last request is not lost: it comes as the block is left."""
    with af.stopping(WORLD) as stop:
        assert not stop.requested()
        signal.raise_signal(SIGTERM)
        assert came == []
    assert came == [SIGTERM]
    with pytest.raises(SystemExit), af.stopping(WORLD) as outer:
        with af.stopping(WORLD):
            signal.raise_signal(SIGTERM)
        assert outer.requested()
    assert came == [SIGTERM]


@pytest.mark.parametrize(
    ("number", "error", "again"),
    [
        (SIGTERM, KeyError(), True),
        (SIGTERM, SystemExit(), True),
        (SIGTERM, KeyboardInterrupt(), True),
        # what a signal has become is no error beside it
        (SIGINT, KeyboardInterrupt(), False),
        (SIGTERM, SystemExit(143), False),
    ],
)
def test_a_signal_comes_again_after_an_error(came, number, error, again):
    """However the block ends, nobody loses a signal; the error is still the block's own."""
    with pytest.raises(type(error)), af.stopping(WORLD):
        signal.raise_signal(number)
        raise error
    assert came == [number] * again


def test_an_interrupt_comes_again_in_the_context_of_an_error():
    """What Ctrl-C raises as the block is left says which error it came upon."""
    with pytest.raises(KeyboardInterrupt) as ended, af.stopping(WORLD):
        signal.raise_signal(SIGINT)
        raise KeyError
    assert isinstance(ended.value.__context__, KeyError)


def test_an_error_is_not_hidden_by_a_signal():
    """A signal that nobody handles would end the process before the error could be told."""
    with pytest.raises(KeyError), af.stopping(WORLD, [SIGUSR1]):
        signal.raise_signal(SIGUSR1)
        raise KeyError
    assert signal.SIG_DFL is signal.getsignal(SIGUSR1)


def test_a_signal_that_was_asked_for_does_not_come_again(came):
    """An error of the save that it led to is raised as it is."""
    with pytest.raises(OSError, match="full"), af.stopping(WORLD) as stop:
        signal.raise_signal(SIGTERM)
        assert stop.requested()
        msg = "full"
        raise OSError(msg)
    assert came == []


def test_a_signal_in_an_asynchronous_save_is_not_lost(tmp_path):
    """It is there at the next step's end, and the save under way is finished."""
    state = linear_state(data=af.Data(torch.ones(4, 1), global_batch_size=2))
    with (
        pytest.raises(SystemExit),
        af.stopping(WORLD) as stop,
        af.CheckpointStore(tmp_path) as store,
    ):
        store.save(state)
        signal.raise_signal(SIGTERM)
        assert stop.requested()
    assert af.load(state, store.latest).step == state.step


def test_other_threads_take_no_signals():
    """Python runs handlers in the main thread: elsewhere none is installed."""
    before, inside = signal.getsignal(SIGTERM), []

    def run():
        with af.stopping(WORLD) as stop:
            inside.append(signal.getsignal(SIGTERM))
            assert not stop.requested()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [before]


@pytest.mark.parametrize(
    ("signals", "said"),
    [
        *(
            ([SIGTERM, number], "cannot be caught")
            for number in (signal.SIGKILL, 0, 999, "SIGTERM")
        ),
        (SIGTERM, "expected a list, such as"),
        (None, "expected a list, such as"),
    ],
)
def test_what_cannot_be_taken_is_refused(came, signals, said):
    """The error says which, and handlers taken before it are put back."""
    with (
        pytest.raises(af.errors.ArgumentError, match=said),
        af.stopping(WORLD, signals),
    ):
        pass
    assert came == []
