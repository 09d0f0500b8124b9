# SPDX-License-Identifier: Apache-2.0
"""What the options of the transforms may be, how batches are cut, and what is reported."""

import math
from functools import partial

import attrs
import pytest
import torch

import accelfn as af
from accelfn.errors import ArgumentError, BatchError, StateError
from tests.catalog import CATALOG
from tests.states import linear_state

PLATEAU = af.reduce_lr_on_plateau
BAD = [
    partial(af.accumulate),
    partial(af.accumulate, num_micro_batches=2, micro_batch_size=2),
    partial(af.clip_grad_norm, 0),
    partial(af.clip_grad_norm, -1.0),
    partial(af.clip_grad_norm, math.nan),
    partial(af.clip_grad_norm, "1.0"),
    partial(af.clip_grad_norm, 1.0, norm_type=0),
    partial(af.clip_grad_value, 0.0),
    partial(af.clip_grad_value, math.nan),
    partial(af.local_sgd, sync_every=6, neighbours={4: 2}),
    partial(af.local_sgd, sync_every=4, neighbours={4: 2}),
    partial(af.local_sgd, sync_every=8, neighbours={2: 4, 4: 2}),
    partial(af.local_sgd, sync_every=8, neighbours={2: 1}),
    partial(af.local_sgd, sync_every=8, neighbours=[2]),
    partial(af.ema, 1.5),
    partial(af.ema, -0.1),
    partial(af.ema, math.nan),
    partial(af.ema, "0.9"),
    partial(PLATEAU, 1.0),
    partial(PLATEAU, -0.1),
    partial(PLATEAU, "0.1"),
    partial(PLATEAU, mode="least"),
    partial(PLATEAU, threshold=math.nan),
    partial(PLATEAU, threshold=-1),
    partial(PLATEAU, threshold_mode="relative"),
    partial(PLATEAU, min_lr=-1e-4),
    partial(PLATEAU, min_lr=[0.1, math.inf]),
    partial(PLATEAU, eps=math.inf),
    partial(af.wrap_ddp, bucket_cap_mb=0),
    partial(af.wrap_ddp, bucket_cap_mb=-1),
    partial(af.compress_grads, "fp8"),
    partial(af.compress_grads, None),
    partial(af.compress_grads, "powersgd", min_compression_rate=math.nan),
]


@pytest.mark.parametrize("call", BAD, ids=str)
def test_bad_options(call):
    """An option that can have no meaning is refused with the transform and the value."""
    with pytest.raises(ArgumentError, match=rf"af\.{call.func.__name__}\(.*expected"):
        call()


SWITCHES = [
    (each, field.name)
    for each in (*(entry.transform for entry in CATALOG), af.compile())
    for field in attrs.fields(type(each))
    if isinstance(field.default, bool)
]


@pytest.mark.parametrize(("given", "option"), SWITCHES, ids=str)
@pytest.mark.parametrize("value", ["no", 1])
def test_a_switch_is_on_or_off(given, option, value):
    """What is neither True nor False is no answer to a question of yes or no."""
    known = {"fullgraph", "per_group", "buffers", "static_graph"}
    assert known <= {name for _, name in SWITCHES}
    with pytest.raises(ArgumentError, match=rf"{option}={value!r}\): expected True"):
        attrs.evolve(given, **{option: value})


def test_a_static_graph_finds_unused_parameters_itself():
    with pytest.raises(ArgumentError, match="Pass only one of the two"):
        af.wrap_ddp(static_graph=True, find_unused_parameters=True)


def test_infinity_prints_as_code():
    value = af.clip_grad_norm(float("inf"))
    assert repr(value) == 'af.clip_grad_norm(float("inf"))'
    assert eval(repr(value), {"af": af}) == value  # noqa: S307


# Batches that are cut


def test_micro_batches():
    """Parts differ by at most one row, in order, larger ones first; what has no rows is in all."""
    value = {"x": torch.arange(7), "tag": "t", "scale": torch.tensor(0.5)}
    parts = af.micro_batches(value, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [(part["tag"], float(part["scale"])) for part in parts] == [("t", 0.5)] * 3


@pytest.mark.parametrize(
    ("value", "parts", "words"),
    [
        (torch.arange(5), 6, r"micro_batches\(value, "),
        ((torch.zeros(8, 2), torch.zeros(3)), 2, "3 and 8"),
        *((value, 2, "no tensor") for value in ("text", None, [], torch.tensor(1.0))),
    ],
)
def test_what_cannot_be_cut_is_refused(value, parts, words):
    """Too few rows, tensors that differ in their number of rows, and none."""
    with pytest.raises(BatchError, match=words):
        af.micro_batches(value, parts)


@pytest.mark.parametrize(
    ("first", "last", "weights"),
    [
        ({"micro_batch_size": 2}, {"num_micro_batches": 3}, (4, 4, 4)),
        ({"num_micro_batches": 3}, {"micro_batch_size": 2}, (2,) * 6),
        ({"num_micro_batches": 3}, {"num_micro_batches": 2}, (6, 6)),
        ({"micro_batch_size": 3}, {"micro_batch_size": 4}, (4, 4, 4)),
    ],
)
def test_of_two_that_cut_a_batch_the_last_one_does(first, last, weights):
    """Whether it says how many parts there are or how large they may be."""
    state = linear_state(
        data=af.Data(torch.ones(12, 1), global_batch_size=12),
        setup=af.chain(af.accumulate(**first), af.accumulate(name="last", **last)),
    )
    assert next(iter(af.batches(state))).weights == weights


# Values that are reported


def test_plateau_has_as_many_floors_as_groups():
    """One least rate, or one for each group; another number is refused with both."""
    with pytest.raises(ArgumentError, match="min_lr has 3 values, .* 1 parameter grou"):
        linear_state(setup=PLATEAU(min_lr=[0.1, 0.1, 0.1]))
    state = linear_state(setup=PLATEAU(min_lr=[0.1]))
    assert state.setup.transforms[0].min_lr == (0.1,)


@pytest.mark.parametrize("value", [None, "0.1", True, torch.zeros(1), {"loss": 0.1}])
def test_what_is_observed_is_a_number(value):
    """Something else is refused; of a dict one number is to be chosen."""
    is_dict = isinstance(value, dict)
    words = "Pass one value of the dict" if is_dict else "expected a number"
    with pytest.raises(ArgumentError, match=words):
        af.report_metric(linear_state(setup=PLATEAU()), value)


def test_reports_go_to_slots():
    """All that ask for it get each value, in order, in a state that shares the tensors."""

    @af.transform
    class Best:
        def init(self, state):
            return {"reported": ()}

    before = linear_state(setup=af.chain(Best(), Best(name="other")))
    state = af.report_metric(af.report_metric(before, 2), 1.0)
    reported = {"reported": (2.0, 1.0)}
    assert dict(state.slots) == {"best": reported, "other": reported}
    assert before.slots["best"] == {"reported": ()}
    assert all(state.params[name] is before.params[name] for name in before.params)
    with pytest.raises(StateError, match=r"af\.reduce_lr_on_plateau"):
        af.report_metric(linear_state(), 0.5)  # which nobody takes
