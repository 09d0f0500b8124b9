# SPDX-License-Identifier: Apache-2.0
"""Bugs of kinds that no law saw, found by planting some that were chosen from the code alone."""

from accelfn.collectives import averages
from accelfn.world import regrouping
from tests.laws import test_pending, test_regroup
from tests.mutants.mutant import Mutant

WAITING = test_regroup.test_who_has_asked_and_is_not_in_is_awaited
BY_WEIGHT = test_pending.test_a_mean_is_by_weight

MUTANTS = [
    Mutant(
        "L45: one that is gone before it came in is awaited for ever",
        WAITING,
        regrouping.Words.take_in,
        'add("waiting", -1) → add("waiting", -1 if number is not None else 0)',
    ),
    Mutant(
        "L45: whoever is taken in is told of the first world",
        WAITING,
        regrouping.Words.take_in,
        "str(number) → str(1)",
    ),
    Mutant(
        "L6: after the first full bucket each tensor is sent alone",
        BY_WEIGHT,
        averages._buckets,
        "bucket, room = [], most → bucket = []",
    ),
    Mutant(
        "L47: a bucket holds twice what it may",
        BY_WEIGHT,
        averages._buckets,
        "if bucket and piece.numel() > room: → if bucket and piece.numel() > most + room:",
    ),
]
