# SPDX-License-Identifier: Apache-2.0
"""`batches`: the batches of a training run, from a state's cursor."""

from collections.abc import Iterator

import attrs

from accelfn.base.arguments import (
    advise,
    explain_call_errors,
    hint_attributes,
    is_integer,
)
from accelfn.data import Batch, Data
from accelfn.data.consistency import check_readers
from accelfn.data.plan import Cursor
from accelfn.data.reading import Reading
from accelfn.errors import ArgumentError, StateError
from accelfn.state.state import TrainState, check_state


@hint_attributes("getitem")
@attrs.frozen(kw_only=True, eq=False)
class Batches:
    """This rank's batches from a cursor to the last epoch; you can iterate several times.

    Attributes:
        data: the state's data.
        reading: the range of batches to read.
        is_loaded: whether the state is from a checkpoint, without training since: then a
            complete run is expected, and no warning is needed.
    """

    data: Data
    reading: Reading
    is_loaded: bool = False

    def __len__(self) -> int:
        """Return how many updates are left, the same on every rank.

        Raises:
            ArgumentError: without `until_epoch` there is no end.
        """
        start, seed = self.reading.start, self.reading.seed
        epochs = self.reading.epochs
        if epochs is None:
            msg = "af.batches(state) without until_epoch= has no end, and so no length."
            raise ArgumentError(msg)
        if start.epoch >= epochs:
            return 0
        count = self.data.num_updates_of(start.epoch, seed=seed, start=start.samples)
        for epoch in range(start.epoch + 1, epochs):
            count += self.data.num_updates_of(epoch, seed=seed)
        return count

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches, epoch after epoch; if no batch is left, an `AccelfnWarning` says why.

        Raises:
            ReplicaMismatchError: ranks communicate to read, but some ranks do not.
        """
        self._advise_if_empty()
        self.data.check_start(self.reading.start, seed=self.reading.seed)
        check_readers(self.data, self.reading.world)
        for batch in self.data.read(self.reading):
            yield batch.note_stand_ins(self.reading.world)

    def _advise_if_empty(self) -> None:
        """Warn of a loop that does nothing, unless the run was complete when it was loaded.

        A state that was never trained has its place from the user, for example by `af.seek`.
        """
        reading, epochs = self.reading, self.reading.epochs
        start = reading.start
        if epochs is None or start.epoch < epochs or not reading.world.is_main:
            return
        is_complete = self.is_loaded and start == Cursor(epochs)
        if is_complete or not reading.update:
            return
        advise(
            f"af.batches(state, until_epoch={epochs}) gives no batch: the state has"
            f" {start.epoch} epochs and {reading.update} updates behind it, and until_epoch="
            " counts from the beginning of the run, not from here. For one epoch more write"
            f" until_epoch={start.epoch + 1}; in a loop `for epoch in range(n):` write"
            " until_epoch=epoch + 1. If the run is complete, all is well."
        )


@explain_call_errors
def batches(state: TrainState, *, until_epoch: int | None = None) -> Batches:
    """Return this rank's batches, beginning at `state.cursor`.

    Args:
        state: only its cursor, seed, data, setup and world are read; it may be donated
            while the batches are used.
        until_epoch: batches end with this epoch of the run (counted from 1), so a resumed run
            ends where an uninterrupted run does. None means no end.

    Law:
        The order of samples depends on (seed, epoch) alone: not on ranks, workers or
        micro-batches. A run that resumes at any cursor gets exactly the remaining batches.
        They are read with gradients on, and inference mode and autocast off, whatever the
        caller's modes are.

    Cost:
        Starting at any cursor does not read earlier samples. With `sharded` or `dispatch`
        data it takes a small all-reduce, to compare these options over ranks.

    Raises:
        StateError: the state has no data.
        ArgumentError: `until_epoch` is not a positive number.

    And as they are read:
        ReplicaMismatchError: `sharded=` or `dispatch=` of the data differ by rank.
        DataError: a worker failed, a stream cannot be resumed, or a dataset is not what it
            says; what was being read is named.
        Warning: nothing is left, and the state was trained in this process or has more epochs
            behind it than `until_epoch`.
    """
    check_state("af.batches(state)", state)
    if state.data is None:
        msg = (
            "af.batches(state): the state was created with data=None. Give"
            " TrainState.create(data=af.Data(...))."
        )
        raise StateError(msg)
    if until_epoch is not None and not is_integer(until_epoch, 1):
        msg = (
            f"af.batches(until_epoch={until_epoch!r}): expected an integer of at least 1, or"
            " None."
        )
        raise ArgumentError(msg)
    reading = Reading(
        plan=state.definition.plan,
        start=state.cursor,
        epochs=until_epoch,
        seed=state.seed,
        world=state.world,
        update=state.step,
    )
    return Batches(data=state.data, reading=reading, is_loaded=state.lease.is_loaded)


def seek(state: TrainState, samples: int, *, epoch: int | None = None) -> TrainState:
    """Move the state's cursor to after `samples` samples of an epoch.

    `af.batches` then continues from there, without reading the skipped samples. The new
    state shares the tensors of the given state.

    Args:
        state: a state with data.
        samples: number of samples of the epoch, over all ranks.
        epoch: number of the epoch, from 0; default the state's epoch.

    Law: seeking to a run's position gives the batches that the run had left.

    Cost: none, because an order is a function. A stream has no order, and `af.batches` reads it
    again up to the position, if `replay=True` allows it.


    Raises:
        BatchError: the epoch has no such sample.
        StateError: the state has no data.
    """
    check_state("af.seek(state, samples)", state)
    if not is_integer(samples, 0):
        msg = f"af.seek(samples={samples!r}): expected a number of samples, 0 or more."
        raise ArgumentError(msg)
    data = batches(state).data
    cursor = Cursor(state.cursor.epoch if epoch is None else epoch, samples)
    if not data.is_stream:
        data.check_start(cursor, seed=state.seed)
    state.definition.cache.is_to_compare = True  # where each rank stands
    return attrs.evolve(state, cursor=cursor)
