# SPDX-License-Identifier: Apache-2.0
"""`autocast`: 16 bits against a reference in 64, what it refuses, and where it reaches."""

import functools
import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import accelfn as af
from accelfn.errors import ArgumentError, LossError, ModelError, NonFiniteGradsError
from accelfn.testing import assert_states_equal
from tests.internals import modules, step, transform


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return cross_entropy(model(x), y)


def batch(rows: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(rows, 16, generator=generator),
        torch.randint(0, 4, (rows,), generator=generator),
    )


def create(*setup: object, **options: Any) -> af.TrainState:
    return af.TrainState.create(
        model=options.pop("model", net),
        optimizer=options.pop("optimizer", functools.partial(torch.optim.SGD, lr=0.1)),
        setup=af.chain(*setup),
        **options,
    )


@transform
class Spy:
    """Note the gradients that come by."""

    seen: list[Any] = attrs.field(factory=list, eq=False)

    def grads(self, grads: af.Grads, slot: Any, update: Any) -> Any:
        self.seen.append({n: g.clone() for n, g in grads.tensors.items()})
        return grads, slot


def reference(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return gradients in float64."""
    state = create(model=lambda: net().double(), seed=0)
    params = {n: p.double() for n, p in create().params.items()}
    x, y = batch()
    compute = af.value_and_grad(lambda m, b: loss_fn(m, b) * scale)
    _, grads = compute(state.with_params(params), (x.double(), y))
    return dict(grads.tensors)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_gradients_are_those_of_float64_to_16_bits(precision, scale):
    """Within some units of rounding, even where most would vanish without a scale."""
    spy = Spy()
    state = create(af.autocast(precision), spy)
    step = af.make_step(lambda m, b: loss_fn(m, b) * scale)
    while not state.step:  # the first scale may be too high
        state, _ = step(state, batch())
    unit = torch.finfo({"fp16": torch.float16, "bf16": torch.bfloat16}[precision]).eps
    for name, want in reference(scale).items():
        error = (spy.seen[-1][name].double() - want).norm() / want.norm()
        assert error < 8 * unit


def test_without_a_scale_small_gradients_vanish():
    """That is what the scale is for: at 1 a gradient of 1e-10 is 0 in float16."""
    seen = {}
    for scale in (1.0, 2.0**16):
        spy = Spy()
        state = create(af.autocast("fp16", init_scale=scale), spy)
        step = af.make_step(lambda m, b: m(b[0]).float().sum() * 1e-10)
        step(state, batch())
        seen[scale] = float(spy.seen[-1]["0.weight"].abs().sum())
    assert seen[1.0] == 0.0
    assert seen[2.0**16] > 0.0


def test_a_region_in_full_precision():
    """Inside, products are in float32 and what comes in 16 bits is widened; outside not."""
    dtypes = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        dtypes.append(out.dtype)
        with af.full_precision(out, {"y": out}) as (wide, others):
            dtypes.extend([wide.dtype, others["y"].dtype, (wide.T @ wide).dtype])
        with af.full_precision():
            dtypes.append((batch[0].T @ batch[0]).dtype)
        with af.full_precision(out) as wide:
            dtypes.append(wide.dtype)
        dtypes.append((batch[0].T @ batch[0]).dtype)
        return wide.square().mean()

    af.make_step(loss)(create(af.autocast("bf16")), batch())
    low, full = torch.bfloat16, torch.float32
    assert dtypes == [low, full, full, full, full, full, low]


def test_parameters_in_float16_are_refused():
    """Updates would be lost to rounding; the parameters are named."""
    with pytest.raises(ModelError, match=r"0\.weight.*model\.float"):
        create(af.autocast("fp16"), model=lambda: net().half())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"precision": "fp17"}, "expected 'bf16'"),
        ({"precision": "bf16", "init_scale": 2.0}, "only for 'fp16'"),
        ({"precision": "fp16", "init_scale": 0.0}, "above 0"),
        ({"precision": "fp16", "init_scale": math.nan}, "above 0"),
        ({"precision": "fp16", "growth_factor": 1.0}, "above 1"),
        ({"precision": "fp16", "backoff_factor": 1.0}, "below 1"),
        ({"precision": "fp16", "layers": bool}, "only for 'fp8'"),
        ({"precision": "fp8", "layers": 3}, "expected a function"),
    ],
)
def test_options_without_a_meaning_are_refused(arguments, says):
    """An unknown precision, a scale of nothing, an option that only fp16 has."""
    with pytest.raises(ArgumentError, match=says):
        af.autocast(**arguments)


def test_a_scale_that_fell_to_nothing_raises():
    """Gradients that never are finite are not fp16's doing; the state is as it was."""
    state = create(af.autocast("fp16", init_scale=2.0**-20))
    step = af.make_step(lambda m, b: loss_fn(m, b) * math.nan)
    for _ in range(4):
        state, _ = step(state, batch())
    with pytest.raises(NonFiniteGradsError, match="fell to"):
        step(state, batch())
    assert (state.step, state.num_skipped) == (0, 4)
    state, _ = af.make_step(loss_fn)(state, batch())
    assert state.step == 1


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16])
def other_default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Another default dtype, the program's own, for the time of a test."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("setup", [af.skip_nonfinite(), af.autocast("fp16")])
def test_the_default_dtype_is_nothing_to_a_step(setup, other_default):
    """Whatever torch makes tensors of, parameters and slots move bitwise as ever."""
    assert torch.get_default_dtype() is other_default

    def trained() -> af.TrainState:
        state = create(setup, model=lambda: net().float(), seed=0)
        state = state.with_params({n: p * 0 + 0.1 for n, p in state.params.items()})
        for factor in (1, math.inf, 1):  # the second is skipped
            step = af.make_step(lambda m, b, f=factor: af.Loss(loss_fn(m, b) * f, 3))
            state, _ = step(state, inputs)
        return state

    inputs = tuple(x.float() if x.is_floating_point() else x for x in batch())
    found = trained()
    torch.set_default_dtype(torch.float32)
    expected = trained()
    assert (found.step, found.num_skipped) == (2, 1)
    torch.testing.assert_close(found.params, expected.params, rtol=0, atol=0)
    torch.testing.assert_close(dict(found.slots), dict(expected.slots), rtol=0, atol=0)


@pytest.mark.parametrize(
    "cut",
    [
        {"global_batch_size": af.token_budget([1] * 24, limit=8)},
        {"batch_sampler": [list(range(8)), list(range(8, 24))]},
        {"global_batch_size": 8},
    ],
)
def test_a_scale_for_batches_of_any_cut(cut):
    """By samples, by a budget, by a sampler: nothing overflows in the first update."""
    state = create(af.autocast("fp16"), data=af.Data(batch(), **cut))
    # the largest power of 2 in the mean number of samples, which is 8 or 12
    assert float(state.slots["autocast"]["unit"]) == 8
    for each in af.batches(state, until_epoch=1):
        state, metrics = af.make_step(loss_fn)(state, each)
        assert not metrics["skipped"]


def test_adding_to_gradients_of_another_scaling_is_refused():
    """Gradients with and without a loss scale do not add."""
    compute = af.value_and_grad(loss_fn)
    plain = create()
    _, grads = compute(plain, batch())
    with pytest.raises(af.errors.GradsError, match="another setup"):
        compute(plain.with_setup(af.autocast("fp16")), batch(), into=grads)


@pytest.mark.parametrize(
    ("count", "loss", "says"),
    [
        (lambda _: "3", lambda _m, _b, _c: 0, "expected a number of 0 or more"),
        (lambda _: -1, lambda _m, _b, _c: 0, "expected a number of 0 or more"),
        (lambda _: math.inf, lambda _m, _b, _c: 0, "expected a number of 0 or more"),
        (
            lambda b: len(b[0]),
            lambda m, b, c: af.Loss(loss_fn(m, b), c),
            "with count= the weight must be 1",
        ),
    ],
)
def test_counts_and_losses_that_do_not_fit_are_refused(count, loss, says):
    """What is no count, and a loss that would be divided twice."""
    with pytest.raises(LossError, match=says):
        af.make_step(loss, count=count)(create(), batch())


def test_counts_are_of_whole_updates():
    """A count is a function, and adding to gradients beside one is refused."""
    with pytest.raises(ArgumentError, match="expected a function"):
        af.make_step(loss_fn, count=3)
    state = create()
    compute = af.value_and_grad(
        lambda m, b, _: loss_fn(m, b), count=lambda b: len(b[0])
    )
    _, grads = compute(state, batch())
    with pytest.raises(af.errors.GradsError, match="into= cannot be used with count"):
        compute(state, batch(), into=grads)


def test_counts_have_the_same_names_in_all_parts():
    """A name that a micro-batch has and the first one had not is refused with both."""

    def count(part: Any) -> dict[str, int]:
        return {"words": 1, "marks": 1} if len(part[0]) == 8 else {"words": 1}

    parts = [(x[:n], y[:n]) for n, (x, y) in zip((8, 6), [batch()] * 2, strict=True)]
    state = create(af.accumulate(num_micro_batches=2))
    with pytest.raises(LossError, match=r"\['marks', 'words'\] and then \['words'\]"):
        af.make_step(lambda m, b, _: loss_fn(m, b), count=count)(state, parts)


@pytest.mark.parametrize("after", [af.ema(0.5), af.local_sgd(sync_every=2)], ids=repr)
def test_what_follows_updates_follows_none_that_a_device_skips(after, monkeypatch):
    """Where a device could skip by itself, averages count as where the host decides."""

    def train() -> Any:
        state = create(
            af.autocast("fp16", init_scale=8.0),
            after,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1, fused=True),
        )
        for factor in (1.0, math.inf, 1.0):
            step = af.make_step(lambda m, b, f=factor: loss_fn(m, b) * f)
            state, _ = step(state, batch())
        return state, af.eval_params(state)

    host, expected = train()
    monkeypatch.setattr(step, "_reads_at_once", lambda _: False)
    device, found = train()
    assert (device.step, device.num_skipped) == (host.step, host.num_skipped) == (2, 1)
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert_states_equal(host, device)


@given(counts=st.lists(st.sampled_from([0, 1, 3]), min_size=1, max_size=4))
def test_a_count_of_0_weighs_nothing(counts: list[int]) -> None:
    """Loss and gradients are the loss function's own, whichever of its counts are 0."""

    def loss(model: nn.Module, batch: Any, told: dict[str, float]) -> torch.Tensor:
        assert told == {f"{i}": each or 1 for i, each in enumerate(counts)}
        shares = (each / told[f"{i}"] for i, each in enumerate(counts))
        return loss_fn(model, batch) * sum(shares)

    state, factor = create(), sum(map(bool, counts))
    metrics, grads = af.value_and_grad(
        loss, count=lambda _: {f"{i}": each for i, each in enumerate(counts)}
    )(state, batch())
    plain, expected = af.value_and_grad(loss_fn)(state, batch())
    assert float(metrics["loss"]) == pytest.approx(float(plain["loss"]) * factor)
    before = {n: p.clone() for n, p in state.params.items()}
    after = af.apply_grads(state, grads)
    for name, grad in expected.tensors.items():
        moved = (before[name] - after.params[name]) / 0.1
        assert torch.allclose(moved, grad * factor, atol=1e-5)


@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 8192.0, 3.0]), min_size=1, max_size=5)
)
def test_an_update_of_no_weight_tells_fp16_nothing(weights: list[float]) -> None:
    """Where nothing counts, the unit of losses stays; so does what is trained beside it."""

    def total(model: nn.Module, weight: float) -> af.Loss:
        return af.Loss(loss_fn(model, batch()) * weight, weight)

    def train(weights: list[float]) -> af.TrainState:
        state, step = create(af.autocast("fp16")), af.make_step(total)
        for weight in weights:
            state, _ = step(state, weight)
        return state

    found = train(weights)
    expected = train([weight for weight in weights if weight])
    assert found.slots["autocast"]["unit"] == expected.slots["autocast"]["unit"]
    assert found.num_skipped == expected.num_skipped
    for name, param in expected.params.items():
        assert torch.equal(found.params[name], param)


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def products(setup: object, **options: Any) -> dict[str, torch.Tensor]:
    """Return gradients of one step."""
    spy = Spy()
    state = create(setup, spy, model=options.pop("model", large), **options)
    af.make_step(loss_fn)(state, batch())
    return spy.seen[-1]


def error(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    return max(float((found[n] - g).norm() / g.norm()) for n, g in want.items())


def test_float8_multiplies_in_float8():
    """Gradients are those of float32 to 3 bits, and farther from them than bfloat16's."""
    want = products(None)
    assert 0.004 < error(products(af.autocast("fp8")), want) < 0.25
    assert error(products(af.autocast("bf16")), want) < 0.02


def test_float8_in_the_layers_that_are_meant():
    """Where one layer is meant, the result is neither that of both nor that of none."""
    first = af.autocast("fp8", layers=lambda name, _: name == "0")
    found = {
        name: products(each)["2.weight"].norm()
        for name, each in {
            "first": first,
            "both": af.autocast("fp8"),
            "none": af.autocast("bf16"),
        }.items()
    }
    assert len({float(each) for each in found.values()}) == 3


def test_float8_trains_evaluates_and_recomputes():
    """Evaluation runs in float8 too, and recomputed activations give the very same step."""
    plain, again = (
        products(af.chain(af.autocast("fp8"), each))
        for each in (None, af.checkpoint_activations(nn.Linear))
    )
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    data = af.Data(batch(), global_batch_size=8, shuffle=False)
    means = {}
    for name in ("fp8", "bf16"):
        state = create(af.autocast(name), model=large)
        found = af.evaluate(state, data, lambda m, b: {"loss": loss_fn(m, b)})
        means[name] = float(found["loss"])
    assert means["fp8"] != means["bf16"]
    assert math.isclose(*means.values(), rel_tol=0.05)


def test_float8_casts_by_itself_on_cuda_too():
    """Where CUDA's autocast is on, torchao would ask for its dtype by a call that warns."""
    asked: list[bool] = []
    plain = products(af.autocast("fp8"))
    torch.set_autocast_enabled("cuda", True)  # noqa: FBT003 - it takes no keyword
    try:
        with pytest.MonkeyPatch.context() as patch:
            call = "get_autocast_gpu_dtype"
            patch.setattr(torch, call, lambda: asked.append(True) or torch.bfloat16)
            found = products(af.autocast("fp8"))
    finally:
        torch.set_autocast_enabled("cuda", False)  # noqa: FBT003
    assert asked == []
    assert all(torch.equal(plain[name], each) for name, each in found.items())


def test_float8_that_cannot_be_is_refused(monkeypatch):
    """Sizes that are no multiples of 16, no layer at all, an old GPU, no torchao."""
    with pytest.raises(ModelError, match=r"multiples of 16.*2 \(32 to 4\)"):
        af.prepare_engine(create(af.autocast("fp8")))
    with pytest.raises(ModelError, match=r"selects no torch\.nn\.Linear"):
        af.prepare_engine(create(af.autocast("fp8", layers=lambda *_: False)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ArgumentError, match=r"8\.9 or more, but this GPU has 8\.0"):
        modules._check_device(torch.device("cuda"), "af.autocast('fp8')")
    with pytest.raises(ArgumentError, match="of type 'mps'"):
        modules._check_device(torch.device("mps"), "af.autocast('fp8')")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ArgumentError, match=r"pip install 'accelfn\[fp8\]'"):
        af.autocast("fp8")
