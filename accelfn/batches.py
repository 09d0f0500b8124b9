# SPDX-License-Identifier: Apache-2.0
"""`batches`: the samples of a training run, from where a state stands."""

from collections.abc import Iterator

import attrs

from accelfn.cursor import Cursor
from accelfn.data import Batch, Data, Plan
from accelfn.errors import ArgumentError, StateError
from accelfn.state import TrainState
from accelfn.transform import chain
from accelfn.world import World


@attrs.frozen(kw_only=True, eq=False)
class Batches:
    """This rank's batches from a cursor to the end of an epoch; iterate it afresh at will."""

    data: Data
    plan: Plan
    start: Cursor
    epochs: int | None
    seed: int
    world: World

    def __len__(self) -> int:
        """Return how many updates are left, the same on every rank.

        Raises:
            ArgumentError: without `epochs` there is no end.
        """
        if self.epochs is None:
            msg = "af.batches(state) without epochs= has no end, and so no length."
            raise ArgumentError(msg)
        if self.start.epoch >= self.epochs:
            return 0
        whole = (self.epochs - self.start.epoch - 1) * self.plan.updates_per_epoch
        return whole + self.plan.num_batches(self.start.samples)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches, epoch after epoch."""
        cursor = self.start
        self.plan.check_start(cursor)
        while self.epochs is None or cursor.epoch < self.epochs:
            yield from self.data.read(
                self.plan, start=cursor, seed=self.seed, device=self.world.device
            )
            cursor = Cursor(cursor.epoch + 1)


def batches(state: TrainState, *, epochs: int | None = None) -> Batches:
    """Return this rank's batches, going on from `state.cursor`.

    Args:
        state: only its cursor, seed, data, setup and world are read; it may be donated
            while the batches are used.
        epochs: the run ends with epoch number `epochs` (counted from 1), so a resumed run
            ends where the uninterrupted one does. None goes on for ever.

    Law:
        The order of samples depends on (seed, epoch) alone: not on ranks, workers or
        micro-batches. Resumed at any cursor, the remaining batches are the very ones.

    Cost:
        Starting, at any cursor, reads nothing that was seen before.

    Raises:
        StateError: the state has no data.
        ArgumentError: `epochs` is not a positive number.
    """
    if state.data is None:
        msg = (
            "af.batches(state): the state was created with data=None. Give"
            " TrainState.create(data=af.Data(...))."
        )
        raise StateError(msg)
    if isinstance(epochs, bool) or not (
        epochs is None or (isinstance(epochs, int) and epochs >= 1)
    ):
        msg = (
            f"af.batches(epochs={epochs!r}): expected an integer of at least 1, or"
            " None."
        )
        raise ArgumentError(msg)
    return Batches(
        data=state.data,
        plan=plan_of(state.data, state.setup, state.world),
        start=state.cursor,
        epochs=epochs,
        seed=state.seed,
        world=state.world,
    )


def seek(state: TrainState, samples: int, *, epoch: int | None = None) -> TrainState:
    """Return the state as if `samples` samples of an epoch had been seen.

    `af.batches` then goes on from there; what was skipped is not read. The tensors are the
    given state's own.

    Args:
        state: has data.
        samples: of the epoch, over all ranks.
        epoch: which, from 0; by default the one in which the state stands.

    Law: seeking to where a run stood gives the batches that it had left.

    Cost: none; an order is a function.

    Raises:
        BatchError: the epoch has no such sample.
        StateError: the state has no data.
    """
    given = batches(state)
    cursor = Cursor(given.start.epoch if epoch is None else epoch, samples)
    given.plan.check_start(cursor)
    return attrs.evolve(state, cursor=cursor)


def plan_of(data: Data, setup: chain, world: World) -> Plan:
    """Return who takes which samples, as the setup's transforms say, left to right."""
    plan = data.plan(rank=world.rank, world_size=world.size)
    for each in setup.having("data"):
        plan = each.data(plan)
    return plan
