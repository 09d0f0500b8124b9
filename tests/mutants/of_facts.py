# SPDX-License-Identifier: Apache-2.0
"""Bugs in what transforms tell of themselves, and in how it is held true."""

from accelfn.definition import facts, transform
from accelfn.definition.transform import chain
from accelfn.engine.module import made
from accelfn.state import beginning, grads, hyper, succession, update
from accelfn.step import stages
from accelfn.testing.checking import acting, fact_laws, subject
from accelfn.transforms import local_sgd
from tests.kit import test_check_transform, test_facts
from tests.laws import test_users_own, users_own
from tests.mutants.mutant import Mutant
from tests.unit import test_modules, test_transform

MUTANTS = [
    Mutant(
        "a class that is refused for its __init__ was made callable before",
        test_transform.test_a_class_that_is_refused_stays_as_it_was,
        transform.transform,
        'written = vars(cls).get("__init__")'
        ' → cls.__call__ = _apply; written = vars(cls).get("__init__")',
        args={"body": {"__init__": lambda *_: None}},
    ),
    Mutant(
        "modules that are checkpointed are given another forward afterwards",
        test_modules.test_who_changes_modules_stands_in_any_order,
        transform._with_last,
        "fact in told[id(each)] → 0",
        args={"size": 2},
    ),
    Mutant(
        "a transform gives the engine a module whose parameters no optimizer steps",
        test_modules.test_another_module_is_refused,
        made.made,
        "before.get(n) is not after.get(n) → False",
    ),
    Mutant(
        "a transform that refuses a fact stands beside one that tells it",
        test_facts.test_a_fact_of_ones_own_is_refused_by_another,
        chain.__init__,
        "told = {id(each): facts_of(each) for each in flat}"
        " → told = {id(each): {} for each in flat}",
    ),
    Mutant(
        "a refusal does not say what the other one tells",
        test_facts.test_a_fact_of_ones_own_is_refused_by_another,
        facts.check_together,
        'said.replace("{told}", str(told)) → said',
    ),
    Mutant(
        "a state takes a setup in which a transform has nothing to do",
        test_facts.test_what_is_needed_is_asked_for_where_a_state_is,
        facts.check_needs,
        "if name not in there: → if False:",
    ),
    Mutant(
        "`tell` in place of `tells` is taken for a constant",
        test_facts.test_a_misspelt_fact_is_refused,
        facts._refuse_near,
        "if near: → if False:",
        args={"body": {"tell": {"apart": True}}, "said": "did you mean 'tells'"},
    ),
    Mutant(
        "a fact that options deny is taken as one",
        test_facts.test_what_is_told_must_be_so,
        facts.facts_of,
        "if value → if True",
        args={"lie": "recomputes, untold"},
    ),
    Mutant(
        "beside a transform that draws nothing, another one draws from the process",
        test_facts.test_one_that_draws_beside_one_that_does_not,
        chain.__init__,
        "if not all( → if not any(",
    ),
    Mutant(
        "after a skipped update, transforms that do not look for it count one",
        test_facts.test_only_those_that_see_skips_are_called_after_one,
        succession.through_state,
        "if update.skipped: → if False:",
    ),
    Mutant(
        "a slot that an evaluation gives back is lost in silence",
        test_facts.test_what_is_asked_often_keeps_no_slot,
        update.looked,
        "if update.slots.get(name) is not slot: → if False:",
        args={"field": "eval_params"},
    ),
    Mutant(
        "a transform that looks at a state once is given an entry in its checkpoints",
        test_facts.test_an_init_that_gives_nothing_makes_no_slot,
        beginning.begin_slots,
        "if slot is not None: → if True:",
    ),
    Mutant(
        "check_transform passes one that says it draws nothing, and draws",
        test_facts.test_what_is_told_must_be_so,
        fact_laws._draws,
        '"draws_nothing": False → "draws_nothing": True',
        args={"lie": "draws_nothing"},
    ),
    Mutant(
        "check_transform passes one that says an entry differs which there is not",
        test_facts.test_what_is_told_must_be_so,
        fact_laws._no_entry,
        "if slot is not None and not ( → if slot is None and not (",
        args={"lie": "by_rank"},
    ),
    Mutant(
        "check_transform tries one that judges what is finite by finite losses alone",
        test_facts.test_what_is_told_must_be_so,
        fact_laws._not_judged,
        "math.inf if number == 1 else 1.0 → 1.0",
        args={"lie": "judges_finite"},
    ),
    Mutant(
        "check_transform passes one that says it recomputes, and does not",
        test_facts.test_what_is_told_must_be_so,
        fact_laws._recomputes,
        "if found <= plain and → if found < plain and",
        args={"lie": "recomputes"},
    ),
    Mutant(
        "check_transform passes one that recomputes without a word",
        test_facts.test_what_is_told_must_be_so,
        fact_laws._recomputes,
        "if found > plain and → if False and",
        args={"lie": "recomputes, untold"},
    ),
    Mutant(
        "check_transform passes one that counts a batch's parts wrongly",
        test_facts.test_what_is_told_must_be_so,
        fact_laws._other_parts,
        "if told == losses: → if told:",
        args={"lie": "micro_batches"},
    ),
    Mutant(
        "entries that a transform says differ by rank must be alike",
        test_facts.test_what_differs_by_rank_is_told_by_entry,
        subject.held,
        "path.startswith(tuple(own)) → False",
    ),
    Mutant(
        "where one entry differs by rank, all others of the slot may drift apart",
        test_facts.test_other_entries_of_such_a_slot_must_agree,
        subject.held,
        'f"slots[{slot!r}][{entry!r}]" → f"slots[{slot!r}]"',
    ),
    Mutant(
        "check_transform passes one whose loss is the loss that it was given",
        test_check_transform.test_a_method_that_does_nothing_is_told,
        acting.idle,
        "(*_ACTS, *_WRAPS) → _ACTS",
        args={"field": "loss"},
    ),
    Mutant(
        "check_transform passes one whose reduce leaves all gradients as they are",
        test_check_transform.test_a_method_that_does_nothing_is_told,
        acting.idle,
        "(*_ACTS, *_WRAPS) → _WRAPS",
        args={"field": "loss_scale"},
    ),
    Mutant(
        "L10: local_sgd averages one update after it was asked to",
        test_users_own.test_each_trains_as_the_original_does,
        local_sgd.local_sgd.after_update,
        ">= self.sync_every → > self.sync_every",
        args={"pair": test_users_own.PAIRS["local_sgd"]},
    ),
    Mutant(
        "L2: the sums that a user's reduce gives are divided by each rank's own weight",
        test_users_own.test_each_keeps_the_laws,
        grads.Grads.with_sums,
        "divisor=_whole_weight(weight), → divisor=self.taken.divisor,",
        args={"transform": users_own.Mean()},
    ),
    Mutant(
        "L10: what another transform evaluates is averaged only before local_sgd",
        test_users_own.test_what_not_all_may_evaluate_is_brought_together,
        transform._with_last,
        "fact in told[id(each)] → 0",
    ),
    Mutant(
        "L30: transforms stand together that refuse each other",
        test_users_own.test_two_that_recompute_are_refused,
        facts.check_together,
        "if told: → if False:",
    ),
    Mutant(
        "a property of facts that raises is taken for one that tells nothing",
        test_facts.test_a_property_that_raises_is_not_taken_for_none,
        facts.told_by,
        "getattr(transform, name) if hasattr(type(transform), name) else {}"
        " → getattr(transform, name, {})",
        args={"name": "tells"},
    ),
    Mutant(
        "who looks at the rates of a state uses up the word that its schedule is over",
        test_facts.test_looking_at_rates_says_nothing,
        hyper.of_next_update,
        "_planned(Update(state=state, slots=slots))[0]"
        " → planned_for(Update(state=state, slots=slots))[0]",
    ),
    Mutant(
        "after_update is given gradients that were divided, and say that they were not",
        test_facts.test_gradients_after_an_update_say_what_they_are,
        stages.take,
        "if ready is not update.grads: → if False:",
    ),
    Mutant(
        "a transform that sees skips changes parameters after one",
        test_facts.test_a_skip_changes_no_state,
        succession.through_state,
        "if update.skipped and after is not state: → if False:",
    ),
]
