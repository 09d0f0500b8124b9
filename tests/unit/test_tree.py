# SPDX-License-Identifier: Apache-2.0
"""Values of any container go through a step; what is no tensor is left alone."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import accelfn as af
from accelfn.testing import simulate
from tests.internals import tree
from tests.states import linear_state

X, Y = torch.linspace(-1, 1, 12).reshape(4, 3), torch.linspace(0, 1, 4)


def test_slots_are_copied_deeply():
    """A copy's slot shares neither tensors nor containers with the first."""
    state = linear_state().with_slot(
        "mine", {"t": torch.zeros(2), "list": [1, {"a": 2}]}
    )
    copied = state.copy()
    copied.slots["mine"]["t"] += 1
    copied.slots["mine"]["list"][1]["a"] = 3
    assert state.slots["mine"]["t"].tolist() == [0.0, 0.0]
    assert state.slots["mine"]["list"][1] == {"a": 2}


class Graph:
    """An object of which nobody sees what is in it; it knows where it is."""

    def __init__(self, nodes):
        self.nodes, self.moved = nodes, 0

    def to(self, device):
        moved = Graph(self.nodes.to(device))
        moved.moved = self.moved + 1
        return moved


class Tokens(UserDict):
    """A mapping with a way of its own, as those of tokenizers have."""

    def to(self, device):
        return Tokens({name: each.to(device) for name, each in self.items()})


META = torch.device("meta")


def test_objects_move_themselves():
    """What has a `to` is moved by it, now or later; what has none, or is there, stays."""
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    other = object()
    values = [packed, {"graph": Graph(torch.ones(3))}, Tokens(ids=torch.ones(1)), other]
    sequence, inside, tokens, same = tree.to_device(values, META)
    assert type(sequence) is PackedSequence
    assert sequence.data.device == META
    assert sequence.batch_sizes.device.type == "cpu"
    assert inside["graph"].nodes.device == META
    assert inside["graph"].moved == 1
    assert type(tokens) is Tokens
    assert tokens["ids"].device == META
    assert same is other
    values = (Graph(torch.ones(1)), Tokens(ids=torch.ones(1)))
    graph, tokens = tree.to_device(values, META, opaque=False)
    assert graph is values[0]
    assert tokens["ids"].device == META
    assert tree.to_device((graph, tokens), META)[0].moved == 1
    value = {"x": torch.ones(2), "name": "a"}
    assert tree.to_device(value, torch.device("cpu")) is value


class Ranged(dict):
    """A mapping that is not made of a dict."""

    def __init__(self, low, high):
        super().__init__(low=low, high=high)


class Moved(UserDict):
    """A mapping that is."""


@dataclass
class Sized:
    """A record with a field that its class declares, and that nothing may set."""

    rows: torch.Tensor
    count: torch.Tensor = field(init=False)


def exchanged(make_value):
    """Return the means over two ranks of what each of them makes."""
    return simulate(
        2, lambda world: af.all_reduce(make_value(world.rank), world, "mean")
    )


def test_a_container_that_cannot_be_made_again_is_named():
    """With why, and what to give instead; one beside it is no matter."""
    words = r"contains a Ranged.*Ranged\(a_dict\) raises TypeError: .*Use a dict"
    with pytest.raises(af.errors.ArgumentError, match=words):
        exchanged(lambda rank: {"a": X, "b": Ranged(X + rank, X)})


@pytest.mark.parametrize(
    "kind", [dict, OrderedDict, Moved, lambda items: defaultdict(list, items)]
)
def test_a_mapping_comes_back_of_its_kind(kind):
    """With its keys in their order; one with a default has it again."""
    for found in exchanged(lambda rank: kind({"y": X + rank, "x": Y - rank})):
        assert type(found) is type(kind({}))
        assert list(found) == ["y", "x"]
        torch.testing.assert_close(found["y"], X + 0.5)
        torch.testing.assert_close(found["x"], Y - 0.5)
        if isinstance(found, defaultdict):
            assert found["z"] == []


@pytest.mark.parametrize("is_set", [False, True])
def test_a_record_keeps_a_field_that_is_not_set(is_set):
    """It is not set in what comes back, and else it is what it was."""

    def make_value(rank):
        record = Sized(X + rank)
        if is_set:
            record.count = torch.tensor(3.0)
        return record

    for found in exchanged(make_value):
        torch.testing.assert_close(found.rows, X + 0.5)
        assert getattr(found, "count", None) == (3 if is_set else None)
