# SPDX-License-Identifier: Apache-2.0
"""What an estimate shows, what it leaves alone, and what it refuses."""

from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import Bytes, Memory

adamw = partial(torch.optim.AdamW, lr=0.1)


def huge() -> nn.Module:
    """Return a layer of 4 TB in float32."""
    return nn.Linear(10**6, 10**6)


def test_nothing_is_allocated():
    """A model that no machine holds is estimated."""
    found = af.memory_estimate(huge, af.ema(0.9), optimizer=adamw)
    weights = 10**12 + 10**6

    assert found.num_parameters == weights
    full, half = found.by_dtype[torch.float32], found.by_dtype[torch.bfloat16]
    assert full.params == full.grads == full.slots["ema"] == 4 * weights
    assert half.params == 2 * weights
    assert full.opt_state == 8 * weights + 8  # two counts of steps
    assert full.total == 20 * weights + 8


def test_the_table_can_be_read():
    """A row a part that is not empty, a column a dtype, and what is left out."""
    text = str(af.memory_estimate(huge, af.ema(0.9), optimizer=adamw))
    lines = text.splitlines()

    assert "1,000,001,000,000 parameters" in lines[0]
    assert lines[1].split() == ["float32", "bfloat16", "float16"]
    assert [line.split("  ")[0] for line in lines[2:-1]] == [
        *("parameters", "gradients", "optimizer", "slot 'ema'", "total")
    ]
    assert "18.19 TiB" in lines[-2]
    assert "Activations and temporary tensors" in lines[-1]


@pytest.mark.parametrize(("views", "copies"), [(True, 0), (False, 1)])
def test_buckets_are_counted_where_gradients_are_no_views(views, copies):
    """DistributedDataParallel holds the gradients once more, unless they lie in its buckets."""
    setup = af.wrap_ddp(gradient_as_bucket_view=views)
    found = af.memory_estimate(huge, setup, optimizer=adamw).by_dtype[torch.float32]
    assert found.buckets == copies * found.grads


def test_what_is_frozen_is_in_no_bucket():
    """DistributedDataParallel has no gradients of it."""

    def half() -> nn.Module:
        frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        return nn.Sequential(frozen, nn.Linear(8, 2))

    setup = af.wrap_ddp(gradient_as_bucket_view=False)
    found = af.memory_estimate(half, setup, optimizer=adamw).by_dtype[torch.float32]
    assert found.buckets == (8 * 2 + 2) * 4


def test_a_dtype_that_the_setup_refuses_says_why():
    """Its column is not there, and the reason is."""
    found = af.memory_estimate(huge, af.autocast("fp16"), optimizer=adamw)

    assert list(found.by_dtype) == [torch.float32, torch.bfloat16]
    assert list(found.refused) == [torch.float16]
    assert "Not float16: af.autocast('fp16'): parameters have" in str(found)


def test_an_instance_is_left_alone():
    """Its parameters are the very same, bitwise, and without gradients."""
    model = nn.Linear(3, 2)
    before = [param.clone() for param in model.parameters()]
    af.memory_estimate(model, optimizer=adamw)

    for param, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, was)
        assert param.dtype is torch.float32
        assert param.grad is None


def test_a_ready_optimizer_is_refused():
    """It goes with tensors that it was given; a factory makes one for each dtype."""
    model = nn.Linear(3, 2)
    with pytest.raises(af.errors.ArgumentError, match="expected a function that"):
        af.memory_estimate(model, optimizer=adamw(model.parameters()))


def test_a_model_that_is_none_is_refused():
    """A factory that returns something else says what it returned."""
    with pytest.raises(
        af.errors.ArgumentError, match=r"returned int; expected a torch\.nn\.Module"
    ):
        af.memory_estimate(lambda: 3, optimizer=adamw)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("inside", [True, False])
def test_a_learning_rate_that_is_a_tensor(kind, inside):
    """It is read, and counted, whether the factory makes it or has it."""
    ready = torch.tensor(0.1)

    def optimizer(named):
        return kind(named, lr=torch.tensor(0.1) if inside else ready)

    def plain(named):
        return kind(named, lr=0.1)

    found, expected = (
        af.memory_estimate(lambda: nn.Linear(2, 2), optimizer=each).by_dtype
        for each in (optimizer, plain)
    )
    for dtype, bytes_ in found.items():
        assert bytes_.opt_state == expected[dtype].opt_state + 4
    assert ready == torch.tensor(0.1)


def test_a_part_takes_the_room_that_it_has():
    """Of three rows the second rank has one, in room for two, as the first has."""

    def taken(world: af.World) -> Bytes:
        model = partial(nn.Linear, 2, 3, bias=False)
        state = af.TrainState.create(
            model=model, optimizer=adamw, setup=af.wrap_fsdp(), world=world
        )
        return af.memory(state).params

    rows, whole = 2 * 2 * 4, 3 * 2 * 4
    for found in simulate(2, taken):
        assert (found.here, found.whole) == (rows, whole)


def test_what_lies_on_the_host_is_added_up():
    """Of all parts of a state together, and so in their total."""
    some = [Bytes(here=8, whole=16, host=4), Bytes(here=2, whole=2, host=1)]
    both = sum(some, Bytes(here=0, whole=0))
    assert both == some[0] + some[1] == Bytes(here=10, whole=18, host=5)


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
    hosted = Memory(
        params=one, buffers=none, opt_state=Bytes(here=8, whole=9, host=8), slots={}
    )
    assert [line.split() for line in str(hosted).splitlines()] == [
        ["here", "on", "host", "whole"],
        ["parameters", "1023", "B", "0", "B", "2.00", "KiB"],
        ["optimizer", "8", "B", "8", "B", "9", "B"],
        ["total", "1.01", "KiB", "8", "B", "2.01", "KiB"],
    ]


def test_more_than_the_largest_unit_is_shown_in_it():
    """Of a model that is a thousand times as large, too."""
    found = af.memory_estimate(
        lambda: nn.Linear(2**24, 2**24, bias=False), optimizer=adamw
    )
    rows = {line.split()[0]: line.split()[1:3] for line in str(found).splitlines()}
    assert rows["parameters"] == ["1024.00", "TiB"]
    assert rows["total"] == ["4096.00", "TiB"]


@af.transform
class keeps:
    """Keeps tensors like the parameters in containers of several kinds."""

    def init(self, state):
        first, second = (torch.zeros_like(each) for each in state.params.values())
        return {"own": (first, [second, torch.zeros(3)]), "same": first, "number": 1}


def test_slots_in_any_container_are_counted():
    """Each tensor once, however deep it lies, as in the real state."""
    model = partial(nn.Linear, 4, 2)
    state = af.TrainState.create(model=model, optimizer=adamw, setup=keeps())
    found = af.memory_estimate(model, keeps(), optimizer=adamw)
    expected = (4 * 2 + 2 + 3) * 4
    assert found.by_dtype[torch.float32].slots == {"keeps": expected}
    assert af.memory(state).slots == {"keeps": Bytes(here=expected, whole=expected)}


@af.transform
class refuses:
    """Refuses every model."""

    def init(self, _):
        raise af.errors.ModelError("of no shape that it takes")


def test_a_model_that_the_setup_refuses_in_any_dtype_is_refused():
    """There is nothing to show then, and the words are the setup's."""
    with pytest.raises(af.errors.ModelError, match="no shape that it takes"):
        af.memory_estimate(huge, refuses(), optimizer=adamw)
