# SPDX-License-Identifier: Apache-2.0
"""Bugs in how ranks find out that they hold other data than one another."""

from accelfn.data import alike, fingerprint
from accelfn.engine import agreement
from accelfn.loop import batches, evaluate
from tests.laws import test_same_data
from tests.mutants.mutant import Mutant

TOLD = test_same_data.test_ranks_with_another_order_are_told
READ = test_same_data.test_ranks_that_read_otherwise_are_told
DRAWN = test_same_data.test_draws_of_a_dataset_are_no_difference

MUTANTS = [
    Mutant(
        "L36: ranks may share data of which each has another order",
        TOLD,
        agreement.check_definitions,
        "check_alike(data, data.looks, state.world) → pass",
    ),
    Mutant(
        "L36: ranks may evaluate, and predict, on data of which each has another order",
        TOLD,
        evaluate._held_out,
        "check_alike(held, data.looks, world) → pass",
    ),
    Mutant(
        "L36: of the places in a dataset only one is looked at",
        TOLD,
        fingerprint.places_of,
        "return np.unique( → return [0] or np.unique(",
    ),
    Mutant(
        "L36: of a dataset made of tensors no more is compared than of any other",
        test_same_data.test_two_samples_that_changed_places_are_seen,
        alike._in_memory,
        "if isinstance(source, Rows): → if False:",
    ),
    Mutant(
        "L36: which samples a Subset picks is not compared",
        test_same_data.test_two_samples_that_changed_places_are_seen,
        alike._in_memory,
        "while isinstance(dataset, Subset): → while False:",
    ),
    Mutant(
        "L36: samples are not read again where ranks differ",
        DRAWN,
        alike.Looks.look_again,
        "self._read(1 + _AGAIN) → pass",
    ),
    Mutant(
        "L36: a sample of which a part is drawn is not compared at all",
        DRAWN,
        alike._rows_of,
        "if i not in drawn[part] → if not drawn[part]",
    ),
    Mutant(
        "L36: a leaf that was drawn alike each time on one rank is compared",
        DRAWN,
        alike._rows_of,
        "drawn[part] = drawn.get(part, set()) | changing → drawn[part] = changing",
    ),
    Mutant(
        "L36: a difference is known and not told",
        test_same_data.test_splits_and_samplers_of_each_rank_are_seen,
        alike.check_alike,
        "if differing is not None: → if False:",
    ),
    Mutant(
        "L36: samplers may take other samples on each rank",
        test_same_data.test_orders_of_each_rank_are_seen,
        alike.order_told,
        "order.tobytes() + spans.tobytes() → spans.tobytes()",
    ),
    Mutant(
        "L36: samples are compared though the data has a name",
        test_same_data.test_data_that_name_themselves_are_compared_by_name,
        alike._form,
        "data.fingerprint is None and looks is not None → looks is not None",
    ),
    Mutant(
        "L36: a sample that could be read later only counts as drawn",
        test_same_data.test_a_sample_that_cannot_be_read_is_no_difference_by_itself,
        alike._same,
        "if not _has_failed(each) → ",
    ),
    Mutant(
        "L36: of an array of objects their addresses are compared",
        test_same_data.test_objects_are_known_by_what_they_hold,
        fingerprint.bytes_of,
        "and leaf.dtype.hasobject → and False",
    ),
    Mutant(
        "L36: where a number of a sample ends and the next one begins is not looked at",
        test_same_data.test_digits_that_are_cut_elsewhere_are_other_data,
        fingerprint.bytes_of,
        'f"{leaf!r};" → repr(leaf)',
    ),
    Mutant(
        "L36: of an array of objects its shape alone is compared",
        test_same_data.test_objects_are_known_by_what_they_hold,
        fingerprint._bytes_of_objects,
        'told += _digest(b"".join(leaves)) → leaves.close()',
    ),
    Mutant(
        "L36: ranks that meet as they read begin without a word of it",
        READ,
        batches.Batches.__iter__,
        "check_readers(self.data, self.reading.world) → pass",
    ),
    Mutant(
        "L36: ranks that read each for itself do not say so as they build",
        READ,
        agreement._rows,
        "readers_told(definition.data) → {}",
    ),
    Mutant(
        "L36: a rank that reads for all does not ask the others, one with its own stream does",
        READ,
        alike.check_readers,
        "data.sharded or data.dispatch → data.sharded",
    ),
    Mutant(
        "L36: whether a rank reads a stream of its own is not told",
        READ,
        alike.readers_told,
        '{"sharded": data is not None and data.sharded} → {}',
    ),
    Mutant(
        "L36: whether one rank reads for all is not told",
        READ,
        alike.readers_told,
        "data is not None and data.dispatch → False",
    ),
]
