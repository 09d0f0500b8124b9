# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a state makes of values that it is given outside of a step."""

import accelfn as af
from accelfn.checkpoint import partial as part
from accelfn.engine import agreement
from accelfn.engine.optimizer import live_optimizer
from accelfn.loop import batches, evaluate
from accelfn.schedules import rates
from accelfn.state import anew, state, views
from accelfn.step import stages
from accelfn.transforms import diloco
from tests.laws import test_given_values as laws
from tests.mutants.mutant import Mutant
from tests.unit import (
    test_evaluation,
    test_likely_mistakes,
    test_schedules,
    test_trainable,
)

BEGINS = laws.test_a_state_begins_with_what_it_is_given
FURTHER = laws.test_what_has_come_further_goes_on_and_is_told
STAYS = laws.test_what_is_frozen_moves_by_no_outer_momentum
MEETS = laws.test_what_is_frozen_apart_goes_to_the_mean
DRAWS = laws.test_an_optimizer_that_draws_is_a_function_of_the_state
APART = laws.test_ranks_that_part_in_mid_run_are_told
COUNTS = test_likely_mistakes.test_a_number_that_an_optimizer_counts_on_is_told

MUTANTS = [
    Mutant(
        "L45: an average begins with other parameters than the state was given",
        BEGINS,
        anew.slots_of,
        "if before.num_tried else → if True else",
        args={"way": "with_params"},
    ),
    Mutant(
        "L45: an average begins with other parameters than were written into a lent module",
        BEGINS,
        views.bind.__wrapped__,
        "state._slots.update(slots) → pass",
        args={"way": "bind"},
    ),
    Mutant(
        "L45: an average begins with other parameters than a file has",
        BEGINS,
        part._gone_on,
        "slots=slots) → slots=after.slots)",
        args={"way": "load_part"},
    ),
    Mutant(
        "L45: a slot that has come further begins anew",
        FURTHER,
        anew.begun_anew,
        "if _are_same(old, slots.get(owner.name)): → if True:",
    ),
    Mutant(
        "L45: slots that are loaded begin with the parameters that are",
        FURTHER,
        anew.begun_anew,
        "if owner.name in kept: → if False:",
    ),
    Mutant(
        "L45: what goes on without its parameters is not told",
        FURTHER,
        part._gone_on,
        "if going_on: → if False:",
    ),
    Mutant(
        "L42: what is frozen moves on by the momentum of diloco",
        STAYS,
        diloco.diloco._stepped,
        "if name in trained} → }",
    ),
    Mutant(
        "L42: what ranks had trained before it was frozen is never met",
        MEETS,
        diloco.diloco._stepped,
        "local(anchor[name]).sub_(means[name]) → pass",
    ),
    Mutant(
        "L50: what an optimizer draws is anybody's",
        DRAWS,
        stages._stepped,
        "if state.definition.has_torchs_optimizer: → if True:",
    ),
    Mutant(
        "L2: ranks that load other parameters in mid-run train on",
        APART,
        part._gone_on,
        "after.definition.cache.is_to_compare = True → pass",
        args={"act": "load_part"},
    ),
    Mutant(
        "L2: a rank that goes on training the same does not compare with one that does not",
        APART,
        state.TrainState.with_trainable.__wrapped__,
        "definition.cache.is_to_compare = True → pass",
        args={"act": "with_trainable"},
    ),
    Mutant(
        "L2: ranks that seek other samples in mid-run train on",
        APART,
        batches.seek.__wrapped__,
        "state.definition.cache.is_to_compare = True → pass",
        args={"act": "seek"},
    ),
    Mutant(
        "L2: where ranks stand in their data is not compared",
        APART,
        agreement._rows,
        'rows["cursor"] → _',
        args={"act": "seek"},
    ),
    Mutant(
        "a function that is evaluated may write into the state",
        test_evaluation.test_a_function_that_writes_into_the_model_is_refused,
        evaluate._Lent._check_unwritten,
        "if after != before: → if False:",
        args={"call": af.evaluate, "setup": None},
    ),
    Mutant(
        "a schedule may count its calls",
        test_schedules.test_a_schedule_that_counts_its_calls_or_draws_is_refused,
        rates._check_pure,
        "repr(first) != repr(again) → False",
        args={"make": lambda: test_schedules.itertools.count(1).__next__},
    ),
    Mutant(
        "a number that an optimizer counts on is not looked for",
        COUNTS,
        live_optimizer.LiveOptimizer.finish,
        "not self._counters.look() → True",
        args={"name": "of passes", "parts": True},
    ),
    Mutant(
        "a state loses its engine where nothing changes",
        test_trainable.test_the_same_set_is_the_same_state,
        state.TrainState.with_trainable.__wrapped__,
        "if names == set(skeleton.trainable): → if False:",
    ),
]
