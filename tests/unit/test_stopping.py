# SPDX-License-Identifier: Apache-2.0
"""`stopping`: signals are noted, agreed at a step's end, and then end the process."""

# ruff: noqa: PT012, TRY301 - it is the whole block that is left or raised from

import signal
import tempfile
import threading

import pytest
import torch

import accelfn as af
from tests.states import linear_state

WORLD = af.World.single()


def test_a_signal_ends_the_block_with_its_code():
    """SIGTERM is noted, is what was requested, and leaving is exit code 143."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, af.stopping(WORLD) as stop:
        assert not stop.requested()
        assert stop.signal is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal is None
        assert stop.requested()
        assert signal.SIGTERM is stop.signal
    assert ended.value.code == 143
    assert before is signal.getsignal(signal.SIGTERM)


@pytest.mark.parametrize("how", ["left", "raised", "asked"])
def test_handlers_are_put_back(how):
    """However the block ends, the process's handlers are what they were."""
    asked = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(each) for each in asked]
    try:
        with af.stopping(WORLD, signals=[*asked, signal.SIGUSR1]) as stop:
            inside = [signal.getsignal(each) for each in asked]
            assert not set(inside) & set(before)
            if how == "raised":
                raise KeyError
            if how == "asked":
                signal.raise_signal(signal.SIGUSR1)
                assert stop.requested()
    except (KeyError, SystemExit):
        assert how != "left"
    assert before == [signal.getsignal(each) for each in asked]


def test_a_second_interrupt_interrupts():
    """The first Ctrl-C is noted, the second raises KeyboardInterrupt at once."""
    with pytest.raises(KeyboardInterrupt), af.stopping(WORLD) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested()
        signal.raise_signal(signal.SIGINT)


def test_a_second_sigterm_is_like_the_first():
    """Schedulers send it twice; the save that the first led to is finished."""
    with pytest.raises(SystemExit) as ended, af.stopping(WORLD) as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested()
    assert ended.value.code == 143


def test_a_signal_that_nobody_asked_for_comes_again():
    """What came after the last request is not lost: it comes as the block is left."""
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with af.stopping(WORLD) as stop:
            assert not stop.requested()
            signal.raise_signal(signal.SIGTERM)
            assert came == []
        assert came == [signal.SIGTERM]
        with pytest.raises(SystemExit), af.stopping(WORLD) as outer:
            with af.stopping(WORLD):
                signal.raise_signal(signal.SIGTERM)
            assert outer.requested()
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("error", [KeyError, SystemExit, KeyboardInterrupt])
def test_a_signal_comes_again_after_an_error(error):
    """However the block ends, nobody loses a signal; the error is still the block's own."""
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with pytest.raises(error), af.stopping(WORLD):
            signal.raise_signal(signal.SIGTERM)
            raise error
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_comes_again_in_the_context_of_an_error():
    """What Ctrl-C raises as the block is left says which error it came upon."""
    with pytest.raises(KeyboardInterrupt) as ended, af.stopping(WORLD):
        signal.raise_signal(signal.SIGINT)
        raise KeyError
    assert isinstance(ended.value.__context__, KeyError)


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt()), (signal.SIGTERM, SystemExit(143))],
)
def test_what_a_signal_has_become_is_no_error_beside_it(number, error):
    """An exception that a signal has led to is not followed by the signal."""
    came = []
    before = signal.signal(number, lambda number, _: came.append(number))
    try:
        with pytest.raises(type(error)), af.stopping(WORLD):
            signal.raise_signal(number)
            raise error
        assert came == []
    finally:
        signal.signal(number, before)


def test_an_error_is_not_hidden_by_a_signal():
    """A signal that nobody handles would end the process before the error could be told."""
    with pytest.raises(KeyError), af.stopping(WORLD, [signal.SIGUSR1]):
        signal.raise_signal(signal.SIGUSR1)
        raise KeyError
    assert signal.SIG_DFL is signal.getsignal(signal.SIGUSR1)


def test_a_signal_that_was_asked_for_does_not_come_again():
    """An error of the save that it led to is raised as it is."""
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with pytest.raises(OSError, match="full"), af.stopping(WORLD) as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested()
            msg = "full"
            raise OSError(msg)
        assert came == []
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_in_an_asynchronous_save_is_not_lost():
    """It is there at the next step's end, and the save under way is finished."""
    data = af.Data(torch.ones(4, 1), global_batch_size=2)
    state = linear_state(data=data)
    with tempfile.TemporaryDirectory() as folder:
        with (
            pytest.raises(SystemExit),
            af.stopping(WORLD) as stop,
            af.CheckpointStore(folder) as store,
        ):
            store.save(state)
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested()
        assert store.latest is not None
        assert af.load(state, store.latest).step == state.step


def test_other_threads_take_no_signals():
    """Python runs handlers in the main thread: elsewhere none is installed."""
    before, inside = signal.getsignal(signal.SIGTERM), []

    def run():
        with af.stopping(WORLD) as stop:
            inside.append(signal.getsignal(signal.SIGTERM))
            assert not stop.requested()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [before]


@pytest.mark.parametrize("number", [signal.SIGKILL, 0, 999, "SIGTERM"])
def test_what_cannot_be_taken_is_refused(number):
    """The error says which, and handlers taken before it are put back."""
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(af.errors.ArgumentError, match="cannot be caught"),
        af.stopping(WORLD, signals=[signal.SIGTERM, number]),
    ):
        pass
    assert before is signal.getsignal(signal.SIGTERM)


@pytest.mark.parametrize("signals", [signal.SIGTERM, None])
def test_one_signal_is_no_list_of_them(signals):
    """It is refused before anything is taken."""
    with (
        pytest.raises(af.errors.ArgumentError, match="expected a list, such as"),
        af.stopping(WORLD, signals),
    ):
        pass
