# SPDX-License-Identifier: Apache-2.0
"""`compare_loops`: a faithful port agrees, and each usual mistake is named where it begins."""

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import accelfn as af
from accelfn.errors import ArgumentError, LawError
from accelfn.testing import compare_loops, quantities, simulate
from tests.states import linear_state

Loop = Callable[[], Iterator[dict[str, object]]]

ROWS, PARTS, LENGTH = 24, 3, 16
generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
TARGETS = torch.randn(ROWS, 2, generator=generator, dtype=torch.float64)
FIRST = "is the first to differ (old loop and new loop):"


def drawn_model(seed: int) -> nn.Module:
    """Return a model of two layers, whose dropout is off."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.0), nn.Linear(4, 2)
        )
    return model.double()


MODEL = drawn_model(0)


def by_hand(
    *,
    model: nn.Module = MODEL,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    options: dict[str, float] | None = None,
    order: Callable[[int], slice] = lambda i: slice(8 * i, 8 * i + 8),
    mean_of_means: bool = False,
    schedule: bool = True,
    clip: float | None = 0.25,
    zero_grad: bool = True,
    seed: int | None = None,
    reports: tuple[str, ...] = ("batch", "loss", "grads", "optimizer"),
    updates: int = 3,
) -> Iterator[dict[str, object]]:
    """Train as in plain PyTorch, over micro-batches of 3, 3 and 2 rows."""
    if seed is not None:
        torch.manual_seed(seed)
    model = copy.deepcopy(model)
    options = {"lr": 0.25, "momentum": 0.5} if options is None else options
    optimizer = make(model.parameters(), **options)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / LENGTH)
    told = optimizer if "optimizer" in reports else None
    yield quantities(model, told)
    for i in range(updates):
        rows = order(i)
        batch = INPUTS[rows], TARGETS[rows]
        if zero_grad:
            optimizer.zero_grad()
        loss = 0.0
        for part in af.micro_batches(batch, PARTS):
            error = mean_squares(model, part)
            share = 1 / PARTS if mean_of_means else len(part[0]) / len(batch[0])
            (error * share).backward()
            loss += error.item() * share
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule:
            scheduler.step()
        seen = {"batch": batch, "loss": loss, "grads": model}
        seen = {name: value for name, value in seen.items() if name in reports}
        yield quantities(model, told, **seen)


def mean_squares(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def ported(
    *, make: Callable[..., torch.optim.Optimizer], options: dict[str, float]
) -> Iterator[dict[str, object]]:
    """Train the same with accelfn."""
    state = af.TrainState.create(
        model=copy.deepcopy(MODEL),
        optimizer=partial(make, **options),
        schedule=af.schedules.linear(LENGTH),
        data=af.Data((INPUTS, TARGETS), global_batch_size=8),
        setup=af.chain(af.accumulate(num_micro_batches=PARTS), af.clip_grad_norm(0.25)),
    )
    step = af.make_step(mean_squares)
    yield quantities(state)
    for batch in af.batches(state, until_epoch=1):
        state, metrics = step(state, batch)
        whole = tuple(
            torch.cat(each) for each in zip(*batch.micro_batches, strict=True)
        )
        yield quantities(state, batch=whole, loss=metrics["loss"])


def refused(old: Loop, new: Loop, *, steps: int = 3, **tolerance: float) -> list[str]:
    """Return the lines of the refusal, which an exchange of the loops does not change."""
    texts: list[str] = []
    for pair in ((old, new), (new, old)):
        with pytest.raises(LawError) as caught:
            compare_loops(*pair, steps=steps, **tolerance)
        texts.append(str(caught.value))
    first, second = (text.splitlines()[0] for text in texts)
    assert first == second
    return texts[0].splitlines()


class Taken(torch.optim.SGD):
    """Keeps in its groups how many steps it took, as schedule-free optimizers do."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.defaults["taken"] = 0
        for group in self.param_groups:
            group["taken"] = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["taken"] += 1
        return super().step(closure)


OPTIMIZERS = [
    (Taken, {"lr": 0.25, "momentum": 0.5}),
    (torch.optim.SGD, {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.125}),
    (torch.optim.AdamW, {"lr": 0.01, "betas": (0.5, 0.75), "eps": 1e-3}),
]


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
def test_a_faithful_port_agrees(make, options):
    """A loop by hand and accelfn's hold the same, with accumulation, clipping, a schedule."""
    old = partial(
        by_hand, make=make, options=options, reports=("batch", "loss", "optimizer")
    )
    found = compare_loops(
        old, partial(ported, make=make, options=options), steps=3, rtol=1e-4
    )
    assert found.num_updates == 3
    assert found.quantities == ("batch", "loss", "lr", "hyper", "opt_state", "params")
    assert str(found).startswith("3 updates agree ")


def test_a_loop_agrees_with_itself_exactly():
    """Nothing but the loops' own doings enters the comparison."""
    found = compare_loops(by_hand, by_hand, steps=3, rtol=0.0)
    assert found.is_exact
    assert str(found) == (
        "3 updates agree exactly, in batch, loss, grads, lr, hyper, opt_state, params"
    )


def with_dropout() -> nn.Module:
    model = copy.deepcopy(MODEL)
    model[2].p = 0.5
    return model


def swapped(i: int) -> slice:
    """Return the rows of a batch; the second and third change places."""
    i = (0, 2, 1)[i]
    return slice(8 * i, 8 * i + 8)


GRADS = {"reports": ("grads",)}
LOSS = {"reports": ("loss",)}
ADAM = {"make": torch.optim.Adam, "options": {"lr": 0.01, "eps": 1e-3}}
ADAM |= {"reports": ("optimizer",)}
DROPS = {"model": with_dropout()}
DECAYS = {"options": {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.01}}
BEFORE = "Before the first update"
AFTER_0, AFTER_1 = (f"After update {i} (counted from 0)" for i in (0, 1))
MISTAKES = {  # options of both loops, of the new one, and where they part
    "a forgotten scheduler step": ({}, {"schedule": False}, AFTER_0, "lr"),
    "the same, unreported": (LOSS, {"schedule": False}, AFTER_1, "params"),
    "a mean of means": ({}, {"mean_of_means": True}, AFTER_0, "loss"),
    "the same, unreported loss": (GRADS, {"mean_of_means": True}, AFTER_0, "grads"),
    "another order of batches": ({}, {"order": swapped}, AFTER_1, "batch"),
    "a missing clip": ({}, {"clip": None}, AFTER_0, "grads"),
    "the same, with Adam": (ADAM, {"clip": None}, AFTER_0, "opt_state"),
    "a weight decay": ({}, DECAYS, BEFORE, "hyper"),
    "the same, unreported options": (LOSS, DECAYS, AFTER_0, "params"),
    "other seeds of dropout": ({**DROPS, "seed": 0}, {"seed": 1}, AFTER_0, "loss"),
    "evaluation mode": (DROPS, {"model": with_dropout().eval()}, AFTER_0, "loss"),
    "gradients that are not zeroed": ({}, {"zero_grad": False}, AFTER_1, "grads"),
    "another beginning": ({}, {"model": drawn_model(1)}, BEFORE, "params"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_a_port_is_named_where_it_begins(mistake):
    """The first update and the first quantity that differ, causes before effects."""
    both, mine, where, name = MISTAKES[mistake]
    new = partial(by_hand, **{**both, **mine})
    lines = refused(partial(by_hand, **both), new)
    assert lines[0] == f"{where}, {name} {FIRST}"
    assert lines[1].startswith(f"  {name}")
    assert any(line.startswith("Check ") for line in lines)
    assert compare_loops(new, new, steps=3).is_exact


def told(*reports: dict[str, object]) -> Loop:
    """Return a loop that trains nothing and says these things."""
    return lambda: iter([{}, *reports])


CAUSES = ["batch", "loss", "accuracy", "grads", "lr", "hyper", "opt_state", "params"]
NAMES = [*CAUSES, "buffers"]


@given(
    order=st.permutations(NAMES),
    wrong=st.sets(st.sampled_from(NAMES), min_size=1),
    update=st.integers(0, 2),
)
def test_causes_are_named_before_effects(order, wrong, update):
    """In whatever order a loop reports its quantities."""
    right = [dict.fromkeys(order, 1.0) for _ in range(3)]
    other = [dict.fromkeys(NAMES, 1.0) for _ in range(3)]
    other[update] |= dict.fromkeys(wrong, 2.0)
    first = min(wrong, key=NAMES.index)
    lines = refused(told(*right), told(*other))
    assert lines[0].startswith(
        f"After update {update} (counted from 0), {first} is the"
    )
    assert lines[1] == f"  {first}: 1.0 and 2.0, difference 1"


def test_what_a_refusal_says():
    """Both values, what else differs, what agrees, and where to look."""
    old = told({"batch": [1], "loss": 0.5, "params": {"w": torch.tensor([1.0, 2.0])}})
    new = told({"batch": [1], "loss": 0.25, "params": {"w": torch.tensor([1.0, 2.5])}})
    with pytest.raises(LawError) as caught:
        compare_loops(old, new, steps=1)
    assert str(caught.value).splitlines() == [
        f"After update 0 (counted from 0), loss {FIRST}",
        "  loss: 0.5 and 0.25, difference 0.25",
        "Also different: params.",
        "Not different: batch.",
        (
            "Check the divisor of the loss over samples and micro-batches (accelfn treats a"
            ' plain loss as a mean; a loss with reduction="sum" is a sum), dropout and other'
            " random numbers, training or evaluation mode, and precision."
        ),
    ]


def test_a_quantity_that_one_loop_reports_is_a_difference():
    """Otherwise a comparison could be of nothing."""
    lines = refused(told({"loss": 1.0}), told({"loss": 1.0, "grad_norm": 2.0}), steps=1)
    assert lines[1] == "  grad_norm: only in the new loop: 2.0"


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (0.5, torch.tensor(0.5)),
        (torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)),
        (1, torch.tensor(1.0)),
        (np.float32(0.5), 0.5),
        (np.ones(2, dtype=np.float32), torch.ones(2)),
        ([torch.ones(2)], (torch.ones(2),)),
        (0.0, -0.0),
    ],
    ids=repr,
)
def test_numbers_are_compared_by_value(one, two):
    """A loss may be a number here and a tensor there."""
    assert compare_loops(told({"x": one}), told({"x": two}), steps=1).is_exact


def test_the_tolerance_is_relative_to_the_largest_element():
    """A sum that cancels has the rounding error of its terms."""
    one, two = torch.tensor([1e3, 1e-6]), torch.tensor([1e3, 5e-6])
    found = compare_loops(told({"x": one}), told({"x": two}), steps=1, rtol=1e-6)
    assert not found.is_exact
    same = {"x": one}
    found = compare_loops(told({"x": one}, same), told({"x": two}, same), steps=2)
    assert not found.is_exact
    refused(told({"x": one}), told({"x": two}), steps=1, rtol=1e-9)
    compare_loops(told({"x": one}), told({"x": two}), steps=1, rtol=0.0, atol=1e-5)


def test_a_loop_that_ends_early_is_a_difference():
    """As where one drops the short last batch."""
    short = partial(by_hand, updates=2)
    with pytest.raises(LawError, match="The old loop ended after 2 updates, but the"):
        compare_loops(short, by_hand, steps=3)
    with pytest.raises(LawError, match="The new loop ended after 2 updates, but the"):
        compare_loops(by_hand, short, steps=3)
    compare_loops(by_hand, short, steps=2)


def test_loops_that_both_end_early_are_not_compared_in_silence():
    """Fewer updates than were asked for are an error."""
    for loop, steps, count in (
        (by_hand, 4, 3),
        (told(), 1, 0),
        (lambda: iter([]), 1, 0),
    ):
        with pytest.raises(
            ArgumentError, match=f"both loops ended after {count} updates"
        ):
            compare_loops(loop, loop, steps=steps)


def test_a_loop_must_say_what_it_begins_with():
    """Else another beginning would be taken for another loss."""
    loop = [{"loss": 1.0}, {"loss": 2.0}]
    with pytest.raises(ArgumentError, match="those before training"):
        compare_loops(lambda: iter(loop), lambda: iter(loop), steps=1)


@pytest.mark.parametrize("steps", [0, -1, True, 1.0])
def test_steps_is_a_count(steps):
    """Of updates."""
    with pytest.raises(ArgumentError, match="expected a number of updates"):
        compare_loops(by_hand, by_hand, steps=steps)


def drawing(closed: list[str]) -> Iterator[dict[str, object]]:
    try:
        while True:
            yield {
                "torch": torch.rand(2),
                "numpy": np.random.rand(2),  # noqa: NPY002 - the process's own
                "python": random.random(),  # noqa: S311 - no secret
            }
    finally:
        closed.append("closed")


def test_both_loops_draw_the_same_and_the_process_is_left_as_it_was():
    """Generators of torch, numpy and Python; loops that could go on are closed."""
    before = torch.get_rng_state(), np.random.get_state()[1], random.getstate()  # noqa: NPY002
    closed: list[str] = []
    loops = drawing(closed), drawing(closed)
    assert compare_loops(*(lambda each=each: each for each in loops), steps=2).is_exact
    assert closed == ["closed", "closed"]
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert (before[1] == after[1]).all()
    assert before[2] == after[2]


def test_a_loop_is_closed_when_it_differs():
    """At the first difference, before the error is raised."""
    closed: list[str] = []
    old = [{"torch": torch.zeros(2)}] * 2
    with pytest.raises(LawError):
        compare_loops(lambda: iter(old), partial(drawing, closed), steps=1)
    assert closed == ["closed"]


def test_tensors_changed_later_are_compared_as_they_were_reported():
    """Training updates in place; a report is of its moment."""

    def loop(*, last: float) -> Iterator[dict[str, object]]:
        value = torch.zeros(1)
        for add in (0.0, 1.0, 1.0, last):
            value += add
            yield {"params": value}

    lines = refused(partial(loop, last=1.0), partial(loop, last=2.0))
    assert (
        lines[1]
        == "  params: 1 of 1 elements differs, at [0]: 3.0 and 4.0, difference 1"
    )


def test_quantities_of_a_module_are_those_of_its_state():
    """By the same names, with the options of several groups."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    groups = [
        {"params": model[0].parameters(), "lr": 0.5},
        {"params": model[1].parameters(), "weight_decay": 0.25},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.125)
    report = quantities(model, optimizer)
    assert report["lr"] == [0.5, 0.125]
    assert report["hyper"]["weight_decay"] == [0.01, 0.25]
    assert sorted(report) == ["buffers", "hyper", "lr", "params"]
    state = af.TrainState.create(model=model, optimizer=optimizer)
    again = quantities(state)
    assert compare_loops(told(report), told(again), steps=1).is_exact


def test_quantities_of_a_state_include_what_transforms_set():
    """`hyper` of a transform and the schedule, as the next update will take them."""

    @af.transform
    class Halve:
        def hyper(self, hyper, slot, update):
            return {"momentum": 0.25, (0, "weight_decay"): 0.125}, slot

    state = af.TrainState.create(
        model=nn.Linear(1, 1),
        optimizer=partial(torch.optim.SGD, lr=1.0, momentum=0.5),
        schedule=af.schedules.constant(0.5),
        setup=Halve(),
    )
    report = quantities(state)
    assert report["lr"] == [0.5]
    assert report["hyper"]["momentum"] == [0.25]
    assert report["hyper"]["weight_decay"] == [0.125]


def test_a_wrapped_module_has_its_own_names():
    """DistributedDataParallel and DataParallel put nothing before them."""

    def report(world: af.World) -> list[str]:
        wrapped = DistributedDataParallel(nn.Linear(1, 1), process_group=world.group)
        return list(quantities(wrapped)["params"])

    assert list(simulate(2, report)) == [["weight", "bias"]] * 2
    assert list(quantities(DataParallel(nn.Linear(1, 1)))["params"]) == [
        "weight",
        "bias",
    ]


def test_a_batch_is_its_value_or_its_micro_batches():
    """So that a port may report the batch it stepped over."""
    parts = [
        [each[rows] for each in (INPUTS, TARGETS)] for rows in (slice(4), slice(4, 8))
    ]
    twice = af.accumulate(num_micro_batches=2)
    for setup, value in ((None, [INPUTS[:8], TARGETS[:8]]), (twice, parts)):
        data = af.Data((INPUTS, TARGETS), global_batch_size=8)
        batch = next(iter(af.batches(linear_state(3, 2, data=data, setup=setup))))
        one, two = told(quantities(batch=batch)), told({"batch": value})
        assert compare_loops(one, two, steps=1).is_exact


def test_what_quantities_cannot_read_is_refused():
    """An optimizer without its module, a state with one, a state dict."""
    optimizer = torch.optim.SGD(MODEL.parameters())
    state = af.TrainState.create(model=copy.deepcopy(MODEL), optimizer=torch.optim.SGD)
    with pytest.raises(ArgumentError, match="Pass only the state"):
        quantities(state, optimizer)
    for source in (MODEL.state_dict(), None):
        with pytest.raises(ArgumentError, match="expected a TrainState"):
            quantities(source, optimizer)


@pytest.mark.parametrize("weight", [1, 4])
@pytest.mark.parametrize("setup", [None, af.autocast("fp16", init_scale=1024.0)])
def test_quantities_of_gradients_are_those_of_the_mean(setup, weight):
    """Whatever the loss was scaled by, and however much it weighs; and those of a module."""
    state, model, rows = linear_state(2, setup=setup), nn.Linear(2, 1), torch.ones(4, 2)

    def loss(model, batch):
        return af.Loss(model(batch).mean() * weight, weight)

    _, grads = af.value_and_grad(loss)(state, rows)
    model(rows).mean().backward()
    for each in (grads, model):
        told = quantities(grads=each)["grads"]
        assert told["weight"].flatten().tolist() == [1.0, 1.0]
        assert told["bias"].tolist() == [1.0]
