# SPDX-License-Identifier: Apache-2.0
"""Buffers of a state are those of a plain module whose passes were those that were applied."""

from collections.abc import Callable, Mapping, Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from tests.states import create
from tests.strategies import differences, tensors

ROWS = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2)


class Keeping(nn.Module):
    """A layer that writes buffers, in the way that its next pass is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, dtype=torch.float64)
        self.register_buffer("history", torch.zeros(1))
        self.register_buffer("last", torch.zeros(2))

    def forward(self, rows: torch.Tensor, way: str) -> torch.Tensor:
        WAYS[way](self)
        return self.layer(rows)


def grown(model: nn.Module) -> None:
    model.history = torch.cat([model.history, model.history.sum()[None] + 1])


def written(model: nn.Module) -> None:
    model.history.mul_(2).add_(1)
    model.last[0] += 1


def written_by_data(model: nn.Module) -> None:
    model.history.data.add_(5)
    model.last.data = model.last + 7


def failed(model: nn.Module) -> None:
    written_by_data(model)
    grown(model)
    raise ZeroDivisionError


WAYS: Mapping[str, Callable[[nn.Module], None]] = {
    "grown": grown,
    "shrunk": lambda model: setattr(model, "history", model.history[-1:]),
    "assigned": lambda model: setattr(model, "last", model.last.flip(0) + 3),
    "written": written,
    "written by data": written_by_data,
    "failed": failed,
}


def loss_fn(model: nn.Module, rows: torch.Tensor, way: object) -> torch.Tensor:
    return model(rows, way).square().mean()


@given(
    passes=st.lists(
        st.tuples(st.sampled_from(sorted(WAYS)), st.booleans()), min_size=2, max_size=8
    )
)
def test_buffers_are_those_of_the_passes_that_were_applied(passes):
    """However they are written, and whatever passes between were for nothing, or raised."""
    state = create(model=Keeping)
    plain = Keeping()
    take, step = af.value_and_grad(loss_fn), af.make_step(loss_fn)
    for way, is_applied in passes:
        call = step if is_applied else take
        try:
            after, _ = call(state, ROWS, way)
        except ZeroDivisionError:
            after = state
        state = after if is_applied else state
        if is_applied and way != "failed":
            WAYS[way](plain)
        assert differences(dict(plain.named_buffers()), dict(state.buffers)) == []


class Turns(Keeping):
    """Writes its buffers before, between and behind what it computes."""

    def forward(self, rows: torch.Tensor, acts: Sequence[str]) -> torch.Tensor:
        rows = self.layer(rows)
        for act in acts:
            if act == "sigmoid":
                rows = rows.sigmoid()
            elif act == "used":
                rows = rows * (1 + self.last.sum())
            else:
                WAYS[act](self)
        return rows


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Turns(), Turns()

    def forward(self, rows: torch.Tensor, acts: Sequence[str]) -> torch.Tensor:
        return self.one(rows, acts) + self.two(rows, acts[::-1])


ACTS = st.sampled_from(sorted(WAYS.keys() - {"failed"} | {"sigmoid", "used"}))


@given(acts=st.lists(ACTS, min_size=1, max_size=6), updates=st.integers(1, 2))
def test_what_runs_again_writes_buffers_once(acts, updates):
    """Wherever in its forward a module writes them, though the second run ends before."""

    def trained(*setup):
        state = create(model=Outer, setup=af.chain(*setup))
        for _ in range(updates):
            state, _ = af.make_step(loss_fn)(state, ROWS, acts)
        return tensors(state)

    assert differences(trained(), trained(af.checkpoint_activations())) == []
