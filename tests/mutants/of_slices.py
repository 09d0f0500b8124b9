# SPDX-License-Identifier: Apache-2.0
"""Bugs in slices of tensors, and in how others are made of them."""

from accelfn.checkpoint import slices
from accelfn.checkpoint.slices import Slice
from tests.laws import test_slices
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="a slice from the wrong corner",
        says="what two slices share is taken from where the one that was saved begins",
        law="L47",
        test=test_slices.test_resharding_is_cutting,
        place=slices.assembled,
        old="there.of(values)",
        new="Slice(part.size, (0,) * len(part.size), there.size).of(values)",
    ),
    Mutant(
        name="parts rounded down",
        says="the last elements of a length that ranks do not divide are nobody's",
        law="L47",
        test=test_slices.test_even_parts_are_those_of_torch,
        place=Slice.even.__func__,
        old="-(-length // count)",
        new="length // count",
    ),
    Mutant(
        name="parts as even as can be",
        says="lengths differ by one at most, which is not how DTensors lie",
        law="L47",
        test=test_slices.test_even_parts_are_those_of_torch,
        place=Slice.even.__func__,
        old="min(each * step, length)",
        new="each * length // count",
    ),
    Mutant(
        name="corners are counted alone",
        says="as many corners of either sign are taken for those of the whole",
        law="L47",
        test=test_slices.test_boxes_tile_if_each_element_is_in_one,
        place=slices.tile,
        old="not any(corners.values())",
        new="not sum(corners.values())",
    ),
    Mutant(
        name="a hole is filled with what lies in memory",
        says="elements that no slice has are whatever was there",
        law="L47",
        test=test_slices.test_a_slice_that_is_missing_is_noticed,
        place=slices.assembled,
        old="if open_:",
        new="if open_ < 0:",
    ),
    Mutant(
        name="corners without signs",
        says="slices that overlap as often as they leave holes are taken for a whole",
        law="L47",
        test=test_slices.test_boxes_tile_if_each_element_is_in_one,
        place=slices.tile,
        old="(-1) ** sum(ends)",
        new="1",
    ),
    Mutant(
        name="lengths of 0 have corners",
        says="a tensor without an element has one that no slice holds",
        law="L47",
        test=test_slices.test_cuts_tile,
        place=slices.tile,
        old="length == 0 or any",
        new="any",
    ),
]
