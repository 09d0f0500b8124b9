# SPDX-License-Identifier: Apache-2.0
"""What others are given of a state is what it evaluates, and comes back bit by bit."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.states import bits
from tests.strategies import Net, Run

Tensors = dict[str, torch.Tensor]

KINDS = ["plain", "tied", "norm", "frozen"]
AVERAGING = [
    (af.wrap_ddp(),),
    (af.wrap_ddp(), af.ema(0.5)),
    (af.local_sgd(sync_every=2),),
    (af.local_sgd(sync_every=2), af.ema(0.5)),
]
LIMITS = st.one_of(st.integers(1, 300), st.sampled_from(["5GB", "0.1 KB", "1KiB"]))


@contextmanager
def folder() -> Iterator[Path]:
    """Lend the name of an export to be."""
    with tempfile.TemporaryDirectory() as parent:
        yield Path(parent) / "model"


def trained(kind: str, world: af.World, *setup: object) -> af.TrainState:
    """Return a state in the middle of a period of local_sgd."""
    split = af.chain(af.shard_data(), *setup)
    run = Run(
        n=12,
        batch_size=6,
        kind=kind,
        updates=3,
        setup=split,
        dyadic=False,
        loss="squared",
    )
    return run.train(run.state(world))[0]


def evaluated(state: af.TrainState, *, at: str) -> Tensors:
    """Return copies of what an export has, under the names of the state."""
    params = state.params if at == "train" else af.eval_params(state)
    return {n: t.clone() for n, t in {**params, **state.buffers}.items()}


def made(kind: str, how: str) -> nn.Module | Callable[[], nn.Module]:
    """Return a model with other values, or without any, or what makes one."""
    if how == "factory":
        return partial(Net, kind)
    with af.empty_weights() if how == "empty" else torch.device(how):
        return Net(kind)


def params_of(model: nn.Module) -> Tensors:
    """Return a model's parameters, tied ones under their first name."""
    return {name: each.detach() for name, each in model.named_parameters()}


def same(one: Tensors, two: Tensors) -> bool:
    """Whether two tables have the same names, dtypes, shapes and bits."""
    return bits(one) == bits(two)


@given(
    size=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
    setup=st.sampled_from(AVERAGING),
    limit=LIMITS,
    at=st.sampled_from(["train", "eval"]),
    how=st.sampled_from(["cpu", "meta", "factory", "empty"]),
)
def test_what_is_exported_is_imported(size, kind, setup, limit, at, how):
    """An export has what is evaluated, or with at="train" what rank 0 trains; ties are tied."""

    def export(world: af.World) -> Tensors:
        state = trained(kind, world, *setup)
        expected = evaluated(state, at=at)
        af.export_model(state, exported, max_shard_size=limit, at=at)
        assert same(expected, evaluated(state, at=at))
        return expected

    with folder() as exported:
        expected = simulate(size, export)[0]
        model = af.import_model(made(kind, how), exported)
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert kind != "tied" or model.second.weight is model.first.weight
    assert same(expected, {name: each.detach() for name, each in found.items()})
    asked = dict(Net(kind).named_parameters())
    for name, param in model.named_parameters():
        assert param.requires_grad == asked[name].requires_grad


@given(
    size=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
    setup=st.sampled_from(AVERAGING),
    at=st.sampled_from(["train", "eval"]),
)
def test_full_params_are_copies_on_every_rank(size, kind, setup, at):
    """Each rank has the evaluated parameters, or its own, in memory of their own."""

    def look(world: af.World) -> None:
        state = trained(kind, world, *setup)
        expected = evaluated(state, at=at)
        found = af.full_params(state, at=at)
        model = Net(kind)
        model.load_state_dict({**found, **state.buffers})  # strict: all names are there
        assert same({n: expected[n] for n in state.params}, params_of(model))
        with_them = state.copy().with_params(found)
        assert same(with_them.params, params_of(model))
        for name in found.keys() - state.params.keys():
            with pytest.raises(af.errors.StateError, match="is tied to"):
                state.with_params({**found, name: found[name] + 1})
        for each in found.values():
            each.zero_()
        assert same(expected, evaluated(state, at=at))

    simulate(size, look)


@given(
    kind=st.sampled_from(KINDS),
    limit=st.integers(1, 300),
    exactly=st.none() | st.integers(0, 9),
)
def test_files_hold_what_they_may(kind: str, limit: int, exactly: int | None) -> None:
    """No file is larger than allowed, unless it has one tensor; none has room for the next."""
    state = trained(kind, af.World.single(device="cpu"))
    order = af.snapshot_model(state, at="eval").state_dict()
    if exactly is not None:  # as much as the first tensors together
        limit = sum(t.nbytes for t in [*order.values()][: exactly % len(order) + 1])
    with folder() as exported:
        af.export_model(state, exported, max_shard_size=limit, at="eval")
        held: dict[str, dict[str, int]] = {}
        for path in exported.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                assert file.metadata() == {"format": "pt"}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            held[path.name] = {name: t.nbytes for name, t in tensors.items()}
        index = exported / "model.safetensors.index.json"
        said = json.loads(index.read_text()) if index.exists() else None
    sizes = [sum(each.values()) for each in held.values()]
    assert all(
        total <= limit or len(each) == 1
        for total, each in zip(sizes, held.values(), strict=True)
    )
    in_turn = [held[name] for name in sorted(held) if sum(held[name].values()) <= limit]
    for one, two in pairwise(in_turn):
        assert sum(one.values()) + two[min(two, key=[*order].index)] > limit
    names = [name for each in held.values() for name in each]
    assert sorted(names) == sorted({**state.params, **state.buffers})
    if len(held) == 1:
        assert (list(held), said) == (["model.safetensors"], None)
        return
    count = len(held)
    numbered = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert sorted(held) == numbered
    assert said["metadata"] == {"total_size": sum(sizes)}
    assert said["weight_map"] == {n: file for file in held for n in held[file]}
