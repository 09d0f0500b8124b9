# SPDX-License-Identifier: Apache-2.0
"""Bugs in what draws are a function of."""

from accelfn.data import epoch
from accelfn.data.mixed import Mixed
from accelfn.data.orders import samplers
from accelfn.data.orders.buckets import bucketed
from accelfn.data.sharded import Sharded
from accelfn.data.zipped import Side
from accelfn.engine.compression import LowRank
from accelfn.loop import evaluate
from accelfn.state import views
from accelfn.transforms.compress import compress
from tests.laws import test_draws
from tests.laws.draws import ROWS
from tests.mutants.mutant import Mutant

_ROWS = {row.name: row for row in ROWS}


def _of(row: str, **options: object) -> Mutant:
    law, test = "L50", test_draws.test_each_part_tells_apart_or_changes_nothing
    return Mutant(law=law, test=test, args={"row": _ROWS[row]}, **options)


MUTANTS = [
    _of(
        "evaluate",
        name="ranks evaluate with one draw",
        says="draws in an evaluation are the same on all ranks",
        place=evaluate._Lent.__init__,
        old='"evaluate", state.world.rank',
        new='"evaluate", 0',
    ),
    _of(
        "predict",
        name="an evaluation knows the update",
        says="an evaluation draws otherwise after each update",
        place=evaluate._Lent.__init__,
        old='"evaluate", state.world.rank',
        new='"evaluate", state.world.rank, state.step',
    ),
    _of(
        "a user's, shared",
        name="a user's draws forget the name",
        says="two states of other names share what a user draws",
        place=views.rng,
        old="state.name, ",
        new="",
    ),
    _of(
        "factors of PowerSGD",
        name="a factor forgets the state",
        says="two states of other names begin with the same factors",
        place=compress._compression,
        old="state.seed, state.name, name",
        new="state.seed, name",
    ),
    _of(
        "factors of PowerSGD",
        name="a factor for every matrix",
        says="all matrices begin with the same factor",
        place=LowRank._drawn,
        old="draws.key(self._key, name)",
        new="draws.key(self._key)",
    ),
    _of(
        "turns of batches in a window",
        name="windows take turns alike",
        says="the batches of every window come in the same order",
        place=bucketed.of_epoch,
        old="draws.fold(key, number)",
        new="key",
    ),
    _of(
        "turns of batches of a budget",
        name="budgets take turns alike",
        says="the batches of a budget come in the same order in every epoch",
        place=epoch.epoch_of,
        old='draws.key(seed, "batches", number)',
        new='draws.key(seed, "batches")',
    ),
    _of(
        "zipped",
        name="what is zipped has one key",
        says="datasets of one length that are zipped are shuffled alike",
        place=Side.of_epoch,
        old="self.names[which]",
        new='""',
    ),
    _of(
        "mixed",
        name="what is mixed has one key",
        says="datasets of one length that are mixed are shuffled alike",
        place=Mixed.of_epoch,
        old='draws.key(seed, "mix", which)',
        new='draws.key(seed, "mix")',
    ),
    _of(
        "a sampler",
        name="a sampler forgets the epoch",
        says="a sampler that draws gives the same in every epoch",
        place=samplers._drawn,
        old='draws.key(seed, "sampler", epoch)',
        new='draws.key(seed, "sampler")',
    ),
    _of(
        "samples of a rank's own stream",
        name="own streams draw alike",
        says="ranks with streams of their own augment alike",
        place=Sharded._key,
        old="self.world.rank",
        new="0",
    ),
]
