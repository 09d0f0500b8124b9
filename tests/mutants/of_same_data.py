# SPDX-License-Identifier: Apache-2.0
"""Bugs in how ranks find out that they hold other data than one another."""

from accelfn.data import alike, fingerprint
from accelfn.engine import agreement
from accelfn.loop import evaluate
from tests.laws import test_same_data
from tests.mutants.mutant import Mutant

TOLD = test_same_data.test_ranks_with_another_order_are_told
DRAWN = test_same_data.test_draws_of_a_dataset_are_no_difference

MUTANTS = [
    Mutant(
        name="samples are not compared at build",
        says="ranks may share data of which each has another order",
        law="L36",
        test=TOLD,
        place=agreement.check_definitions,
        old="check_alike(data, data.looks, state.world)",
        new="pass",
    ),
    Mutant(
        name="samples are not compared to evaluate",
        says="ranks may evaluate, and predict, on data of which each has another order",
        law="L36",
        test=TOLD,
        place=evaluate._held_out,
        old="check_alike(held, data.looks, world)",
        new="pass",
    ),
    Mutant(
        name="the first sample stands for all",
        says="of the places in a dataset only one is looked at",
        law="L36",
        test=TOLD,
        place=fingerprint.places_of,
        old="return np.unique(",
        new="return [0] or np.unique(",
    ),
    Mutant(
        name="a few rows stand for all",
        says="of a dataset made of tensors no more is compared than of any other",
        law="L36",
        test=test_same_data.test_two_samples_that_changed_places_are_seen,
        place=alike._in_memory,
        old="if isinstance(source, Rows):",
        new="if False:",
    ),
    Mutant(
        name="a Subset is like another",
        says="which samples a Subset picks is not compared",
        law="L36",
        test=test_same_data.test_two_samples_that_changed_places_are_seen,
        place=alike._in_memory,
        old="while isinstance(dataset, Subset):",
        new="while False:",
    ),
    Mutant(
        name="noise is taken for other data",
        says="samples are not read again where ranks differ",
        law="L36",
        test=DRAWN,
        place=alike.Looks.look_again,
        old="self._read(1 + _AGAIN)",
        new="pass",
    ),
    Mutant(
        name="noise hides what stands beside it",
        says="a sample of which a part is drawn is not compared at all",
        law="L36",
        test=DRAWN,
        place=alike._rows_of,
        old="if i not in drawn[part]",
        new="if not drawn[part]",
    ),
    Mutant(
        name="noise in one sample is its own",
        says="a leaf that was drawn alike each time on one rank is compared",
        law="L36",
        test=DRAWN,
        place=alike._rows_of,
        old="drawn[part] = drawn.get(part, set()) | changing",
        new="drawn[part] = changing",
    ),
    Mutant(
        name="splits are not compared",
        says="a difference is known and not told",
        law="L36",
        test=test_same_data.test_splits_and_samplers_of_each_rank_are_seen,
        place=alike.check_alike,
        old="if differing is not None:",
        new="if False:",
    ),
    Mutant(
        name="orders are not compared",
        says="samplers may take other samples on each rank",
        law="L36",
        test=test_same_data.test_orders_of_each_rank_are_seen,
        place=alike.order_told,
        old="order.tobytes() + spans.tobytes()",
        new="spans.tobytes()",
    ),
    Mutant(
        name="names are not enough",
        says="samples are compared though the data has a name",
        law="L36",
        test=test_same_data.test_data_that_name_themselves_are_compared_by_name,
        place=alike._form,
        old="data.fingerprint is None and looks is not None",
        new="looks is not None",
    ),
    Mutant(
        name="one failure hides the rest",
        says="a sample that could be read later only counts as drawn",
        law="L36",
        test=test_same_data.test_a_sample_that_cannot_be_read_is_no_difference_by_itself,
        place=alike._same,
        old="if not _has_failed(each)",
        new="",
    ),
    Mutant(
        name="objects are known by where they lie",
        says="of an array of objects their addresses are compared",
        law="L36",
        test=test_same_data.test_objects_are_known_by_what_they_hold,
        place=fingerprint.bytes_of,
        old="and leaf.dtype.hasobject",
        new="and False",
    ),
    Mutant(
        name="numbers run together",
        says="where a number of a sample ends and the next one begins is not looked at",
        law="L36",
        test=test_same_data.test_digits_that_are_cut_elsewhere_are_other_data,
        place=fingerprint.bytes_of,
        old='f"{leaf!r};"',
        new="repr(leaf)",
    ),
    Mutant(
        name="all objects are alike",
        says="of an array of objects its shape alone is compared",
        law="L36",
        test=test_same_data.test_objects_are_known_by_what_they_hold,
        place=fingerprint._bytes_of_objects,
        old='told += _digest(b"".join(leaves))',
        new="leaves.close()",
    ),
]
