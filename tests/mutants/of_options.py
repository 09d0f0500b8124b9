# SPDX-License-Identifier: Apache-2.0
"""Bugs in options and calls that laws had not drawn beside one another."""

from accelfn.checkpoint.load import load_part
from accelfn.checkpoint.store import CheckpointStore
from accelfn.data.dataset import Data
from accelfn.data.orders.buckets import bucketed
from accelfn.loop.evaluate import _Lent
from tests.laws import (
    test_buckets,
    test_mixes,
    test_randomness,
    test_storage,
    test_store_calls,
    test_streams,
)
from tests.mutants.mutant import Mutant

OF_CHECKPOINTS = [
    Mutant(
        "L41: what of a checkpoint is asked for is loaded from a file that has changed",
        test_storage.test_whoever_reads_notices_a_change,
        load_part,
        "source = _opened(state, folder, verify=verify)"
        " → source = _opened(state, folder, verify=False)",
    ),
    Mutant(
        "L45: a store does not hear what may differ in the data",
        test_store_calls.test_data_may_differ_in_what_is_allowed,
        CheckpointStore.restore,
        "keeping.name_of(chosen), allow=allow) → keeping.name_of(chosen))",
    ),
    Mutant(
        "L45: a place in the data is loaded into other ones, if any difference is allowed",
        test_store_calls.test_data_may_differ_in_what_is_allowed,
        load_part,
        'if "cursor" in wanted.only: → if "cursor" in wanted.only and not allow:',
    ),
]

OF_DATA = [
    Mutant(
        "L37: the batches of all windows are turned alike",
        test_buckets.test_windows_are_turned_apart,
        bucketed.of_epoch,
        "key=draws.fold(key, number) → key=key",
    ),
    Mutant(
        "L36: what a stream leaves out in training is left out in evaluation, too",
        test_streams.test_a_stream_is_evaluated_on_each_sample_once,
        Data.in_order,
        'data = attrs.evolve(self, remainder="short") → data = attrs.evolve(self)',
    ),
    Mutant(
        "L36: a stream is evaluated from where the last evaluation has left it",
        test_streams.test_a_stream_is_evaluated_on_each_sample_once,
        Data.in_order,
        'object.__setattr__(data, "first", self.first) → pass',
    ),
    Mutant(
        "L36: datasets side by side do not hear what becomes of a short batch",
        test_mixes.test_options_of_zips_and_mixes_are_those_of_data,
        Data.zip.__func__,
        "remainder=remainder, → ",
    ),
    Mutant(
        "L36: datasets side by side wait for their workers as long as others do",
        test_mixes.test_options_of_zips_and_mixes_are_those_of_data,
        Data.zip.__func__,
        "timeout=timeout, → ",
    ),
]

OF_DRAWS = [
    Mutant(
        "L50: each batch of an evaluation draws what the first one did",
        test_randomness.test_evaluations_draw_apart,
        _Lent.quietly,
        "self._calls += 1 → pass",
    ),
    Mutant(
        "L50: each rank draws the same in an evaluation",
        test_randomness.test_evaluations_draw_apart,
        _Lent.__init__,
        '"evaluate", state.world.loss.rank) → "evaluate", 0)',
    ),
]

MUTANTS = [*OF_CHECKPOINTS, *OF_DATA, *OF_DRAWS]
