# SPDX-License-Identifier: Apache-2.0
"""Bugs of the kind that a developer makes, which two readers chose and no test found."""

from accelfn.checkpoint import store
from accelfn.data import sources
from accelfn.definition import transform
from accelfn.engine import engine
from accelfn.placing import plan
from tests.mutants.mutant import Mutant
from tests.unit import (
    test_checkpoint,
    test_local_sgd,
    test_placing,
    test_sources,
    test_transform,
)

MUTANTS = [
    Mutant(
        "what ranks that are apart evaluate is of each alone under an average around it",
        test_local_sgd.test_what_others_evaluate_is_averaged_in_any_order,
        transform.chain.__init__,
        'in (("eval_params", "apart"), ("module", "recomputes")) → in (("module", "recomputes"),)',
        args={"size": 2},
    ),
    Mutant(
        "block 1 is taken for a module around block 10",
        test_placing.test_a_block_is_no_part_of_another_whose_number_it_begins_with,
        plan._is_within,
        'name.startswith(f"{module}.") → name.startswith(module)',
    ),
    Mutant(
        "of a subset of a subset the first is forgotten",
        test_sources.test_every_sample_is_read_at_its_index,
        sources.Rows.subset,
        "picked if self.picked is None else self.picked[picked] → picked",
        args={"kind": "Subset of Subset of rows", "shuffle": False},
    ),
    Mutant(
        "a state that has taken no update is due to be saved",
        test_checkpoint.test_nothing_is_due_before_the_first_update,
        store.CheckpointStore.due,
        "return False → pass",
        args={"every": 1},
    ),
    Mutant(
        "a loss draws by the seed that its engine had first",
        test_transform.test_a_loss_draws_by_the_seed_that_was_loaded,
        engine.Engine._key,
        "self._key_of[0] != state.seed → self._key_of[0] is None",
    ),
]
