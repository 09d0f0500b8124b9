# SPDX-License-Identifier: Apache-2.0
"""What an estimate shows, what it leaves alone, and what it refuses."""

from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import ArgumentError, ModelError
from accelfn.testing import simulate
from tests.internals import Bytes, Memory
from tests.states import bits, linear_state

ADAMW = partial(torch.optim.AdamW, lr=0.1)
LARGE = partial(nn.Linear, 2**24, 2**24, bias=False)
estimate = partial(af.memory_estimate, optimizer=ADAMW)


def test_the_table_of_a_model_that_no_machine_holds():
    """A row a part that is not empty, a column a dtype, the largest unit, and what is left out."""
    found = estimate(LARGE, af.ema(0.9))
    weights = found.num_parameters
    assert weights == 2**48
    full, half = found.by_dtype[torch.float32], found.by_dtype[torch.bfloat16]
    assert full.params == full.grads == full.slots["ema"] == 4 * weights
    assert half.params == 2 * weights
    assert full.opt_state == 8 * weights + 4  # a count of steps
    assert full.total == 20 * weights + 4
    first, head, *rows, last = str(found).splitlines()
    assert "281,474,976,710,656 parameters" in first
    assert head.split() == ["float32", "bfloat16", "float16"]
    names = ["parameters", "gradients", "optimizer", "slot", "total"]
    assert [row.split()[0] for row in rows] == names
    assert rows[0].split()[1:3] == ["1024.00", "TiB"]
    assert rows[-1].split()[1:3] == ["5120.00", "TiB"]
    assert "Activations and temporary tensors" in last


@pytest.mark.parametrize("views", [True, False])
def test_buckets_are_counted_where_gradients_are_no_views(views):
    """DistributedDataParallel holds the gradients once more, unless they lie in its buckets."""

    def half():  # what is frozen has no gradients
        frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        return nn.Sequential(frozen, nn.Linear(8, 2))

    setup = af.wrap_ddp(gradient_as_bucket_view=views)
    found = estimate(half, setup).by_dtype[torch.float32]
    assert found.buckets == (0 if views else (8 * 2 + 2) * 4)


def test_a_dtype_that_the_setup_refuses_says_why():
    """Its column is not there, and the reason is."""
    found = estimate(LARGE, af.autocast("fp16"))
    assert list(found.by_dtype) == [torch.float32, torch.bfloat16]
    assert list(found.refused) == [torch.float16]
    assert "Not float16: af.autocast('fp16'): parameters have" in str(found)


def test_an_instance_is_left_alone():
    """Its parameters are the very same, bitwise, and without gradients."""
    model = nn.Linear(3, 2)
    before = bits(model.state_dict())
    estimate(model)
    assert before == bits(model.state_dict())
    assert all(param.grad is None for param in model.parameters())


@af.transform
class refuses:
    """Refuses every model."""

    def init(self, _):
        raise ModelError("of no shape that it takes")


READY = torch.optim.AdamW([torch.zeros(1)])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (partial(estimate, LARGE, optimizer=READY), ArgumentError, "a function that"),
        (partial(estimate, lambda: 3), ArgumentError, r"returned int; expected a torc"),
        (partial(estimate, LARGE, refuses()), ModelError, "no shape that it takes"),
    ],
)
def test_what_is_refused(call, error, words):
    """A ready optimizer, a model that is none, and one that the setup refuses in any dtype."""
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("inside", [True, False])
def test_a_learning_rate_that_is_a_tensor(kind, inside):
    """It is read, and counted, whether the factory makes it or has it."""
    ready = torch.tensor(0.1)

    def optimizer(named):
        return kind(named, lr=torch.tensor(0.1) if inside else ready)

    model = partial(nn.Linear, 2, 2)
    found, expected = (
        estimate(model, optimizer=each).by_dtype
        for each in (optimizer, partial(kind, lr=0.1))
    )
    for dtype, bytes_ in found.items():
        assert bytes_.opt_state == expected[dtype].opt_state + 4
    assert ready == torch.tensor(0.1)


def test_a_part_takes_the_room_that_it_has():
    """Of three rows the second rank has one, in room for two, as the first has."""

    def taken(world):
        model = partial(nn.Linear, 2, 3, bias=False)
        state = linear_state(model=model, setup=af.wrap_fsdp(), world=world)
        return af.memory(state).params

    for found in simulate(2, taken):
        assert (found.here, found.whole) == (2 * 2 * 4, 3 * 2 * 4)


def test_a_state_s_table_can_be_read():
    """A row for each part that has any bytes, and a column for the host if any are there."""
    one, none = Bytes(here=1023, whole=2048), Bytes(here=0, whole=0)
    slots = {"ema": Bytes(here=1536, whole=3 * 1024**2), "empty": none}
    found = Memory(params=one, buffers=none, opt_state=one, slots=slots)
    assert str(found).splitlines() == [
        "                  here       whole",
        "parameters      1023 B    2.00 KiB",
        "optimizer       1023 B    2.00 KiB",
        "slot 'ema'    1.50 KiB    3.00 MiB",
        "total         3.50 KiB    3.00 MiB",
    ]
    eight = Bytes(here=8, whole=9, host=8)
    hosted = Memory(params=one, buffers=none, opt_state=eight, slots={"ema": eight})
    assert [line.split() for line in str(hosted).splitlines()] == [
        ["here", "on", "host", "whole"],
        ["parameters", "1023", "B", "0", "B", "2.00", "KiB"],
        ["optimizer", "8", "B", "8", "B", "9", "B"],
        ["slot", "'ema'", "8", "B", "8", "B", "9", "B"],
        ["total", "1.01", "KiB", "16", "B", "2.02", "KiB"],
    ]


@af.transform
class keeps:
    """Keeps tensors like the parameters in containers of several kinds."""

    def init(self, state):
        first, second = (torch.zeros_like(each) for each in state.params.values())
        return {"own": (first, [second, torch.zeros(3)]), "same": first, "number": 1}


def test_slots_in_any_container_are_counted():
    """Each tensor once, however deep it lies, as in the real state."""
    found = estimate(partial(nn.Linear, 4, 2), keeps())
    expected = (4 * 2 + 2 + 3) * 4
    assert found.by_dtype[torch.float32].slots == {"keeps": expected}
    real = af.memory(linear_state(4, 2, setup=keeps())).slots
    assert real == {"keeps": Bytes(here=expected, whole=expected)}
