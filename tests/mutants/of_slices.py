# SPDX-License-Identifier: Apache-2.0
"""Bugs in slices of tensors, and in how others are made of them."""

from accelfn.checkpoint import slices
from accelfn.checkpoint.slices import Slice
from tests.laws import test_slices
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L47: what two slices share is taken from where the one that was saved begins",
        test_slices.test_resharding_is_cutting,
        slices.assembled,
        "there.of(values)"
        " → Slice(part.size, (0,) * len(part.size), there.size).of(values)",
    ),
    Mutant(
        "L47: the last elements of a length that ranks do not divide are nobody's",
        test_slices.test_even_parts_are_those_of_torch,
        Slice.even.__func__,
        "-(-length // count) → length // count",
    ),
    Mutant(
        "L47: lengths differ by one at most, which is not how DTensors lie",
        test_slices.test_even_parts_are_those_of_torch,
        Slice.even.__func__,
        "min(each * step, length) → each * length // count",
    ),
    Mutant(
        "L47: as many corners of either sign are taken for those of the whole",
        test_slices.test_boxes_tile_if_each_element_is_in_one,
        slices.tile,
        "not any(corners.values()) → not sum(corners.values())",
    ),
    Mutant(
        "L47: elements that no slice has are whatever was there",
        test_slices.test_a_slice_that_is_missing_is_noticed,
        slices.assembled,
        "if open_: → if open_ < 0:",
    ),
    Mutant(
        "L47: slices that overlap as often as they leave holes are taken for a whole",
        test_slices.test_boxes_tile_if_each_element_is_in_one,
        slices.tile,
        "(-1) ** sum(ends) → 1",
    ),
    Mutant(
        "L47: a tensor without an element has one that no slice holds",
        test_slices.test_cuts_tile,
        slices.tile,
        "length == 0 or any → any",
    ),
]
