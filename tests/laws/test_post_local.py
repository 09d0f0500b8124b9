# SPDX-License-Identifier: Apache-2.0
"""Post-local SGD: synchronous for some updates, then apart, by two setups and `with_setup`."""

import itertools
import tempfile
from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.strategies import differences, tensors

LENGTH = 12
"""Updates of a run."""


def loss_fn(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return (net(x) - y).square().mean()


def setup_at(step: int, switch: int, every: int) -> af.chain:
    """Return how the update after so many is taken."""
    apart = af.local_sgd(sync_every=every)
    return af.chain(af.shard_data(), af.wrap_ddp() if step < switch else apart)


def begun(seed: int, setup: af.chain, world: af.World) -> af.TrainState:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return af.TrainState.create(
        model=lambda: nn.Linear(3, 2).to(torch.float64),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5),
        data=af.Data((draw(4 * LENGTH, 3), draw(4 * LENGTH, 2)), global_batch_size=4),
        setup=setup,
        world=world,
        seed=seed,
    )


def trained(
    state: af.TrainState, switch: int, every: int, last: int = LENGTH
) -> af.TrainState:
    """Train on, up to an update; at the one where it is time, apart from then on."""
    step = af.make_step(loss_fn)
    for batch in itertools.islice(af.batches(state, until_epoch=2), last - state.step):
        if state.step == switch:
            state = state.with_setup(setup_at(switch, switch, every))
        state, _ = step(state, batch)
    return state


sizes = st.sampled_from([1, 2, 3, 4])
switches = st.integers(0, LENGTH)
periods = st.integers(1, 4)
seeds = st.integers(0, 9)


@given(size=sizes, switch=switches, every=periods, seed=seeds)
def test_until_the_switch_ranks_are_one_and_then_apart(size, switch, every, seed):
    """Against a process that has all ranks' models, each with an optimizer of its own."""

    def run(world: af.World) -> dict[str, torch.Tensor]:
        state = begun(seed, setup_at(0, switch, every), world)
        return dict(trained(state, switch, every).params)

    found = list(simulate(size, run))
    for rank, expected in enumerate(by_hand(size, switch, every, seed)):
        assert differences(expected, found[rank], within=1e-12) == []


def by_hand(
    size: int, switch: int, every: int, seed: int
) -> list[dict[str, torch.Tensor]]:
    state = begun(seed, af.identity(), af.World())
    models = [nn.Linear(3, 2).to(torch.float64) for _ in range(size)]
    for model in models:
        model.load_state_dict(dict(state.params))
    made = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in models]
    seen = [0] * size
    bounds = [
        af.typing.Plan(rank=r, num_shares=size).parts((0, 4)) for r in range(size)
    ]
    for update, batch in enumerate(af.batches(state, until_epoch=1)):
        for rank, (model, ((begin, end), *_)) in enumerate(
            zip(models, bounds, strict=True)
        ):
            together = update < switch
            here = slice(0, 4) if together else slice(begin, end)
            x, y = (each[here] for each in batch.value)
            model.zero_grad()
            loss_fn(model, (x, y)).backward()
            made[rank].step()
            seen[rank] += 0 if together else end - begin
        if update >= switch and (update + 1 - switch) % every == 0:
            average(models, seen)
            seen = [0] * size
    return [{n: p.detach() for n, p in m.named_parameters()} for m in models]


def average(models: list[nn.Module], seen: list[int]) -> None:
    with torch.no_grad():
        for params in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(w * p for w, p in zip(seen, params, strict=True)) / sum(seen)
            for param in params:
                param.copy_(mean)


@given(
    size=sizes, switch=switches, every=periods, seed=seeds, cut=st.integers(1, LENGTH)
)
def test_a_run_goes_on_before_and_after_the_switch(size, switch, every, seed, cut):
    """Bit by bit, from any update, with the setup of the last one that was taken."""
    with tempfile.TemporaryDirectory() as folder:

        def whole(world: af.World) -> dict[str, torch.Tensor]:
            state = begun(seed, setup_at(0, switch, every), world)
            state = trained(state, switch, every, cut)
            af.save(state, f"{folder}/{cut}")
            return tensors(trained(state, switch, every))

        def resumed(world: af.World) -> dict[str, torch.Tensor]:
            state = begun(seed, setup_at(cut - 1, switch, every), world)
            state = af.load(state, f"{folder}/{cut}")
            return tensors(trained(state, switch, every))

        expected = list(simulate(size, whole))
        for one, other in zip(expected, simulate(size, resumed), strict=True):
            assert differences(one, other) == []
