# SPDX-License-Identifier: Apache-2.0
"""Names, order, layout and ties of parameters and data change no number."""

import tempfile
from pathlib import Path

import attrs
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.laws.test_collectives import LAYOUTS, laid_out
from tests.laws.test_updates import elements, gradients
from tests.laws.worlds import DDP, Found
from tests.strategies import IN, OPTIMIZERS, Net, Run, differences, runs, tensors

sizes = st.sampled_from([1, 2])
SETUPS = [
    DDP,
    af.chain(DDP, af.clip_grad_norm(0.5), af.ema(0.5)),
    af.chain(DDP, af.accumulate(num_micro_batches=2), af.clip_grad_value(0.25)),
    af.chain(af.shard_data(), af.local_sgd(sync_every=2, opt_state=True)),
]
setups = st.sampled_from(SETUPS)
AVERAGING = af.chain(af.shard_data(), af.local_sgd(sync_every=1))


class Named(nn.Module):
    """Parameters of several shapes, registered under given names in a given order."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        for i, name in names.items():
            values = torch.arange(1.0, IN * (i + 1) + 1).view(IN, i + 1).double()
            self.register_parameter(name, nn.Parameter(values / 4 - i))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x @ getattr(self, self.names[i]) for i in sorted(self.names)]
        return torch.cat(parts, dim=1)


def named_loss(net: Named, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return net(batch[0]).square().sum(1).mean()


@given(
    run=runs(kind="plain", schedule=False),
    size=sizes,
    setup=setups,
    names=st.permutations("abc"),
    order=st.permutations(range(3)),
)
def test_names_and_order_are_only_names_and_order(run, size, setup, names, order):
    """Renaming and reordering parameters renames and reorders what training makes of them."""
    data = run.state().data

    def train(names: dict[int, str]) -> list[Found]:
        new = {name: f"p{i}" for i, name in names.items()}

        def by_number(world: af.World) -> Found:
            state = af.TrainState.create(
                model=lambda: Named(names),
                optimizer=OPTIMIZERS[run.optimizer],
                data=data,
                setup=setup,
                world=world,
            )
            step, batches, losses = af.make_step(named_loss), af.batches(state), {}
            for i, batch in zip(range(run.updates), batches, strict=False):
                state, metrics = step(state, batch)
                losses[f"loss {i}"] = metrics["loss"].clone()
            return losses | {
                ".".join(new.get(part, part) for part in path.split(".")): value
                for path, value in tensors(state).items()
            }

        return list(simulate(size, by_number))

    plain = train(dict(enumerate("abc")))
    other = train({i: names[i] for i in order})
    for one, two in zip(plain, other, strict=True):
        assert differences(one, two, within=1e-9) == []


@given(values=st.lists(elements, min_size=2, max_size=5), data=st.data())
def test_gradients_go_by_name(values: list[float], data: st.DataObject) -> None:
    """Gradients in whatever order give the update of their names."""
    state, grads = gradients([[value] for value in values])
    names = data.draw(st.permutations(list(grads.tensors)))
    mixed = grads.with_tensors({name: grads.tensors[name] for name in names})
    after = af.apply_grads(state, mixed)
    assert [-float(after.params[str(i)]) for i in range(len(values))] == values


OUT_OF_BUCKETS = [
    af.chain(DDP, each)
    for each in (
        af.optimizer_in_backward(),
        af.compress_grads("fp16"),
        af.compress_grads("powersgd", start_powerSGD_iter=0, min_compression_rate=0),
    )
]


@example(Run(updates=1), 2, AVERAGING, "transposed", "contiguous")
@given(
    run=runs(kind="plain", dyadic=True, loss="mean", optimizer="sgd", updates=1),
    size=sizes,
    setup=st.sampled_from([DDP, AVERAGING, *OUT_OF_BUCKETS]),
    layout=st.sampled_from(LAYOUTS),
    rows=st.sampled_from([*LAYOUTS, "expanded"]),
)
def test_layouts_change_nothing(run, size, setup, layout, rows):
    """Parameters and data in any memory layout train, save and load to the same values."""
    power = 2 ** (run.batch_size % 3)
    run = attrs.evolve(run, n=8, batch_size=power, setup=af.chain(setup))
    x, y = run.dataset()
    data = tuple(laid_out(each, rows) for each in (x, y))

    def model(layout: str) -> nn.Module:
        net = Net("dyadic")
        for param in net.parameters():
            param.data = laid_out(param.data, layout)
        return net

    def train(world: af.World, layout: str, data: object) -> Found:
        state = af.TrainState.create(
            model=lambda: model(layout),
            optimizer=OPTIMIZERS["sgd"],
            data=af.Data(data, global_batch_size=power, shuffle=True),
            setup=setup,
            world=world,
        )
        state, _ = run.train(state)
        return tensors(state)

    plain = tuple(each.contiguous() for each in data)
    expected = simulate(size, lambda world: train(world, "contiguous", plain))
    found = simulate(size, lambda world: train(world, layout, data))
    for one, two in zip(expected, found, strict=True):
        assert differences(one, two) == []


@given(run=runs(kind="tied"), setup=setups)
def test_tied_stays_tied(run: Run, setup: object) -> None:
    """In every module lent from a state, trained, copied or loaded, tied is one tensor."""
    run = attrs.evolve(run, setup=setup)
    state, _ = run.train(run.state())
    with tempfile.TemporaryDirectory() as folder:
        af.save(state, Path(folder) / "saved")
        loaded = af.load(run.state(), Path(folder) / "saved")
    for each in (state, state.copy(), loaded):
        assert "second.weight" not in each.params
        with af.borrow_model(each, at="train") as net:
            assert net.second.weight is net.first.weight
            assert torch.equal(net.first.weight, state.params["first.weight"])
        lent = af.snapshot_model(each, at="eval")
        assert lent.second.weight is lent.first.weight


SIZES = {"a": 1.0, "b": 2.0, "c": 4.0}


def average(
    kept: list[dict[str, float]], held: list[dict[str, float]], decay: float | None
) -> None:
    """Move averages towards what ranks hold."""
    if decay is not None:
        for mine, params in zip(kept, held, strict=True):
            for name, value in params.items():
                mine[name] = decay * mine[name] + (1 - decay) * value
