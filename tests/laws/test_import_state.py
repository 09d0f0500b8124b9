# SPDX-License-Identifier: Apache-2.0
"""What another library saved goes on as it does there, in any layout."""

import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import accelfn as af
from accelfn.testing import simulate
from tests.internals import main
from tests.laws.worlds import single
from tests.strategies import differences, tensors

X = torch.linspace(-1, 1, 12 * 6 * 3, dtype=torch.float64).view(12, 6, 3).sin()
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.5),
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, centered=True),
}
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "alone": (),
    "ddp": (af.shard_data(), af.wrap_ddp()),
    "fsdp": (af.shard_data(), af.wrap_fsdp()),
}
kinds = st.sampled_from(sorted(OPTIMIZERS))
cuts = st.integers(1, 3)


class Net(nn.Module):
    """A head that is tied, a number, a buffer that is written, and one that is in no file."""

    def __init__(self, *, turned: bool = False) -> None:
        super().__init__()
        if turned:  # what is tied then goes by its other name
            self.head = nn.Linear(3, 3, bias=False)
        self.first = nn.Linear(3, 3)
        if not turned:
            self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.first.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.ones(3), persistent=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.head(self.frozen(self.first(x)).tanh()) * self.table * self.scale


def seeded(seed: int, *, turned: bool = False) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(turned=turned)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch) - batch).square().mean()


def by_hand(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for batch in X[first:last]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def create(world: af.World, kind: str, setup: tuple[Any, ...] = ()) -> af.TrainState:
    return af.TrainState.create(
        model=lambda: seeded(7),
        optimizer=OPTIMIZERS[kind],
        setup=af.chain(*setup),
        world=world,
    )


def goes_on(world, folder, kind, layout, cut) -> dict[str, torch.Tensor]:
    """Import, train on, and return parameters and buffers."""
    report = af.import_state(create(world, kind, LAYOUTS[layout]), folder)
    state, step = report.state, af.make_step(loss_of)
    counted = any("step" in entry for entry in state.opt_state.values())
    if counted:
        assert state.step == cut
    counts = [e["step"] for e in state.opt_state.values() if "step" in e]
    assert {each.dtype for each in counts} <= {torch.float32}  # whatever is counted for
    for batch in X[cut : cut + 2]:
        state, _ = step(state, af.split_over_ranks(batch, world))
    missing = (("opt_state",) if kind == "sgd" else ()) + ("step",) * (not counted)
    assert report.missing == missing
    assert report.cast == {}
    return {**whole(state.params), **state.buffers}


def whole(params: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        n: p.full_tensor() if hasattr(p, "full_tensor") else p
        for n, p in params.items()
    }


def check(found: Mapping[str, torch.Tensor], model: nn.Module, *, exact: bool) -> None:
    """Compare with the training that went on by itself."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own.setdefault("first.weight", own.pop("head.weight", torch.empty(0)))
    assert found.keys() == own.keys()
    for name, each in found.items():
        near = torch.equal if exact else partial(torch.allclose, rtol=1e-9, atol=1e-12)
        assert near(each, own[name]), name


@given(
    kind=kinds,
    cut=cuts,
    flat=st.booleans(),
    key=st.sampled_from(["model", "net.inner"]),
    layout=st.sampled_from(sorted(LAYOUTS)),
    size=st.integers(1, 3),
    turned=st.booleans(),
)
def test_what_torch_saved_goes_on(kind, cut, flat, key, layout, size, turned):
    """A distributed checkpoint of a plain loop, in any layout: bitwise in one process.

    Whichever of its names a tied parameter went by.
    """
    model = seeded(0, turned=turned)
    optimizer = OPTIMIZERS[kind](p for p in model.parameters() if p.requires_grad)
    by_hand(model, optimizer, 0, cut)
    size = 1 if layout == "alone" else size
    with tempfile.TemporaryDirectory() as folder:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        weights, kept = get_state_dict(model, optimizer, options=options)
        save({key: weights, "optim": kept, "epoch": 3}, folder)
        by_hand(model, optimizer, cut, cut + 2)
        run = partial(goes_on, folder=folder, kind=kind, layout=layout, cut=cut)
        for found in simulate(size, run):
            check(found, model, exact=layout == "alone")


@given(
    kind=st.sampled_from(["adamw", "momentum"]),
    cut=cuts,
    saved_by=st.integers(2, 3),
    read_by=st.integers(1, 3),
)
def test_what_ranks_saved_in_parts_goes_on(kind, cut, saved_by, read_by):
    """torch's own `fully_shard` on some ranks, and another number of them that go on."""

    def train(world: af.World, folder: str) -> dict[str, torch.Tensor]:
        model = seeded(0)
        # of which it takes no lone number; all ranks have the same batches
        fully_shard(model, mesh=world.mesh, ignored_params={model.scale})
        optimizer = OPTIMIZERS[kind](p for p in model.parameters() if p.requires_grad)
        by_hand(model, optimizer, 0, cut)
        weights, kept = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": kept}
        dcp.save(state, checkpoint_id=folder, process_group=world.group)
        by_hand(model, optimizer, cut, cut + 2)
        return {**whole(dict(model.named_parameters())), **dict(model.named_buffers())}

    with tempfile.TemporaryDirectory() as folder:
        axes = {"dp_shard": saved_by}
        there = simulate(saved_by, partial(train, folder=folder), axes=axes)[0]
        run = partial(goes_on, folder=folder, kind=kind, layout="fsdp", cut=cut)
        for found in simulate(read_by, run):
            assert found.keys() == there.keys()
            for name, each in found.items():
                assert torch.allclose(each, there[name], rtol=1e-9, atol=1e-12), name


@given(kind=kinds, cut=cuts, safe=st.booleans(), every=st.booleans())
def test_what_accelerate_saved_goes_on(kind, cut, safe, every):
    """A folder of `save_state` is bitwise, though its optimizer has frozen parameters."""
    with tempfile.TemporaryDirectory() as folder, accelerating() as accelerator:
        model = seeded(0)
        given_ = [p for p in model.parameters() if every or p.requires_grad]
        optimizer = OPTIMIZERS[kind](given_)
        model, optimizer = accelerator.prepare(model, optimizer)
        by_hand(model, optimizer, 0, cut)
        accelerator.save_state(folder, safe_serialization=safe)
        by_hand(model, optimizer, cut, cut + 2)
        (found,) = simulate(
            1, partial(goes_on, folder=folder, kind=kind, layout="alone", cut=cut)
        )
        check(found, model, exact=True)


@given(kind=kinds, cut=cuts)
def test_what_is_exported_for_torch_is_all_there(kind: str, cut: int) -> None:
    """torch reads it, and goes on; imported, it is the state that was saved, bitwise."""
    state, step = create(single(), kind), af.make_step(loss_of)
    for batch in X[:cut]:
        state, _ = step(state, batch)
    with tempfile.TemporaryDirectory() as parent:
        saved, out = f"{parent}/saved", f"{parent}/out"
        af.save(state, saved)
        with redirect_stdout(io.StringIO()):
            words = ["checkpoint", "export", saved, out, "--format", "dcp"]
            assert main(words) == 0
        model = seeded(1)
        optimizer = OPTIMIZERS[kind](p for p in model.parameters() if p.requires_grad)
        weights, kept = get_state_dict(model, optimizer)
        held = {"model": weights, "optim": kept}
        with quiet():
            partly = DefaultLoadPlanner(allow_partial_load=True)
            dcp.load(held, checkpoint_id=out, no_dist=True, planner=partly)
        set_state_dict(
            *(model, optimizer),
            model_state_dict=held["model"],
            optim_state_dict=held["optim"],
        )
        begun = attrs.evolve(create(single(), kind), step=2, num_skipped=1)
        back = af.import_state(begun, out).state
    assert (back.step, back.num_skipped) == (cut, 0)
    assert differences(tensors(state), tensors(back)) == []
    for batch in X[cut : cut + 2]:
        state, _ = step(state, batch)
    by_hand(model, optimizer, cut, cut + 2)
    check({**state.params, **state.buffers}, model, exact=True)


@contextmanager
def accelerating() -> Iterator[Accelerator]:
    """Lend what Accelerate has once a process, and put it back."""
    try:
        yield Accelerator(cpu=True)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():  # torch says that it is told of no ranks
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def save(held: Mapping[str, Any], folder: str | Path) -> None:
    with quiet():
        dcp.save(dict(held), checkpoint_id=folder, no_dist=True)
