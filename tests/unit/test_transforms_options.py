# SPDX-License-Identifier: Apache-2.0
"""What the options of the transforms may be: every count positive, every name known."""

import math

import attrs
import pytest
import torch

import accelfn as af
from tests.catalog import CATALOG
from tests.states import linear_state

BAD = {
    "accumulate neither": af.accumulate,
    "accumulate both": lambda: af.accumulate(num_micro_batches=2, micro_batch_size=2),
    "clip_grad_norm 0": lambda: af.clip_grad_norm(0),
    "clip_grad_norm -1": lambda: af.clip_grad_norm(-1.0),
    "clip_grad_norm nan": lambda: af.clip_grad_norm(math.nan),
    "clip_grad_norm text": lambda: af.clip_grad_norm("1.0"),
    "clip_grad_norm type": lambda: af.clip_grad_norm(1.0, norm_type=0),
    "clip_grad_value 0": lambda: af.clip_grad_value(0.0),
    "clip_grad_value nan": lambda: af.clip_grad_value(math.nan),
    "local_sgd uneven": lambda: af.local_sgd(sync_every=6, neighbours={4: 2}),
    "local_sgd late": lambda: af.local_sgd(sync_every=4, neighbours={4: 2}),
    "local_sgd fewer": lambda: af.local_sgd(sync_every=8, neighbours={2: 4, 4: 2}),
    "local_sgd one": lambda: af.local_sgd(sync_every=8, neighbours={2: 1}),
    "local_sgd list": lambda: af.local_sgd(sync_every=8, neighbours=[2]),
    "ema 1.5": lambda: af.ema(1.5),
    "ema -0.1": lambda: af.ema(-0.1),
    "ema nan": lambda: af.ema(math.nan),
    "ema text": lambda: af.ema("0.9"),
    "reduce_lr_on_plateau 1": lambda: af.reduce_lr_on_plateau(1.0),
    "reduce_lr_on_plateau -0.1": lambda: af.reduce_lr_on_plateau(-0.1),
    "reduce_lr_on_plateau text": lambda: af.reduce_lr_on_plateau("0.1"),
    "reduce_lr_on_plateau mode": lambda: af.reduce_lr_on_plateau(mode="least"),
    "reduce_lr_on_plateau threshold": lambda: af.reduce_lr_on_plateau(
        threshold=math.nan
    ),
    "reduce_lr_on_plateau threshold -1": lambda: af.reduce_lr_on_plateau(threshold=-1),
    "reduce_lr_on_plateau threshold_mode": lambda: af.reduce_lr_on_plateau(
        threshold_mode="relative"
    ),
    "reduce_lr_on_plateau min_lr": lambda: af.reduce_lr_on_plateau(min_lr=-1e-4),
    "reduce_lr_on_plateau min_lrs": lambda: af.reduce_lr_on_plateau(
        min_lr=[0.1, math.inf]
    ),
    "reduce_lr_on_plateau eps": lambda: af.reduce_lr_on_plateau(eps=math.inf),
    "wrap_ddp 0": lambda: af.wrap_ddp(bucket_cap_mb=0),
    "wrap_ddp -1": lambda: af.wrap_ddp(bucket_cap_mb=-1),
    "autocast fp7": lambda: af.autocast("fp7"),
    "autocast None": lambda: af.autocast(None),
    "autocast dtype": lambda: af.autocast(torch.bfloat16),
    "autocast list": lambda: af.autocast(["bf16"]),
    "clip_grad_norm group": lambda: af.clip_grad_norm(1.0, per_group=1),
    "compress_grads fp8": lambda: af.compress_grads("fp8"),
    "compress_grads None": lambda: af.compress_grads(None),
    "compress_grads rate nan": lambda: af.compress_grads(
        "powersgd", min_compression_rate=math.nan
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options(case):
    """An option that can have no meaning is refused with the transform and the value."""
    with pytest.raises(
        af.errors.ArgumentError, match=rf"af\.{case.split()[0]}\("
    ) as caught:
        BAD[case]()
    assert "expected" in str(caught.value)


SWITCHES = [
    (each, field.name)
    for each in (*(entry.transform for entry in CATALOG), af.compile())
    for field in attrs.fields(type(each))
    if isinstance(field.default, bool)
]


@pytest.mark.parametrize(("given", "option"), SWITCHES, ids=str)
@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_switch_is_on_or_off(given, option, value):
    """What is neither True nor False is no answer to a question of yes or no."""
    known = {"fullgraph", "per_group", "buffers", "static_graph"}
    assert known <= {name for _, name in SWITCHES}
    with pytest.raises(
        af.errors.ArgumentError, match=rf"{option}={value!r}\): expected True"
    ):
        attrs.evolve(given, **{option: value})


def test_unknown_precision_lists_the_known():
    """An unknown precision is answered with those there are."""
    with pytest.raises(af.errors.ArgumentError, match=r"'fp7'.*expected 'bf16'"):
        af.autocast("fp7")


def test_micro_batches_refuses_a_number_of_parts():
    """A number of parts that cannot be made is refused with the number of rows."""
    with pytest.raises(af.errors.Error, match=r"micro_batches\(value, "):
        af.micro_batches(torch.arange(5), 6)


def test_micro_batches_differ_by_one():
    """Parts differ by at most one row, in order, larger ones first."""
    parts = af.micro_batches({"x": torch.arange(7), "tag": "t"}, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [part["tag"] for part in parts] == ["t"] * 3


def test_micro_batches_hands_scalars_to_every_part():
    """A 0-dim tensor has no rows to cut: each part gets it."""
    parts = af.micro_batches((torch.arange(4), torch.tensor(0.5)), 2)
    assert [float(scalar) for _, scalar in parts] == [0.5, 0.5]


def test_micro_batches_never_cuts_another_kind_of_tensor():
    """Tensors that differ in their number of rows are refused, not cut."""
    with pytest.raises(af.errors.BatchError, match=r"3 and 8"):
        af.micro_batches((torch.zeros(8, 2), torch.zeros(3)), 2)


@pytest.mark.parametrize("value", ["text", None, [], torch.tensor(1.0)])
def test_micro_batches_of_what_has_no_rows(value):
    """A value without rows is refused."""
    with pytest.raises(af.errors.BatchError, match="no tensor"):
        af.micro_batches(value, 2)


def test_a_static_graph_finds_unused_parameters_itself():
    with pytest.raises(af.errors.ArgumentError, match="Pass only one of the two"):
        af.wrap_ddp(static_graph=True, find_unused_parameters=True)


def test_infinity_prints_as_code():
    value = af.clip_grad_norm(float("inf"))
    assert repr(value) == 'af.clip_grad_norm(float("inf"))'
    assert eval(repr(value), {"af": af}) == value  # noqa: S307


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
