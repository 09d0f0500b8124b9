# SPDX-License-Identifier: Apache-2.0
"""A block of `empty_weights` takes values from the parameters that are registered in it alone."""

import threading
from contextlib import suppress

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af

STEPS = st.lists(st.sampled_from(["build", "thread", "tie", "frozen"]), max_size=4)
BLOCKS = st.recursive(
    st.tuples(STEPS, st.booleans(), st.just(())),
    lambda inner: st.tuples(STEPS, st.booleans(), st.lists(inner, max_size=2)),
    max_leaves=3,
)


class Registered(nn.Module):
    """A layer whose parameters are there, twice, and frozen; its buffer has values."""

    def __init__(self, step):
        super().__init__()
        self.first = nn.Parameter(torch.randn(2, 2), requires_grad=step != "frozen")
        self.second = self.first
        self.register_buffer("table", nn.init.normal_(torch.zeros(2), 1.0, 0.0))
        nn.init.normal_(self.first)


def build(step, *, empty):
    """Build a layer, here or in a thread, and look at it."""
    made = []
    if step == "thread":
        thread = threading.Thread(target=lambda: made.append(Registered(step)))
        thread.start()
        thread.join()
    else:
        made.append(Registered(step))
    layer = made[0]
    assert layer.first.is_meta == (empty and step != "thread")
    assert layer.second is layer.first
    assert layer.first.requires_grad == (step != "frozen")
    assert layer.table.tolist() == [1, 1]


@given(blocks=st.lists(BLOCKS, min_size=1, max_size=2))
def test_a_block_acts_in_itself_alone(blocks):
    """Nested or in turns, and whatever is raised in it: its thread's parameters, until its end."""

    def enter(block):
        steps, raises, inner = block
        with suppress(ZeroDivisionError), af.empty_weights():
            for step in steps:
                build(step, empty=True)
            for each in inner:
                enter(each)
            build("build", empty=True)
            if raises:
                raise ZeroDivisionError

    for block in blocks:
        enter(block)
        build("build", empty=False)
