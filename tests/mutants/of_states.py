# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a state is between its steps: what transforms draw, who may still use it."""

from accelfn.base import draws, sharing
from accelfn.definition import transform
from accelfn.engine import untaken
from accelfn.engine.optimizer import in_backward
from accelfn.loop import salvage
from accelfn.state import beginning, lease, shared_draws, succession, update, views
from accelfn.step import apply_grads, holding, stages
from accelfn.structure import given, overlap, skeleton, wrapped
from tests.laws import (
    test_ctrl_c,
    test_frozen,
    test_given,
    test_interrupted,
    test_memory_of_models,
    test_randomness,
    test_shared_draws,
    test_threads,
)
from tests.mutants.mutant import Mutant
from tests.unit import test_frozen as cases_of_frozen
from tests.unit import test_state, test_views

WAITS = test_ctrl_c.test_an_interrupt_waits_until_the_caller_has_what_it_held_back

MUTANTS = [
    Mutant(
        "L41: parameters that have some elements in common and begin apart are taken",
        test_memory_of_models.test_a_copy_trains_as_its_original,
        overlap._overlap,
        "elif marks.any(): → elif one.data_ptr() == other.data_ptr():",
    ),
    Mutant(
        "L41: parameters that take turns in one memory are refused",
        test_memory_of_models.test_a_copy_trains_as_its_original,
        overlap._overlap,
        "elif marks.any(): → else:",
    ),
    Mutant(
        "L41: a buffer may be a view of a parameter, which a copy has apart",
        test_memory_of_models.test_a_copy_trains_as_its_original,
        overlap.refuse_overlap,
        "id(one) in params or id(other) in params → id(one) in params and id(other) in params",
    ),
    Mutant(
        "L22: what a loss has frozen stays frozen",
        test_memory_of_models.test_what_a_loss_freezes_is_trained_after_it,
        untaken.refuse_frozen,
        "trained[name].requires_grad_() → pass",
    ),
    Mutant(
        "L22: finalize makes its slot in the caller's inference mode",
        test_shared_draws.test_what_transforms_draw_is_of_the_state,
        apply_grads.finalize,
        "with own_modes(state.definition.world.device): → if True:",
    ),
    Mutant(
        "L54: a part of a model that torch has wrapped is trained in its wrapper",
        test_given.test_what_torch_has_wrapped_is_refused,
        wrapped.refuse_wrapped,
        'in module.named_modules() → in [("", module)]',
    ),
    Mutant(
        "L50: what a transform draws beside one that draws nothing is anybody's",
        test_shared_draws.test_what_transforms_draw_is_of_the_state,
        transform.chain.__init__,
        """\
if not all(told[id(each)].get("draws_nothing") for each in having)
→
if having and not any(told[id(each)].get("draws_nothing") for each in having)
""",
    ),
    Mutant(
        "L50: what transforms draw after an update, and at the end, differs by rank",
        test_shared_draws.test_what_transforms_draw_is_of_the_state,
        succession.through_state,
        "shared_draws(state, field), torch.no_grad() → torch.no_grad()",
    ),
    Mutant(
        "L50: what transforms draw after an update that was skipped differs by rank",
        test_shared_draws.test_what_transforms_draw_is_of_the_state,
        succession.through_state,
        "with shared_draws(state, field), torch.no_grad():"
        " → with torch.no_grad() if update.skipped else shared_draws(state, field):",
    ),
    Mutant(
        "L50: a transform draws the same numbers in each of its fields",
        test_shared_draws.test_what_transforms_draw_is_of_the_state,
        shared_draws.draws_for,
        "draws.key(state.seed, name, purpose) → draws.key(state.seed, name)",
    ),
    Mutant(
        "L50: what a transform draws for the parameters to evaluate differs by rank",
        test_shared_draws.test_what_transforms_draw_is_of_the_state,
        update.through,
        "with shared_draws(state, field), torch.no_grad():"
        ' → with torch.no_grad() if field == "eval_params" else shared_draws(state, field):',
    ),
    Mutant(
        "L50: transforms that draw in init draw the same numbers",
        test_shared_draws.test_draws_of_two_beginnings_differ,
        beginning.begun,
        'f"init {owner.name}" → "init"',
        args={"size": 1},
    ),
    Mutant(
        "L54: an interrupt comes in the midst of an update, and the state is lost",
        test_ctrl_c.test_an_interrupt_comes_before_an_update_or_after_it,
        stages.take,
        """\
                hold()
                opt_state
→
                opt_state
""",
    ),
    Mutant(
        "L54: an interrupt comes while a backward pass updates parameters",
        test_ctrl_c.test_an_interrupt_comes_before_an_update_or_after_it,
        in_backward.LiveUpdate.hold,
        "self._hold() → pass",
    ),
    Mutant(
        "L54: an interrupt comes in the midst of whatever updates a state",
        test_ctrl_c.test_an_interrupt_comes_before_an_update_or_after_it,
        holding.holding.begin,
        "if self._previous is None and → if False and",
    ),
    Mutant(
        "L54: an interrupt that was held back never comes",
        test_ctrl_c.test_an_interrupt_comes_before_an_update_or_after_it,
        holding.holding.__exit__,
        """\
        if self._noted:
            self._send_later()
    except
→
    except
""",
    ),
    Mutant(
        "L54: an interrupt that comes just before the handler is put back is lost",
        test_ctrl_c.test_none_is_lost_while_the_handler_is_exchanged,
        holding.holding.__exit__,
        """\
        _set(signal.SIGINT, self._previous)
        if self._noted:
            self._send_later()
→
        if self._noted:
            self._send_later()
        _set(signal.SIGINT, self._previous)
""",
    ),
    Mutant(
        "L54: after an update Ctrl-C goes to accelfn",
        test_ctrl_c.test_an_interrupt_comes_before_an_update_or_after_it,
        holding.holding.__exit__,
        """\
        _set(signal.SIGINT, self._previous)
→

""",
    ),
    Mutant(
        "L54: of interrupts in one update all but the first are swallowed",
        test_ctrl_c.test_the_handler_in_place_is_asked,
        holding.holding._note,
        "self._noted or not way → not way",
    ),
    Mutant(
        "L54: an interrupt comes when an update is over, and its caller has not the state",
        WAITS,
        holding.holding._pass_on,
        "self._is_over and self._has_arrived(frame) → self._is_over",
    ),
    Mutant(
        "L54: whoever leaves the block that held an interrupt is thought to have arrived",
        WAITS,
        holding.holding._has_arrived,
        "at is not None and ( → (",
    ),
    Mutant(
        "L54: an interrupt looks at the frame that runs, and not at who waits for it",
        WAITS,
        holding.holding._has_arrived,
        "frame, inner = frame.f_back, frame → return True",
    ),
    Mutant(
        "L54: an old state knows the one that came of it, and not the newest",
        test_ctrl_c.test_an_old_state_knows_the_newest,
        lease.Lease.hand_over,
        "line = None if self._line is None else self._line() → line = None",
    ),
    Mutant(
        "L54: the newest state holds itself, and its tensors outlive all who have it",
        test_ctrl_c.test_an_old_state_knows_the_newest,
        lease.Lease.hand_over,
        "weakref.ref(line) → (lambda: line)",
    ),
    Mutant(
        "L54: a state that was lost on its way to the caller is found by nobody",
        test_ctrl_c.test_what_stood_in_a_function_is_found,
        stages.ended,
        "hand_over(after, StateDonatedError → end(StateDonatedError",
    ),
    Mutant(
        "L54: salvage returns a state whose tensors are partly updated",
        test_interrupted.test_a_step_that_raises_leaves_a_state_or_none,
        salvage.salvage,
        "newest.lease.check() → pass",
    ),
    Mutant(
        "L22: parts of a model that was given to a state can still be used",
        test_given.test_a_model_that_was_given_raises,
        given.seal_model,
        "for each in module.modules() if _has_tensors(each)"
        " → for each in [module] if _has_tensors(each)",
    ),
    Mutant(
        "L22: a part without tensors, which other models share, can be used no more",
        test_given.test_a_model_that_was_given_raises,
        given._has_tensors,
        "return any( → return True or any(",
    ),
    Mutant(
        "L22: a ready optimizer can be set and stepped after it was given away, to no effect",
        test_given.test_an_optimizer_that_was_given_raises,
        given.seal_optimizer,
        "_seal(source, GivenOptimizer, state) → pass",
    ),
    Mutant(
        "L22: a model that create refuses has been put into training mode",
        test_given.test_a_refused_model_is_as_it_was,
        skeleton.skeleton_of,
        """\
    if not bare.training:
→
    if not module.train().training:
""",
    ),
    Mutant(
        "L22: what was given away keeps the tensors that it had",
        test_given.test_what_was_given_keeps_nothing_alive,
        given._seal,
        """\
    held.clear()
→

""",
    ),
    Mutant(
        "L50: a thread seeds the generators that another one is drawing from",
        test_threads.test_a_second_thread_is_refused,
        draws.seeded.__enter__,
        "_turn.take() → Turn().take()",
    ),
    Mutant(
        "L50: a block draws from numpy with the generator of one that it is nested in",
        test_randomness.test_blocks_that_draw_within_one_another_are_apart,
        draws.seeded.__enter__,
        "set_bit_generator(self._spare)"
        " → set_bit_generator(globals().setdefault('_one', self._spare))",
    ),
    Mutant(
        "L50: of two normal numbers that numpy draws the second is lost after a block",
        test_randomness.test_blocks_that_draw_within_one_another_are_apart,
        draws.seeded.__exit__,
        "put_back_normal_of_numpy(self._normal) → pass",
    ),
    Mutant(
        "L50: what a thread draws inside of what it draws is refused",
        test_threads.test_one_thread_may_draw_within_its_draws,
        draws.Turn.take,
        "first.thread == held.thread → first is held",
    ),
    Mutant(
        "L50: after one Ctrl-C in a notebook no other thread may draw",
        test_threads.test_draws_that_are_broken_off_let_others_draw,
        draws.Held.__init__,
        "= weakref.ref(self) → = lambda: self",
    ),
    Mutant(
        "L22: a frozen module has the state's own parameters",
        test_frozen.test_what_is_frozen_stays,
        views.frozen,
        "apart(each) for name, each in all_of_it.items()"
        " → each for name, each in all_of_it.items()",
    ),
    Mutant(
        "L22: a frozen module has the state's own parameters, on ranks",
        test_frozen.test_what_is_frozen_on_ranks_stays,
        views.frozen,
        "apart(each) for name, each in all_of_it.items()"
        " → each for name, each in all_of_it.items()",
    ),
    Mutant(
        "L22: a frozen module has the state's own buffers",
        test_frozen.test_what_is_frozen_stays,
        views.frozen,
        "name: apart(each) for name, each in state.buffers.items() → **state.buffers",
    ),
    Mutant(
        "L22: what is asked to be frozen where it trains is what is evaluated",
        test_frozen.test_what_is_frozen_stays,
        views.frozen,
        'params_at(state, "af.frozen(state)", at) → eval_params(state)',
    ),
    Mutant(
        "a frozen module is a copy from the beginning",
        cases_of_frozen.test_nothing_is_copied_until_a_step,
        sharing.apart,
        "return torch._lazy_clone(plain)  # pyright: ignore[reportPrivateUsage]"
        " → return plain.clone()",
    ),
    Mutant(
        "a slice that is frozen takes the memory of the whole with it",
        cases_of_frozen.test_memory_of_others_is_copied_at_once,
        sharing.apart,
        'plain.device.type != "cpu" or not _fills_its_memory(plain) → plain.is_meta',
        args={"model": cases_of_frozen.of_slices},
    ),
    Mutant(
        "all modules that are lent have one table of hooks",
        test_views.test_bound_module_is_never_the_engines,
        skeleton.Skeleton.build,
        "memo[id(table)] = type(table)() → memo[id(table)] = table",
    ),
    Mutant(
        "a transform that reads the state before an update is told of an interrupt alone",
        test_state.test_a_transform_is_told_which_state_is_before,
        stages._after,
        "error.add_note(_BEFORE) → error.add_note(str(error))",
    ),
]
