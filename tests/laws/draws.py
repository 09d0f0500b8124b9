# SPDX-License-Identifier: Apache-2.0
"""Everything in accelfn that draws: a row for each, which says what its draws depend on."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import accelfn as af
from accelfn.testing import simulate

Draws = tuple[float, ...]
N = 64
DDP = af.chain(af.shard_data(), af.wrap_ddp())


@attrs.frozen(kw_only=True)
class Place:
    """Where something is drawn; every field is a part of which draws may depend.

    Attributes:
        seed: of the state.
        name: of the state.
        rank: of two.
        step: updates that were taken.
        skipped: updates that were tried and not taken.
        micro_batch: of two.
        call: the batch of an evaluation, the window of an order, or the call of a layer.
        purpose: what the draws are for: a user's word, a transform's or dataset's name.
        epoch: of the data.
        index: which sample, parameter or position.
    """

    seed: int = 0
    name: str = "state"
    rank: int = 0
    step: int = 0
    skipped: int = 0
    micro_batch: int = 0
    call: int = 0
    purpose: str = "one"
    epoch: int = 0
    index: int = 0


@attrs.frozen
class Row:
    """One kind of draws.

    Attributes:
        name: a few words.
        draws: what is drawn at a place.
        apart: the parts that tell draws apart; all others change nothing.
        at: the functions of accelfn that take a key or a stream for it.
    """

    name: str
    draws: Callable[[Place], Any]
    apart: str
    at: str


def numbers(count: int = 3) -> Draws:
    """Draw from all three default generators."""
    drawn = torch.rand(count, dtype=torch.float64).tolist()
    legacy = np.random.rand()  # noqa: NPY002 - losses and datasets draw from it
    return *drawn, legacy, random.random()  # noqa: S311 - the same


of_three = partial(numbers, 1)


def on_rank(fn: Callable[[Place, af.World], Any]) -> Callable[[Place], Any]:
    """Let two ranks draw; take what the place's rank drew."""
    return lambda place: simulate(2, partial(fn, place))[place.rank]


def state_at(
    place: Place, world: af.World, model: Any = None, *setup: Any, **options: Any
) -> af.TrainState:
    state = af.TrainState.create(
        model=model or (lambda: nn.Linear(2, 1)),
        setup=af.chain(DDP, *setup),
        seed=place.seed,
        name=place.name,
        world=world,
        **{"optimizer": partial(torch.optim.SGD, lr=0.0), **options},
    )
    cursor = af.typing.Cursor(place.epoch, 0)
    return attrs.evolve(
        state, step=place.step, num_skipped=place.skipped, cursor=cursor
    )


def batch_of(world: af.World) -> torch.Tensor:
    """Return a rank's own samples."""
    return torch.full((4, 2), 1.0 + world.rank)


# Of a state


def weights(place: Place, world: af.World) -> Draws:
    state = state_at(place, world)
    return tuple(state.params["weight"].flatten().tolist())


def buffers_beside_parts(place: Place, world: af.World) -> Draws:
    """Return what a factory draws whose parameters are drawn later."""
    state = state_at(place, world, _Beside, init="shard")
    return tuple(state.buffers["drawn"].tolist())


def weights_of_a_module(place: Place, world: af.World) -> Draws:
    state = state_at(place, world, _Beside, init="shard")
    weight = state.params[f"layers.{place.index % 2}.weight"]
    return tuple(weight.flatten().tolist())


class _Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 1, bias=False) for _ in range(2)])
        self.register_buffer("drawn", torch.rand(3, dtype=torch.float64))


def in_a_loss(place: Place, world: af.World) -> Draws:
    noted: list[Draws] = []

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        noted.append(numbers())
        return model(batch).mean()

    state = state_at(place, world, None, af.accumulate(num_micro_batches=2))
    af.make_step(loss_fn)(state, [batch_of(world)] * 2)
    return noted[place.micro_batch]


def in_split_layers(place: Place) -> Draws:
    """Return what is drawn between layers of which each of two ranks has a part."""
    return simulate(2, partial(_between, place), axes={"tp": 2})[place.rank]


def _between(place: Place, world: af.World) -> Draws:
    noted: list[Draws] = []

    class Between(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                noted.append(tuple(torch.rand(3, dtype=torch.float64).tolist()))
            return x

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(model(batch)).mean()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), Between(), nn.Linear(2, 2))

    split = af.tensor_parallel({"0": "column", "2": "row"})
    twice = af.accumulate(num_micro_batches=2)
    state = state_at(place, world, make, split, twice)
    batch = torch.ones(4, 2)
    af.make_step(loss_fn)(state, [batch] * 2)
    return noted[2 * place.micro_batch + place.call]


def in_evaluation(looks: Callable[..., Any]) -> Callable[[Place, af.World], Draws]:
    def draw(place: Place, world: af.World) -> Draws:
        noted: list[Draws] = []

        def fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            noted.append(numbers())
            return model(batch)

        looks(
            state_at(place, world), af.Data(torch.ones(8, 2), global_batch_size=4), fn
        )
        return noted[place.call]

    return draw


def evaluated(state: af.TrainState, data: af.Data, fn: Callable[..., Any]) -> None:
    af.evaluate(state, data, lambda model, batch: fn(model, batch).mean())


def predicted(state: af.TrainState, data: af.Data, fn: Callable[..., Any]) -> None:
    list(af.predict(state, data, fn))


def by_rng(place: Place, world: af.World, *, shared: bool) -> Draws:
    with af.fork_rng(state_at(place, world), place.purpose, shared=shared):
        return numbers()


class _Noting:
    """Draws in two fields."""

    noted: dict[str, Draws] = attrs.field(factory=dict, kw_only=True, eq=False)

    def grads(self, grads, slot, update):
        self.noted["one"] = numbers()
        return grads, slot

    def hyper(self, hyper, slot, update):
        self.noted["two"] = numbers()
        return {}, slot


Noting = af.transform(_Noting)


def in_a_transform(place: Place, world: af.World) -> Draws:
    noted: dict[str, Draws] = {}
    state = state_at(place, world, None, Noting(noted=noted))
    af.make_step(lambda model, batch: model(batch).mean())(state, batch_of(world))
    return noted[place.purpose]


class _Drawing(torch.optim.SGD):
    """Draws as it steps."""

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.copy_(torch.rand_like(param))


def in_an_update(place: Place, world: af.World) -> Draws:
    state = state_at(place, world, optimizer=partial(_Drawing, lr=0.0))
    step = af.make_step(lambda model, batch: model(batch).mean())
    state, _ = step(state, batch_of(world))
    return tuple(state.params["weight"].flatten().tolist())


def of_powersgd(place: Place, world: af.World) -> Draws:
    """Return a factor of a matrix whose gradient is the same, wherever it is."""
    compress = af.compress_grads("powersgd", start_powerSGD_iter=0, name=place.purpose)
    state = state_at(place, world, _Two, compress)
    table = torch.arange(64.0).reshape(8, 8).sin()
    step = af.make_step(lambda model, _: sum((p * table).sum() for p in model.both))
    state, _ = step(state, batch_of(world))
    slot = state.slots[place.purpose]
    return tuple(slot["q"][f"both.{place.index % 2}"].flatten().tolist())


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.ParameterList([torch.zeros(8, 8), torch.zeros(8, 8)])


# Of data


class Items(Dataset[torch.Tensor]):
    """Samples that are augmented."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(of_three())


class Stream(IterableDataset[torch.Tensor]):
    """The same, as a stream, which draws as it begins."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        first = of_three()
        return (torch.tensor([*first, *of_three()]) for _ in range(8))


class Own(IterableDataset[torch.Tensor]):
    """The same, of one rank alone."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(of_three()) for _ in range(8))


def _four(dataset: Any, **options: Any) -> Callable[[], af.Data]:
    return lambda: af.Data(dataset, global_batch_size=4, **options)


def sample(make: Callable[[], af.Data], columns: slice = slice(3)) -> Any:
    """Return what draws a sample: that of the place's index, in its epoch."""

    def draw(place: Place, world: af.World) -> Draws:
        state = state_at(place, world, data=make())
        for batch in af.batches(state, until_epoch=place.epoch + 1):  # a half of four
            rows = torch.cat(list(batch.micro_batches))
            return tuple(rows[place.index % 2][columns].tolist())
        raise AssertionError

    return draw


def as_a_loader(dataset: Any) -> Callable[[], af.Data]:
    return lambda: af.Data.from_loader(DataLoader(dataset, batch_size=4))


def order(**options: Any) -> Callable[[Place], Any]:
    """Return what draws an epoch's order."""
    return lambda place: ordered(_four(range(N), **options)(), place)


def ordered(data: af.Data, place: Place) -> Any:
    epoch = data.epoch(seed=place.seed, number=place.epoch)
    return epoch.order(np.arange(len(data))).tolist()


def turns_of_a_window(place: Place) -> list[int]:
    """Return where each batch of a window goes, by the lengths of its samples."""
    order_of = af.orders.bucketed(np.arange(N) % 8, window=32)
    data = af.Data(range(N), global_batch_size=4, order=order_of)
    found = np.array(ordered(data, place)).reshape(-1, 4) % 8
    half = found[:8] if place.call % 2 == 0 else found[8:]
    return half.sum(1).argsort(kind="stable").tolist()


def ends_by_cost(place: Place) -> list[int]:
    """Return how long the batches of a budget are, in the order in which they come."""
    costs = 1 + np.arange(N) % 16
    data = af.Data(
        range(N),
        global_batch_size=af.token_budget(costs, limit=16),
        order=af.orders.bucketed(costs, window=N),
    )
    epoch = data.epoch(seed=place.seed, number=place.epoch)
    return [stop for _, stop in epoch.cut.spans(0)]


def through_two(make: Callable[..., af.Data], place: Place) -> Any:
    """Return the order of one of two datasets of one length, gone through together."""
    data = make(shuffle=True, global_batch_size=4)
    found = np.array(ordered(data, place))
    if found.ndim == 2:
        return found[:, place.index % 2].tolist()
    which = found[(found >= 32) == bool(place.index % 2)]
    return (which % 32).tolist()


def mixed(**options: Any) -> af.Data:
    return af.Data.mix([range(32), range(32)], weights=[1, 1], **options)


def whose_turn(place: Place) -> Any:
    found = np.array(ordered(mixed(shuffle=False, global_batch_size=4), place)) >= 32
    return found.tolist()


def sampled(place: Place) -> Any:
    drawn = WeightedRandomSampler([1.0] * N, N)
    loader = DataLoader(range(N), batch_size=4, sampler=drawn)
    return ordered(af.Data.from_loader(loader), place)


def probed(_: Place) -> str:
    return af.Data(Items(), global_batch_size=4).facts["fingerprint"]


def of_a_simulated_rank(place: Place) -> Draws:
    return simulate(2, lambda _: of_three(), seed=place.seed)[place.rank]


_OF_STATE = "seed name step skipped"
_BY_INDEX = "data.dataset.Data.epoch data.loaders.Fetch.__call__"
_OF_STREAM = "data.reading.Stream._open data.reading.Opened.read"
_EVALUATION = "loop.evaluate._Evaluation.__init__ loop.evaluate._Evaluation.run"
ROWS = [
    Row("first weights", on_rank(weights), "seed name", "model.model.materialize"),
    Row(
        "first buffers, beside parts",
        on_rank(buffers_beside_parts),
        "seed name",
        "model.drawn.build_on_meta",
    ),
    Row(
        "first weights of a module",
        on_rank(weights_of_a_module),
        "seed name index",
        "model.drawn.draw_params",
    ),
    Row(
        "a loss",
        on_rank(in_a_loss),
        f"{_OF_STATE} rank micro_batch",
        "engine.engine.Engine.value_and_grad",
    ),
    Row(
        "between layers that are split",
        in_split_layers,
        f"{_OF_STATE} rank micro_batch call",
        "model_parallel.layers.PerRankRng.draw",
    ),
    Row(
        "evaluate",
        on_rank(in_evaluation(evaluated)),
        "seed name rank call",
        _EVALUATION,
    ),
    Row(
        "predict", on_rank(in_evaluation(predicted)), "seed name rank call", _EVALUATION
    ),
    Row(
        "a user's, by rank",
        on_rank(partial(by_rng, shared=False)),
        "seed name step rank purpose",
        "state.views.fork_rng",
    ),
    Row(
        "a user's, shared",
        on_rank(partial(by_rng, shared=True)),
        "seed name step purpose",
        "state.views.fork_rng",
    ),
    Row(
        "a transform's",
        on_rank(in_a_transform),
        f"{_OF_STATE} purpose",
        "state.update.draws_for",
    ),
    Row(
        "an optimizer's",
        on_rank(in_an_update),
        "seed name step skipped",
        "state.update.draws_for",
    ),
    Row(
        "factors of PowerSGD",
        on_rank(of_powersgd),
        "seed name purpose index",
        "engine.ddp.LowRank._draw_factor",
    ),
    Row("samples", on_rank(sample(_four(Items()))), "seed epoch index rank", _BY_INDEX),
    Row(
        "samples of a loader",
        on_rank(sample(as_a_loader(Items()))),
        "seed epoch index rank",
        _BY_INDEX,
    ),
    Row(
        "samples of a stream",
        on_rank(sample(_four(Stream()), slice(3, 6))),
        "seed epoch index rank",
        _OF_STREAM,
    ),
    Row(
        "samples of a loader's stream",
        on_rank(sample(as_a_loader(Stream()), slice(3, 6))),
        "seed epoch index rank",
        _OF_STREAM,
    ),
    Row(
        "a stream's beginning",
        on_rank(sample(_four(Stream()))),
        "seed epoch",
        "data.reading.Opened.__init__",
    ),
    Row(
        "samples of a rank's own stream",
        on_rank(sample(_four(Own(), sharded=True))),
        "seed epoch index rank",
        "data.reading.Sharded._key data.reading.Counted.__iter__",
    ),
    Row(
        "shuffled",
        order(shuffle=True),
        "seed epoch",
        "data.order.Shuffled.of_epoch data.order.shuffle_positions",
    ),
    Row(
        "weighted",
        order(order=af.orders.weighted(np.arange(1, N + 1))),
        "seed epoch",
        "data.order.weighted.of_epoch",
    ),
    Row(
        "weighted, without replacement",
        order(
            order=af.orders.weighted(np.arange(1, N + 1), replacement=False),
        ),
        "seed epoch",
        "data.order.weighted.of_epoch",
    ),
    Row(
        "turns of batches in a window",
        turns_of_a_window,
        "seed epoch call",
        "data.order.bucketed.of_epoch",
    ),
    Row(
        "turns of batches of a budget",
        ends_by_cost,
        "seed epoch",
        "data.dataset.Data.epoch",
    ),
    Row(
        "mixed",
        partial(through_two, mixed),
        "seed epoch index",
        "data.sources.Mixed.of_epoch",
    ),
    Row(
        "whose turn it is in a mix",
        whose_turn,
        "seed epoch",
        "data.sources.Mixed.of_epoch",
    ),
    Row(
        "an order of one's own",
        order(order=lambda _seed, _epoch, n: torch.randperm(n)),
        "seed epoch",
        "data.order.Own._call",
    ),
    Row("a sampler", sampled, "seed epoch", "data.order._draw_indices"),
    Row("what knows data again", probed, "", "data.consistency._sample_at"),
    Row(
        "a simulated rank",
        of_a_simulated_rank,
        "seed rank",
        "testing.simulation.ranks.seed_rank",
    ),
]
