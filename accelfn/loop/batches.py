# SPDX-License-Identifier: Apache-2.0
"""`batches`: iterate over the batches of a training run, from the cursor of a state."""

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
from accelfn.data.loaders import Reading
from accelfn.data.plan import Cursor
from accelfn.data.reading import read_batches
from accelfn.errors import ArgumentError, StateError
from accelfn.state.state import TrainState, check_state


@hint_attributes("getitem")
@attrs.frozen(kw_only=True, eq=False)
class Batches:
    """This rank's batches from the state's cursor to the last epoch.

    You can iterate over the same object several times; each iteration starts at the cursor.

    Attributes:
        data: the state's data.
        reading: the range of batches to read.
        is_loaded: whether the state was loaded from a checkpoint and not trained since. A run
            that was complete when it was saved then causes no warning.
    """

    data: Data
    reading: Reading
    is_loaded: bool = False

    def __len__(self) -> int:
        """Return the number of updates that are left; it is equal on all ranks.

        Raises:
            ArgumentError: `until_epoch` is None, so the batches never end.
        """
        start, seed = self.reading.start, self.reading.seed
        epochs = self.reading.epochs
        if epochs is None:
            msg = "len(af.batches(state)): the batches never end. Pass until_epoch= to af.batches."
            raise ArgumentError(msg)
        if start.epoch >= epochs:
            return 0
        count = self.data.num_updates_of(start.epoch, seed=seed, start=start.samples)
        for epoch in range(start.epoch + 1, epochs):
            count += self.data.num_updates_of(epoch, seed=seed)
        return count

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches, epoch after epoch; warn with `AccelfnWarning` if no batch is left.

        Raises:
            ReplicaMismatchError: some ranks communicate to read their data, and others do not.
        """
        self._advise_if_empty()
        self.data.check_start(self.reading.start, seed=self.reading.seed)
        check_readers(self.data, self.reading.world)
        for batch in read_batches(self.data, self.reading):
            yield batch.note_stand_ins(self.reading.world)

    def _advise_if_empty(self) -> None:
        """Warn about a loop without batches, unless the run was complete when it was loaded.

        A state without updates causes no warning: the user moved its cursor, for example with
        `af.seek`.
        """
        reading, epochs = self.reading, self.reading.epochs
        start = reading.start
        if epochs is None or start.epoch < epochs or not reading.world.is_main:
            return
        is_complete = self.is_loaded and start == Cursor(epochs)
        if is_complete or not reading.update:
            return
        advise(
            f"af.batches(state, until_epoch={epochs}) yields no batch: the state has already"
            f" finished {start.epoch} epochs ({reading.update} updates), and until_epoch= counts"
            " epochs from the start of the run. To train for one more epoch, pass"
            f" until_epoch={start.epoch + 1}; in a loop `for epoch in range(n):`, pass"
            " until_epoch=epoch + 1. If the run is complete, ignore this warning."
        )


@explain_call_errors
def batches(state: TrainState, *, until_epoch: int | None = None) -> Batches:
    """Return this rank's batches, starting at `state.cursor`.

    Args:
        state: accelfn reads only its cursor, seed, data, setup and world, so you may donate the
            state while you iterate.
        until_epoch: the last epoch of the run, counted from 1. A resumed run then ends at the
            same epoch as an uninterrupted run. None: the batches never end.

    Law:
        The order of samples depends only on seed and epoch, not on ranks, workers or
        micro-batches. A run that resumes at any cursor gets exactly the remaining batches.
        Data is read with gradients enabled, and with inference mode and autocast disabled,
        independent of the modes of your program.

    Cost:
        A start at a later cursor does not read earlier samples. Data with `sharded` or
        `dispatch` needs a small all-reduce, to compare these options over the ranks.

    Raises:
        StateError: the state has no data.
        ArgumentError: `until_epoch` is not a positive number.

    Raises during iteration:
        ReplicaMismatchError: `sharded=` or `dispatch=` of the data differ by rank.
        DataError: a worker failed, a stream cannot be resumed, or a dataset does not match its
            own description, such as its length. The message names the samples that were read.
        Warning: no batch is left, and the state was trained in this process, or has finished
            more epochs than `until_epoch`.
    """
    check_state("af.batches(state)", state)
    if state.data is None:
        msg = (
            "af.batches(state): the state was created with data=None. Pass"
            " TrainState.create(..., data=af.Data(...))."
        )
        raise StateError(msg)
    if until_epoch is not None and not is_integer(until_epoch, 1):
        msg = f"af.batches(until_epoch={until_epoch!r}): expected an integer, 1 or more, or None."
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
    """Move the state's cursor to the position after `samples` samples of an epoch.

    `af.batches` then continues from this position, and does not read the skipped samples. The
    returned state shares the tensors of the state that you pass.

    Args:
        state: a state with data.
        samples: the number of samples of the epoch to skip, over all ranks.
        epoch: the number of the epoch, from 0; default: the state's epoch.

    Law: after you seek to the position of a run, you get the batches that this run had left.

    Cost: none, because the order of samples is computed. A stream cannot be indexed: `af.batches`
    reads the stream again up to the position, if its data has `replay=True`.

    Raises:
        BatchError: the epoch has fewer samples.
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
    state.definition.cache.is_to_compare = True  # at the next update
    return attrs.evolve(state, cursor=cursor)
