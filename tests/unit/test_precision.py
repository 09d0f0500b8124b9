# SPDX-License-Identifier: Apache-2.0
"""`autocast`: 16 bits against a reference in 64, what it refuses, and where it reaches."""

import importlib.util
import math
from functools import partial

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import accelfn as af
from accelfn.errors import (
    ArgumentError,
    GradsError,
    LossError,
    ModelError,
    NonFiniteGradsError,
)
from tests.internals import modules, transform
from tests.states import bits, linear_state


def net(outputs=4):
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, outputs))


def loss_fn(model, batch):
    x, y = batch
    return cross_entropy(model(x), y)


def batch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 16, generator=generator)
    return x, torch.randint(0, 4, (24,), generator=generator)


def create(*setup, **options):
    return linear_state(setup=af.chain(*setup), **{"model": net, **options})


STEP = af.make_step(loss_fn)


@transform
class Spy:
    """Note the gradients that come by."""

    seen: list = attrs.field(factory=list, eq=False)

    def grads(self, grads, slot, update):
        self.seen.append({n: g.clone() for n, g in grads.tensors.items()})
        return grads, slot


def reference(scale):
    """Return gradients in float64."""
    state = create(model=lambda: net().double(), seed=0)
    params = {n: p.double() for n, p in create().params.items()}
    x, y = batch()
    compute = af.value_and_grad(lambda m, b: loss_fn(m, b) * scale)
    _, grads = compute(state.with_params(params), (x.double(), y))
    return dict(grads.tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_gradients_are_those_of_float64_to_16_bits(dtype, scale):
    """Within some units of rounding, even where most would vanish without a scale."""
    spy = Spy()
    state = create(af.autocast("fp16" if dtype is torch.float16 else "bf16"), spy)
    step = af.make_step(lambda m, b: loss_fn(m, b) * scale)
    while not state.step:  # the first scale may be too high
        state, _ = step(state, batch())
    for name, want in reference(scale).items():
        error = (spy.seen[-1][name].double() - want).norm() / want.norm()
        assert error < 8 * torch.finfo(dtype).eps


def test_without_a_scale_small_gradients_vanish():
    """That is what the scale is for: at 1 a gradient of 1e-10 is 0 in float16."""
    step = af.make_step(lambda m, b: m(b[0]).float().sum() * 1e-10)
    for scale in (1.0, 2.0**16):
        spy = Spy()
        step(create(af.autocast("fp16", init_scale=scale), spy), batch())
        assert bool(spy.seen[-1]["0.weight"].any()) == (scale > 1)


def test_autocast_is_torchs_around_the_loss():
    """The update is bitwise that under torch's autocast, which is off behind it."""
    state = create(af.autocast("bf16"))
    with af.borrow_model(state.copy()) as model:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss_fn(model, batch())
        value.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        expected = bits(dict(model.named_parameters()))
    assert expected == bits(STEP(state, batch())[0].params)
    assert not torch.is_autocast_enabled("cpu")


def test_a_region_in_full_precision():
    """Inside, products are in float32 and what comes in 16 bits is widened; outside not."""
    dtypes = []

    def loss(model, batch):
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
    ("precision", "options", "says"),
    [
        ("fp7", {}, r"'fp7'.*expected 'bf16'"),
        (None, {}, "expected 'bf16'"),
        (torch.bfloat16, {}, "expected 'bf16'"),
        (["bf16"], {}, "expected 'bf16'"),
        ("bf16", {"init_scale": 2.0}, "only for 'fp16'"),
        ("fp16", {"init_scale": 0.0}, "above 0"),
        ("fp16", {"init_scale": math.nan}, "above 0"),
        ("fp16", {"growth_factor": 1.0}, "above 1"),
        ("fp16", {"backoff_factor": 1.0}, "below 1"),
        ("fp16", {"layers": bool}, "only for 'fp8'"),
        ("fp8", {"layers": 3}, "expected a function"),
    ],
)
def test_options_without_a_meaning_are_refused(precision, options, says):
    """An unknown precision, a scale of nothing, an option that only fp16 has."""
    with pytest.raises(ArgumentError, match=says):
        af.autocast(precision, **options)


def test_a_scale_that_fell_to_nothing_raises():
    """Gradients that never are finite are not fp16's doing; the state is as it was."""
    state = create(af.autocast("fp16", init_scale=2.0**-20))
    step = af.make_step(lambda m, b: loss_fn(m, b) * math.nan)
    for _ in range(4):
        state, _ = step(state, batch())
    with pytest.raises(NonFiniteGradsError, match="fell to"):
        step(state, batch())
    assert (state.step, state.num_skipped) == (0, 4)
    assert STEP(state, batch())[0].step == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("setup", [af.skip_nonfinite(), af.autocast("fp16")])
def test_the_default_dtype_is_nothing_to_a_step(setup, dtype):
    """Whatever torch makes tensors of, parameters and slots move bitwise as ever."""
    inputs = batch()

    def trained():
        state = create(setup, model=lambda: net().float(), seed=0)
        state = state.with_params({n: p * 0 + 0.1 for n, p in state.params.items()})
        for factor in (1, math.inf, 1):  # the second is skipped
            step = af.make_step(lambda m, b, f=factor: af.Loss(loss_fn(m, b) * f, 3))
            state, _ = step(state, inputs)
        assert (state.step, state.num_skipped) == (2, 1)
        return bits(state.params), bits(state.slots)

    expected = trained()
    torch.set_default_dtype(dtype)
    try:
        assert expected == trained()
    finally:
        torch.set_default_dtype(torch.float32)


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
        state, metrics = STEP(state, each)
        assert not metrics["skipped"]


def rows(batch):
    return len(batch[0])


@pytest.mark.parametrize(
    ("count", "loss", "says"),
    [
        (lambda _: "3", lambda _m, _b, _c: 0, "expected a number of 0 or more"),
        (lambda _: -1, lambda _m, _b, _c: 0, "expected a number of 0 or more"),
        (lambda _: math.inf, lambda _m, _b, _c: 0, "expected a number of 0 or more"),
        (rows, lambda m, b, c: af.Loss(loss_fn(m, b), c), "the weight must be 1"),
    ],
)
def test_counts_and_losses_that_do_not_fit_are_refused(count, loss, says):
    """What is no count, and a loss that would be divided twice."""
    with pytest.raises(LossError, match=says):
        af.make_step(loss, count=count)(create(), batch())


def test_gradients_that_do_not_add_are_refused():
    """A count is a function, and of a whole update; gradients with a loss scale are others."""
    with pytest.raises(ArgumentError, match="expected a function"):
        af.make_step(loss_fn, count=3)
    state = create()
    counted = af.value_and_grad(lambda m, b, _: loss_fn(m, b), count=rows)
    _, grads = counted(state, batch())
    with pytest.raises(GradsError, match="into= cannot be used with count"):
        counted(state, batch(), into=grads)
    compute = af.value_and_grad(loss_fn)
    _, grads = compute(state, batch())
    with pytest.raises(GradsError, match="another setup"):
        compute(state.with_setup(af.autocast("fp16")), batch(), into=grads)


def test_counts_have_the_same_names_in_all_parts():
    """A name that a micro-batch has and the first one had not is refused with both."""

    def count(part):
        return {"words": 1, "marks": 1} if len(part[0]) == 8 else {"words": 1}

    x, y = batch()
    state = create(af.accumulate(num_micro_batches=2))
    step = af.make_step(lambda m, b, _: loss_fn(m, b), count=count)
    with pytest.raises(LossError, match=r"\['marks', 'words'\] and then \['words'\]"):
        step(state, [(x[:n], y[:n]) for n in (8, 6)])


@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 8192.0, 3.0]), min_size=1, max_size=5)
)
def test_an_update_of_no_weight_tells_fp16_nothing(weights):
    """Where nothing counts, the unit of losses stays; so does what is trained beside it."""
    step = af.make_step(lambda m, weight: af.Loss(loss_fn(m, batch()) * weight, weight))

    def train(weights):
        state = create(af.autocast("fp16"))
        for weight in weights:
            state, _ = step(state, weight)
        return state.slots["autocast"]["unit"], state.num_skipped, bits(state.params)

    assert train(weights) == train([weight for weight in weights if weight])


def products(setup):
    """Return gradients of one step of layers that are wide enough for float8."""
    spy = Spy()
    STEP(create(setup, spy, model=partial(net, 16)), batch())
    return spy.seen[-1]


def error(found, want):
    return max(float((found[n] - g).norm() / g.norm()) for n, g in want.items())


def test_float8_multiplies_in_float8_in_the_layers_that_are_meant():
    """Gradients are those of float32 to 3 bits, and farther from them than bfloat16's."""
    first = af.autocast("fp8", layers=lambda name, _: name == "0")
    want, low = products(None), products(af.autocast("bf16"))
    both, one = products(af.autocast("fp8")), products(first)
    assert 0.004 < error(both, want) < 0.25
    assert error(low, want) < 0.02
    assert len({float(each["2.weight"].norm()) for each in (low, both, one)}) == 3


def test_float8_trains_evaluates_and_recomputes():
    """Evaluation runs in float8 too, and recomputed activations give the very same step."""
    fp8 = af.autocast("fp8")
    again = af.chain(fp8, af.checkpoint_activations(nn.Linear))
    assert bits(products(fp8)) == bits(products(again))
    data = af.Data(batch(), global_batch_size=8, shuffle=False)
    eight, sixteen = (
        af.evaluate(create(cast, model=partial(net, 16)), data, loss_fn)["loss"]
        for cast in (fp8, af.autocast("bf16"))
    )
    assert eight != sixteen
    assert math.isclose(eight, sixteen, rel_tol=0.05)


def test_float8_casts_by_itself_on_cuda_too(monkeypatch):
    """Where CUDA's autocast is on, torchao would ask for its dtype by a call that warns."""
    plain = products(af.autocast("fp8"))
    monkeypatch.delattr(torch, "get_autocast_gpu_dtype")
    torch.set_autocast_enabled("cuda", True)  # noqa: FBT003 - it takes no keyword
    try:
        assert bits(plain) == bits(products(af.autocast("fp8")))
    finally:
        torch.set_autocast_enabled("cuda", False)  # noqa: FBT003


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
