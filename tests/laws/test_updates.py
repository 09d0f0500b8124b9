# SPDX-License-Identifier: Apache-2.0
"""What happens between gradients and the next state: clipping, schedules, averages."""

import functools
import math
import tempfile
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import Update
from tests.laws.worlds import DDP, single
from tests.strategies import differences

Tensors = dict[str, torch.Tensor]
NORMS = st.sampled_from([1.0, 2.0, 3.0, math.inf])
PLAIN = functools.partial(torch.optim.SGD, lr=1.0)
RATES = st.sampled_from([2.0, torch.tensor(2.0, dtype=torch.float64)])
elements = st.integers(-12, 12).map(float)


def gradients(
    values: list[list[float]], optimizer: Any = PLAIN
) -> tuple[af.TrainState, af.Grads]:
    """Return a state, and gradients of it that hold these values."""
    state = af.TrainState.create(
        model=lambda: nn.ParameterList([torch.zeros(len(v)).double() for v in values]),
        optimizer=optimizer,
        world=single(),
    )

    total = af.value_and_grad(lambda net, _: sum(param.sum() for param in net))
    _, grads = total(state, None)
    tensors = {str(i): torch.tensor(v).double() for i, v in enumerate(values)}
    return state, grads.with_tensors(tensors)


def begun(state: af.TrainState, grads: af.Grads) -> Update:
    """Return what transforms are told of a state's next update, with these gradients."""
    return Update(state=state, slots=dict(state.slots), grads=grads)


def clipped(values: list[list[float]], *by: object) -> Tensors:
    """Return what transforms make of gradients with these values."""
    state, grads = gradients(values)
    for each in by:
        grads, _ = each.grads(grads, None, begun(state, grads))
    return {name: grad.clone() for name, grad in grads.tensors.items()}


def norm_of(grads: Tensors, p: float) -> float:
    flat = torch.cat([grad.flatten() for grad in grads.values()])
    return float(torch.linalg.vector_norm(flat, p))


drawn = st.lists(st.lists(elements, min_size=1, max_size=4), min_size=1, max_size=4)


@given(
    values=drawn,
    bound=st.sampled_from([0.25, 1.0, 5.0]),
    p=NORMS,
    of=st.lists(st.integers(0, 1), min_size=4, max_size=4),
    named=st.booleans(),
)
def test_clipping_by_group(values, bound, p, of, *, named):
    """Each parameter group is clipped as if it were all there is, and told by its name."""
    first = of[0]
    members = [
        [i for i in range(len(values)) if of[i] == g] for g in (first, 1 - first)
    ]
    members = [each for each in members if each]

    def grouped(params: list) -> torch.optim.Optimizer:
        groups = [{"params": [params[i] for i in each]} for each in members]
        for i, group in enumerate(groups if named else []):
            group["name"] = f"g{i}"
        return torch.optim.SGD(groups, lr=1.0)

    clip = af.clip_grad_norm(bound, norm_type=p, per_group=True)
    state, grads = gradients(values, grouped)
    found, _ = clip.grads(grads, None, begun(state, grads))
    for i, each in enumerate(members):
        alone = clipped(
            [values[j] for j in each], af.clip_grad_norm(bound, norm_type=p)
        )
        own = {str(k): found.tensors[str(j)] for k, j in enumerate(each)}
        assert differences(alone, own, within=1e-12) == []
        before = norm_of(clipped([values[j] for j in each]), p)
        key = f"grad_norm.g{i}" if named else f"grad_norm.{i}"
        assert math.isclose(float(found.metrics[key]), before, rel_tol=1e-12)
    total = norm_of(clipped(values), p)
    assert math.isclose(float(found.metrics["grad_norm"]), total, rel_tol=1e-12)


@given(
    names=st.lists(
        st.sampled_from([None, "a", "b", "0", "1", 1]), min_size=1, max_size=4
    )
)
def test_groups_that_would_be_one_are_refused(names: list[Any]) -> None:
    """Of groups by themselves each has a name or number that no other has, or is refused."""

    def grouped(params: list) -> torch.optim.Optimizer:
        groups = [{"params": [each]} for each in params]
        for group, name in zip(groups, names, strict=True):
            group.update({} if name is None else {"name": name})
        return torch.optim.SGD(groups, lr=1.0)

    def clipping(**options: bool) -> set[str]:
        state = af.TrainState.create(
            model=lambda: nn.ParameterList([torch.ones(2) for _ in names]),
            optimizer=grouped,
            setup=af.clip_grad_norm(0.5, **options),
            world=single(),
        )
        step = af.make_step(lambda net, _: sum(param.sum() for param in net))
        return set(step(state, None)[1])

    assert clipping() == {"loss", "grad_norm"}
    labels = [str(i if name is None else name) for i, name in enumerate(names)]
    if len(set(labels)) == len(labels):
        norms = {f"grad_norm.{label}" for label in labels}
        assert clipping(per_group=True) == {"loss", "grad_norm", *norms}
        return
    with pytest.raises(af.errors.OptimizerError, match=r"parameter groups \d and \d"):
        clipping(per_group=True)


@given(values=drawn, bad=st.sampled_from([math.inf, -math.inf, math.nan]), p=NORMS)
def test_clipping_leaves_what_is_not_finite(values: list, bad: float, p: float) -> None:
    """Where one element is not finite, all are left bitwise as they are."""
    spoilt = [[bad, *values[0]], *values[1:]]
    clip = af.clip_grad_norm(0.25, norm_type=p)
    assert differences(clipped(spoilt), clipped(spoilt, clip)) == []


@given(values=drawn, bound=st.sampled_from([0.5, 2.0, 20.0]))
def test_clipping_by_value(values: list, bound: float) -> None:
    """Every element is the nearest one within the bound; twice is once."""
    clip = af.clip_grad_value(bound)
    expected = {
        name: torch.tensor([min(max(v, -bound), bound) for v in grad.tolist()]).double()
        for name, grad in clipped(values).items()
    }
    assert differences(expected, clipped(values, clip)) == []
    assert differences(expected, clipped(values, clip, clip)) == []


@given(
    lengths=st.one_of(
        st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
        st.sampled_from([[3] * 256, [1, 2] * 128 + [3], [2] * 513]),
    ),
    dtypes=st.lists(
        st.sampled_from([torch.float32, torch.float64]), min_size=1, max_size=2
    ),
    p=NORMS,
    seed=st.integers(0, 99),
)
def test_the_norm_is_torchs(lengths, dtypes, p, seed):
    """Of few gradients or many, empty ones among them, of one dtype or two: bit by bit."""
    draws = torch.Generator().manual_seed(seed)
    values = [
        torch.randn(n, generator=draws).to(dtypes[i % len(dtypes)])
        for i, n in enumerate(lengths)
    ]
    state, grads = gradients([each.tolist() for each in values])
    grads = grads.with_tensors({str(i): each for i, each in enumerate(values)})
    clip = af.clip_grad_norm(math.inf, norm_type=p)
    found, _ = clip.grads(grads, None, begun(state, grads))
    expected = torch.nn.utils.get_total_norm([v for v in values if len(v)], p)
    assert torch.equal(expected, found.metrics["grad_norm"])


@given(
    does=st.lists(st.sampled_from(["step", "look", "fail", "fork"]), max_size=6),
    parts=st.integers(1, 3),
    size=st.sampled_from([1, 2]),
    rate=RATES,
)
def test_the_schedule_follows_updates(does, parts, size, rate):
    """The rate is that of the update number: no call, failure or fork moves it."""
    setup = af.chain(af.accumulate(num_micro_batches=parts), DDP)

    def play(world: af.World) -> None:
        state = af.TrainState.create(
            model=lambda: nn.Linear(1, 1, bias=False).double(),
            optimizer=functools.partial(torch.optim.SGD, lr=rate),
            schedule=lambda update: 2.0 ** -min(update + 1, 20),
            data=af.Data(torch.ones(8, 1).double(), global_batch_size=4),
            setup=setup,
            world=world,
        )

        def loss(
            net: nn.Module, x: torch.Tensor, *, fails: bool = False
        ) -> torch.Tensor:
            value = net(x).mean()  # whose gradient is 1
            if fails:
                raise KeyError("planned")
            return value

        step = af.make_step(loss)
        failing = af.make_step(functools.partial(loss, fails=True))
        place = float(next(iter(state.params.values())))
        for done in does:
            assert state.lrs == (2.0**-state.step,)
            batch = next(iter(af.batches(state)))
            match done:
                case "step":
                    place -= 2.0**-state.step
                    state, _ = step(state, batch)
                case "look":
                    af.value_and_grad(loss)(state, batch)
                case "fork":
                    step(state, batch, donate=False)
                case "fail":
                    try:
                        failing(state, batch)
                    except KeyError:
                        continue
                    raise AssertionError
        found = float(next(iter(state.params.values())))
        assert math.isclose(place, found, abs_tol=1e-12)
        assert state.step == does.count("step")

    simulate(size, play)


@af.transform
class Sets:
    """Sets the rate in some updates."""

    at: frozenset[int]

    def hyper(self, hyper: Mapping[Any, Any], slot: Any, update: Update) -> Any:
        step = update.state.step
        return ({"lr": 2.0**-step} if step in self.at else {}), slot


@given(
    at=st.frozensets(st.integers(0, 5)),
    between=st.lists(st.sampled_from(["", "copy", "load", "bare"]), max_size=6),
    rate=RATES,
)
def test_what_was_set_leaves_nothing(at, between, rate):
    """A rate that is set for an update holds for it alone, in copies and checkpoints too."""
    state = af.TrainState.create(
        model=lambda: nn.Linear(1, 1, bias=False).double(),
        optimizer=functools.partial(torch.optim.SGD, lr=rate),
        setup=Sets(at),
        world=single(),
    )
    step = af.make_step(lambda net, x: net(x).mean())  # whose gradient is 1
    place = state.params["weight"].item()
    for i, how in enumerate(between):
        now = 2.0**-i if i in at and len(state.setup) else 2.0
        assert state.lrs == (now,)
        state, _ = step(state, torch.ones(1, 1).double())
        place -= now
        assert math.isclose(place, state.params["weight"].item(), abs_tol=1e-12)
        if how == "copy":
            state = state.copy()
        elif how == "load":
            with tempfile.TemporaryDirectory() as folder:
                af.save(state, f"{folder}/saved")
                state = af.load(state, f"{folder}/saved")
        elif how == "bare":
            state = state.with_setup(None)
