# SPDX-License-Identifier: Apache-2.0
"""Bugs in what draws are a function of."""

from accelfn.data import epoch
from accelfn.data.mixed import Mixed
from accelfn.data.orders import samplers
from accelfn.data.orders.buckets import bucketed
from accelfn.data.sharded import Sharded
from accelfn.engine.compression import LowRank
from accelfn.engine.module import apart
from accelfn.loop import evaluate
from accelfn.state import views
from tests.laws import test_draws
from tests.laws.draws import ROWS
from tests.mutants.mutant import Mutant, Place

_ROWS = {row.name: row for row in ROWS}


def _of(row: str, bug: str, place: Place, change: str) -> Mutant:
    test = test_draws.test_each_part_tells_apart_or_changes_nothing
    return Mutant(bug, test, place, change, args={"row": _ROWS[row]})


MUTANTS = [
    _of(
        "between layers that are split",
        "L50: layers that are called twice drop the same features twice",
        apart.Apart.draw_alike,
        "if has_drawn: → if False:",
    ),
    _of(
        "evaluate",
        "L50: draws in an evaluation are the same on all ranks",
        evaluate._Lent.__init__,
        '"evaluate", state.world.loss.rank → "evaluate", 0',
    ),
    _of(
        "predict",
        "L50: an evaluation draws otherwise after each update",
        evaluate._Lent.__init__,
        '"evaluate", state.world.loss.rank → "evaluate", state.world.rank, state.step',
    ),
    _of(
        "a user's, shared",
        "L50: two states of other names share what a user draws",
        views.rng,
        "state.name,  → ",
    ),
    _of(
        "factors of PowerSGD",
        "L50: two states of other names begin with the same factors",
        LowRank._drawn,
        "self._seed, self._state, self.name → self._seed, self.name",
    ),
    _of(
        "factors of PowerSGD",
        "L50: all matrices begin with the same factor",
        LowRank._drawn,
        "draws.key(key, name) → draws.key(key)",
    ),
    _of(
        "turns of batches in a window",
        "L50: the batches of every window come in the same order",
        bucketed.of_epoch,
        "draws.fold(key, number) → key",
    ),
    _of(
        "turns of batches of a budget",
        "L50: the batches of a budget come in the same order in every epoch",
        epoch.epoch_of,
        'draws.key(seed, "batches", number) → draws.key(seed, "batches")',
    ),
    _of(
        "mixed",
        "L50: datasets of one length that are mixed are shuffled alike",
        Mixed.of_epoch,
        'draws.key(seed, "mix", which) → draws.key(seed, "mix")',
    ),
    _of(
        "a sampler",
        "L50: a sampler that draws gives the same in every epoch",
        samplers._drawn,
        'draws.key(seed, "sampler", epoch) → draws.key(seed, "sampler")',
    ),
    _of(
        "samples of a rank's own stream",
        "L50: ranks with streams of their own augment alike",
        Sharded._key,
        "self.ranks.rank → 0",
    ),
]
