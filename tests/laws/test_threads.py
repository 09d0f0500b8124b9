# SPDX-License-Identifier: Apache-2.0
"""Two threads of a process never draw from one another's generators: the second is refused."""

import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.internals import draws

Result = list[float]
Inside = Callable[[], None]
HELD_OUT = af.Data(torch.ones(4, 3), global_batch_size=2)


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that are augmented."""

    def __init__(self, inside: Inside) -> None:
        self.inside = inside

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.inside()
        noise = torch.rand(3) + np.random.rand()  # noqa: NPY002 - what code draws from
        return (noise + index).float()


def create(inside: Inside, seed: int) -> af.TrainState:
    return af.TrainState.create(
        model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=af.Data(Noisy(inside), global_batch_size=4),
        seed=seed,
    )


def loss_fn(inside: Inside, net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    inside()
    return net(batch).square().mean()


def stepped(state: af.TrainState, inside: Inside) -> Result:
    step = af.make_step(functools.partial(loss_fn, inside))
    state, _ = step(state, torch.ones(4, 3))
    return state.params["0.weight"].flatten().tolist()


def evaluated(state: af.TrainState, inside: Inside) -> Result:
    def measure(net: Any, batch: torch.Tensor) -> torch.Tensor:
        inside()
        return net.train()(batch).mean()

    return [*af.evaluate(state, HELD_OUT, measure).values()]


def drawn(state: af.TrainState, inside: Inside) -> Result:
    with af.fork_rng(state, "noise"):
        inside()
        return torch.rand(4).tolist()


def read(state: af.TrainState, inside: Inside) -> Result:
    del inside  # the dataset has it
    return next(iter(af.batches(state))).value.flatten().tolist()


CALLS = {"step": stepped, "evaluate": evaluated, "rng": drawn, "read": read}
calls = st.sampled_from(sorted(CALLS))


def run(call: str, seed: int, inside: Inside = lambda: None) -> Result:
    once = iter([inside])

    def meeting() -> None:
        for each in once:
            each()

    state = create(meeting if call == "read" else (lambda: None), seed)
    return CALLS[call](state, meeting)


@given(first=calls, second=calls, seeds=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_a_second_thread_is_refused(first, second, seeds):
    """A8: while one thread draws another is refused; afterwards it draws what it would alone."""
    expected = [run(first, seeds[0]), run(second, seeds[1])]
    begun, tried, found = threading.Event(), threading.Event(), []

    def meet() -> None:
        begun.set()
        tried.wait()

    state = create(lambda: None, seeds[1])  # a model is drawn, too
    thread = threading.Thread(target=lambda: found.append(run(first, seeds[0], meet)))
    thread.start()
    try:
        while not begun.wait(0.1):
            assert thread.is_alive(), "the first thread was refused"
        with pytest.raises(
            af.errors.WorldError, match="another thread.*use two processes"
        ):
            CALLS[second](state, lambda: None)
        with pytest.raises(af.errors.WorldError, match="another thread"):
            create(lambda: None, seeds[1])
    finally:
        tried.set()
        thread.join()
    assert found == expected[:1]
    assert run(second, seeds[1]) == expected[1]


@given(call=calls, inner=calls, seed=st.integers(0, 3))
def test_one_thread_may_draw_within_its_draws(call: str, inner: str, seed: int) -> None:
    """A8: what a thread draws inside of what it draws is its own, and changes nothing."""
    expected, seen = [run(call, seed), run(inner, 1)], []
    assert run(call, seed, lambda: seen.append(run(inner, 1))) == expected[0]
    assert seen == expected[1:]


PARTS = (draws.seeded, draws.Turn, draws.HeldTurn)


class Breaking:
    """Ctrl-C at one of the lines by which draws begin and end, the first of an end too."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __enter__(self) -> None:
        sys.settrace(self.calls)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def calls(self, frame: Any, event: str, _: object) -> Any:
        del event
        owner = frame.f_locals.get("self")
        return self.lines if isinstance(owner, PARTS) else None

    def lines(self, _frame: Any, event: str, _: object) -> Any:
        self.left -= event == "line"
        if self.left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self.lines


@given(call=calls, seed=st.integers(0, 3), at=st.integers(0, 120))
def test_draws_that_are_broken_off_let_others_draw(call, seed, at):
    """A8: where Ctrl-C comes as draws begin or end, another thread may draw ever after."""
    expected, state = run(call, seed), create(lambda: None, seed)
    with ThreadPoolExecutor(1) as another, torch.random.fork_rng(devices=[]):
        with suppress(KeyboardInterrupt, af.errors.Error), Breaking(at):
            CALLS[call](state, lambda: None)
        assert another.submit(run, call, seed).result() == expected
