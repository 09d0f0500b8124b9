# SPDX-License-Identifier: Apache-2.0
"""A model whose parts are elsewhere computes what it does whole, and is as it was after."""

import copy
import tempfile
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import accelfn as af

WIDTH = 4
KINDS = ["linear", "norm", "own", "list", "tied", "twice", "two inputs"]
TREES = st.recursive(
    st.tuples(st.sampled_from(KINDS), st.just(())),
    lambda inner: st.tuples(st.sampled_from(KINDS), st.lists(inner, max_size=3)),
    max_leaves=5,
)
SHARED = ("linear", [("tied", ())])
PLAIN = {"share": 0, "training": False, "seed": 0, "raises": False, "where": 0}


class Node(nn.Module):
    """A part of a drawn model: something of its own, and others inside."""

    def __init__(self, tree, first=None):
        super().__init__()
        self.kind, inside = tree
        self.register_buffer("calls", torch.zeros(()))
        self.layer = nn.BatchNorm1d(WIDTH) if self.kind == "norm" else nn.Linear(4, 4)
        first = first or self
        if self.kind == "tied" and isinstance(first.layer, nn.Linear):
            self.layer.weight = first.layer.weight
        if self.kind == "tied":
            self.register_buffer("calls", first.calls)
        if self.kind == "own":
            self.scale = nn.Parameter(torch.randn(WIDTH))
        nodes = [Node(each, first) for each in inside]
        listed = self.kind in ("list", "two inputs")
        self.inside = nn.ModuleList(nodes) if listed else nn.Sequential(*nodes)

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        x = self.layer(x)
        if isinstance(self.inside, nn.Sequential):
            x = self.inside(self.inside(x)) if self.kind == "twice" else self.inside(x)
        else:
            for each in self.inside:
                x = each(x, scale=0.5) if self.kind == "two inputs" else each(x)
        return (x * self.scale if self.kind == "own" else x) * scale


def look(model):
    """Return what must be as it was: objects, memory's device, hooks, modes."""
    hooks = [
        (len(each._forward_hooks), len(each._forward_pre_hooks))
        for each in model.modules()
    ]
    return [*map(id, model.parameters()), *map(id, model.buffers())], hooks


def values(model):
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


@example(  # what a module has itself is there while a part of it computes
    tree=("own", [("list", [("own", [("list", [("linear", ())])])])]),
    moves=[(number, True) for number in range(9)],
    empty=False,
    last=False,
    **PLAIN,
)
# a file has a buffer that two modules share under one of their names, or under the other
@example(tree=SHARED, moves=[], empty=True, last=False, **PLAIN)
@example(tree=SHARED, moves=[], empty=True, last=True, **PLAIN)
@given(
    tree=TREES,
    share=st.integers(0, 100),
    moves=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=3),
    empty=st.booleans(),
    training=st.booleans(),
    seed=st.integers(0, 9),
    raises=st.booleans(),
    where=st.integers(0, 9),
    last=st.booleans(),
)
def test_a_placed_model_computes_the_same(
    tree, share, moves, empty, training, seed, raises, where, last
):
    """For any tree, budget and moves: bitwise outputs and buffers, then the same objects.

    A pass that breaks off in the middle leaves all in its place, too.
    """
    torch.manual_seed(seed)
    model, x = Node(tree).train(training), torch.randn(3, WIDTH)
    total = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "export"
        if empty:
            model.train()(x)  # buffers that are not those of the beginning
            af.export_model(
                af.TrainState.create(model=lambda: model, optimizer=SGD),
                state,
                at="eval",
            )
            if last:
                rename(state / "model.safetensors", Node(tree))
            twin = Node(tree)
            af.import_model(twin, state)
            with af.empty_weights():
                model = Node(tree).train(training)
            twin.train(training)
        else:
            torch.manual_seed(seed)
            twin = Node(tree).train(training)
        every = {
            "units": [
                attrs.evolve(unit, device="disk") for unit in whole(model, folder).units
            ]
        }
        largest = comes(model, SimpleNamespace(**every))
        budget = largest + total * share // 100 + sum(b.nbytes for b in model.buffers())
        plan = af.plan_devices(model, {"cpu": budget, "disk": folder})
        assert sum(unit.num_bytes for unit in plan.units) == total
        for number, is_disk in moves:
            name = plan.units[number % len(plan.units)].names[0]
            with suppress(af.errors.ArgumentError):
                plan = plan.moved(name, "disk" if is_disk else "cpu")
        assert held(model, plan) == plan.needed("cpu") <= budget
        for number, param in enumerate(model.parameters()):
            param.theirs = number  # as libraries note what they know of one
        before = look(model)
        catching = pytest.raises(ZeroDivisionError) if raises else nullcontext()
        with (
            catching,
            af.on_devices(model, plan, weights=state if empty else None) as lent,
            torch.no_grad(),
        ):
            marks = [param.theirs for param in lent.parameters()]
            assert marks == [*range(len(marks))]
            for _ in range(2):
                assert torch.equal(twin(x), lent(x))
                with breaking(lent, where), pytest.raises(OSError, match="broken"):
                    lent(x.clone())
                for ours, its in zip(twin.buffers(), lent.buffers(), strict=True):
                    ours.copy_(its)
                assert away(model, plan, folder)
            if raises:
                raise ZeroDivisionError
        assert before == look(model)
        assert (
            sorted(path.name for path in Path(folder).iterdir()) == ["export"] * empty
        )
    if empty:
        assert all(param.is_meta for param in model.parameters())
        assert same(dict(twin.named_buffers()), dict(model.named_buffers()))
    else:
        assert same(values(twin), values(model))
        assert torch.equal(twin(x), model(x))


def rename(path, model):
    """Let tensors that modules share have the last of their names in a file."""
    last = {}
    for named in (model.named_parameters, model.named_buffers):
        names = {}
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
        last |= {each[0]: each[-1] for each in names.values()}
    held = {last[n]: t.clone() for n, t in load_file(path).items()}
    save_file(held, path, {"format": "pt"})


@contextmanager
def breaking(model, where):
    """Let one of the layers raise when its parameters are there."""
    kinds = nn.Linear, nn.BatchNorm1d
    layers = [each for each in model.modules() if isinstance(each, kinds)]

    def breaks(*_):
        raise OSError("broken")

    hook = layers[where % len(layers)].register_forward_pre_hook(breaks)
    try:
        yield
    finally:
        hook.remove()


SGD = torch.optim.SGD


def whole(model, folder):
    return af.plan_devices(model, {"cpu": "1GiB", "disk": folder})


def held(model, plan):
    """Count what the host may hold: what stays, all buffers, and what comes at a time."""
    sizes = [(unit.num_bytes - unit.buffer_bytes, unit.device) for unit in plan.units]
    stays = sum(size for size, device in sizes if device == "cpu")
    return stays + comes(model, plan) + sum(b.nbytes for b in model.buffers())


def comes(model, plan):
    """Run a model, and count the parameters of offloaded units that are in use at a time."""
    model = copy.deepcopy(model).to_empty(device="cpu")
    in_use, most = [], [0]
    modules = dict(model.named_modules())

    def come(unit):
        in_use.append(unit)
        units = {id(each): each for each in in_use}.values()
        most[0] = max(
            most[0], sum(each.num_bytes - each.buffer_bytes for each in units)
        )

    for unit in plan.units:
        for name in unit.names if unit.device == "disk" else ():
            modules[name].register_forward_pre_hook(lambda *_, u=unit: come(u))
            modules[name].register_forward_hook(lambda *_, u=unit: in_use.remove(u))
    model(torch.zeros(3, WIDTH))
    return most[0]


def away(model, plan, folder):
    """Whether what is offloaded is in pages of files, by the system's own account."""
    maps = [
        [int(n, 16) for n in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(Path(folder).resolve()) in line
    ]
    devices = {name: unit.device for unit in plan.units for name in unit.names}
    for name, param in model.named_parameters(remove_duplicate=False):
        units = [each for each in devices if not each or name.startswith(f"{each}.")]
        inside = any(a <= param.data_ptr() < b for a, b in maps)
        if inside != (devices[max(units, key=len)] == "disk"):
            return False
    return True


@given(number=st.just(12) | st.integers(1, 13), budget=st.integers(1, 13))
def test_the_order_of_units_is_filled(number, budget):
    """The disk is filled last, though named first; block 10 is no part of block 1."""
    model = nn.ModuleDict(
        {"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(number))}
    )
    size = 80
    with tempfile.TemporaryDirectory() as folder:
        plan = af.plan_devices(model, {"disk": folder, "cpu": budget * size})
    here = number if budget >= number else budget - 1
    devices = [unit.device for unit in plan.units]
    assert devices == ["cpu"] * here + ["disk"] * (number - here)
    assert attrs.evolve(plan) == plan
