# SPDX-License-Identifier: Apache-2.0
"""Programs: a small training run as a value, which any world can run."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
from hypothesis import strategies as st

from accelfn import schedules as rates
from accelfn.data import Data
from accelfn.definition.transform import chain
from accelfn.loop.batches import batches
from accelfn.schedules import Schedule
from accelfn.state.metrics import Metrics
from accelfn.state.state import TrainState
from accelfn.step.make_step import make_step
from accelfn.testing.strategies.chains import chains
from accelfn.testing.strategies.code import as_code, print_code
from accelfn.testing.strategies.datasets import Samples, datasets
from accelfn.testing.strategies.lift import lifted
from accelfn.testing.strategies.losses import Criterion, losses
from accelfn.testing.strategies.nets import Net, models
from accelfn.testing.strategies.optimizers import TorchOptimizer, optimizers
from accelfn.transforms.ddp import wrap_ddp
from accelfn.transforms.shard import shard_data
from accelfn.world import World


@attrs.frozen(repr=False)
class Program:
    """A training run: all that `TrainState.create` takes, a loss, and how many updates.

    It is a function of a world, so `simulate(2, program)` trains it on two ranks.

    Attributes:
        dataset: `Samples`, or anything that `af.Data` takes.
        model: a factory.
        loss: what `af.make_step` takes.
        optimizer: a factory.
        setup: the transforms.
        schedule: of the learning rate.
        batch_size: samples per update.
        shuffle: whether each epoch has its own order.
        remainder: what becomes of a short last batch.
        seed: of the state.
        updates: how many are taken.

    Law: the same program in the same world gives the same state, bitwise.

    Example:
        >>> program = Program(Samples([[1, 2, 0]], [[3, 4]]), Net(dyadic=True), updates=1)
        >>> program(World.single(device="cpu")).step
        1
    """

    dataset: Any
    model: Callable[[], Any] = attrs.field(default=Net())
    loss: Callable[..., Any] = attrs.field(default=Criterion(), kw_only=True)
    optimizer: Callable[..., Any] = attrs.field(
        default=TorchOptimizer("SGD", lr=0.5), kw_only=True
    )
    setup: chain = attrs.field(factory=chain, converter=chain, kw_only=True)
    schedule: Schedule | None = attrs.field(default=None, kw_only=True)
    batch_size: int = attrs.field(default=8, kw_only=True)
    shuffle: bool = attrs.field(default=False, kw_only=True)
    remainder: str = attrs.field(default="short", kw_only=True)
    seed: int = attrs.field(default=0, kw_only=True)
    updates: int = attrs.field(default=2, kw_only=True)

    __repr__ = as_code
    _repr_pretty_ = print_code

    def __call__(self, world: World) -> TrainState:
        """Train, and return the state after the last update."""
        state, _ = self.train(self.state(world))
        return state

    @property
    def data(self) -> Data:
        """The dataset, and how it is drawn from."""
        dataset = self.dataset
        return Data(
            dataset.tensors if isinstance(dataset, Samples) else dataset,
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            remainder=self.remainder,
        )

    def state(self, world: World | None = None) -> TrainState:
        """Return the state before the first update, by default of a world of one."""
        return TrainState.create(
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            data=self.data,
            setup=self.setup,
            world=World.single(device="cpu") if world is None else world,
            seed=self.seed,
        )

    def train(
        self, state: TrainState, updates: int | None = None
    ) -> tuple[TrainState, list[Metrics]]:
        """Return the state after some updates, by default all, and the metrics of each."""
        wanted = self.updates if updates is None else updates
        seen: list[Metrics] = []
        if wanted == 0:
            return state, seen
        step = make_step(self.loss)
        for batch in batches(state):
            state, metrics = step(state, batch)
            seen.append(metrics)
            if len(seen) == wanted:
                break
        return state, seen


def programs(*, exact: bool = False, **fields: Any) -> st.SearchStrategy[Program]:
    """Draw programs that train in a world of any size.

    Dropout and batch statistics depend on how a batch is split; give
    `model=models(norm=False, dropout=False)` for a law that compares splits.

    Args:
        exact: only those whose sums are exact in any order: dyadic data and weights,
            products for errors, one update of plain arithmetic, and a setup that splits and
            does nothing else. Any number of ranks gives the same numbers then; only the
            sign of a 0 may depend on it.
        fields: fields of `Program` that are given: a value, or a strategy of values.

    Example:
        >>> for_mine = programs(setup=chains(include=[af.ema(0.5)], reduced=True))
    """
    values = {
        name for name, each in fields.items() if not isinstance(each, st.SearchStrategy)
    }
    return _programs(exact, lifted(fields, _EXACT if exact else _ANY), values)


_ANY: dict[str, st.SearchStrategy[Any]] = {
    "model": models(),
    "loss": losses(),
    "optimizer": optimizers(),
    "setup": chains(include=[shard_data], reduced=True),
    "schedule": st.sampled_from([None, rates.linear(4)]),
    "shuffle": st.booleans(),
    "seed": st.integers(0, 3),
    "updates": st.integers(1, 3),
}
_EXACT: dict[str, st.SearchStrategy[Any]] = {
    **_ANY,
    "model": models(dyadic=True, norm=False, dropout=False),
    "loss": losses(squared=False),
    "optimizer": optimizers(dyadic=True),
    "setup": chains(field="data", include=[shard_data, wrap_ddp]),
    "schedule": st.none(),
    "updates": st.just(1),
}


@st.composite
def _programs(
    draw: st.DrawFn,
    exact: bool,  # noqa: FBT001 - hypothesis hands composites their arguments by position
    fields: Mapping[str, st.SearchStrategy[Any]],
    values: Collection[str],
) -> Program:
    made = {name: draw(each) for name, each in fields.items()}
    if "dataset" not in made:
        net = made["model"]
        known = isinstance(net, Net)
        sides = {"inputs": net.inputs, "outputs": net.outputs} if known else {}
        made["dataset"] = draw(datasets(dyadic=exact or None, **sides))
    n = len(Data(made["dataset"], batch_size=1))
    if "batch_size" not in made:
        powers = [size for size in (1, 2, 4, 8) if size <= n]
        made["batch_size"] = draw(st.sampled_from(powers) if exact else _BATCH_SIZES)
    if "remainder" not in made:
        whole = made["batch_size"] <= n
        kinds = ["drop"] if exact else ["short", "pad", *(["drop"] if whole else [])]
        made["remainder"] = draw(st.sampled_from(kinds))
    return Program(**_with_unused_found(made, values))


_BATCH_SIZES = st.integers(1, 8)


def _with_unused_found(made: dict[str, Any], values: Collection[str]) -> dict[str, Any]:
    """Let DistributedDataParallel look for unused parameters, or draw a model without."""
    net, setup = made["model"], chain(made["setup"])
    blind = [
        each
        for each in setup
        if isinstance(each, wrap_ddp) and not each.find_unused_parameters
    ]
    if not (blind and isinstance(net, Net) and net.unused):
        return made
    if "setup" not in values:
        finds = attrs.evolve(blind[0], find_unused_parameters=True, static_graph=False)
        found = [finds if each is blind[0] else each for each in setup]
        return {**made, "setup": chain(*found)}
    if "model" not in values:
        return {**made, "model": attrs.evolve(net, unused=False)}
    return made
