# SPDX-License-Identifier: Apache-2.0
"""Bugs in what a step does with a state on its way to the next."""

from accelfn import collectives
from accelfn.base import contexts, draws
from accelfn.definition import facts, slots
from accelfn.definition.transform import (
    _apply,
    _check_chain,
    _flatten,
    _own,
    _repr,
    chain,
)
from accelfn.engine import buffers, engine, home, strangers
from accelfn.loop import batches
from accelfn.state import beginning, grads, hyper, state, update, views
from accelfn.step import make_step, stages, sync_grads
from accelfn.structure import skeleton
from accelfn.transforms import accumulate, clip, ema, precision
from tests.catalog import CATALOG
from tests.laws import (
    test_composition,
    test_dividing,
    test_equivalence,
    test_faults,
    test_leaks,
    test_parameters,
    test_purity,
    test_randomness,
    test_updates,
)
from tests.mutants.mutant import Mutant

ENTRIES = {entry.name: entry for entry in CATALOG}

MUTANTS = [
    Mutant(
        "L16: gradients are clipped while they are totals, and divided afterwards",
        test_equivalence.test_ranks_and_micro_batches_are_neutral_up_to_rounding,
        stages.transformed,
        """\
    update = update.with_grads(update.grads.divided())
    grads, update = through("grads", update.grads, update, Grads)
    return update.with_grads(grads)
→
    grads, update = through("grads", update.grads, update, Grads)
    return update.with_grads(grads.divided())
""",
    ),
    Mutant(
        "L14: the norm that is clipped by is that of the first parameter's gradient",
        test_updates.test_the_norm_is_of_the_whole_gradient,
        clip._norm_here,
        "get_total_norm(tensors, → get_total_norm(tensors[:1],",
    ),
    Mutant(
        "L14: of many gradients the norm leaves out those behind the first few",
        test_updates.test_the_norm_is_torchs,
        clip._norm_of_many,
        "range(0, len(tensors), _FEW) → range(0, len(tensors[:_FEW]), _FEW)",
    ),
    Mutant(
        "L15: norm_type is ignored",
        test_updates.test_clipping_by_norm,
        clip.clip_grad_norm._clip_,
        "_total_norm(tensors, self.norm_type) → _total_norm(tensors, 2.0)",
    ),
    Mutant(
        "L15: gradients within the bound are scaled up to it",
        test_updates.test_clipping_by_norm,
        clip.clip_grad_norm._clip_,
        "(norm > self.max_norm) & norm.isfinite() → (norm > 0) & norm.isfinite()",
    ),
    Mutant(
        "L15: gradients whose norm is not finite are scaled by it",
        test_updates.test_clipping_leaves_what_is_not_finite,
        clip.clip_grad_norm._clip_,
        "(norm > self.max_norm) & norm.isfinite() → ~(norm <= self.max_norm)",
    ),
    Mutant(
        "L15: per_group bounds the norm over all groups",
        test_updates.test_clipping_by_group,
        clip._by_group,
        'found[_label(i, group)] = present → found.setdefault("0", []).extend(present)',
    ),
    Mutant(
        "L15: of two parameter groups that are called alike one is not clipped",
        test_updates.test_groups_that_would_be_one_are_refused,
        clip.clip_grad_norm.init,
        "if found.setdefault(label, i) != i: → if False:",
    ),
    Mutant(
        "L15: elements below the lower bound stay as they are",
        test_updates.test_clipping_by_value,
        clip.clip_grad_value.grads,
        "-self.max_value, → -float('inf'),",
    ),
    Mutant(
        "L19: a failed step, and one on a copy, move the learning rate",
        test_updates.test_the_schedule_follows_updates,
        hyper._planned,
        "rates(state.step)"
        " → rates(next(state.definition.cache.keys.setdefault('calls', iter(range(99)))))",
    ),
    Mutant(
        "L19: an update takes the rate of the one after it",
        test_updates.test_the_schedule_follows_updates,
        hyper._planned,
        "rates(state.step) → rates(state.step + 1)",
    ),
    Mutant(
        "L3: the weight of an update is rounded to 16 bits where parameters are",
        test_dividing.test_the_weight_is_not_rounded,
        grads.divide_,
        "tensor.dtype if tensor.dtype.itemsize >= 4 else torch.float32 → tensor.dtype",
    ),
    Mutant(
        "L17: a fused optimizer divides by the weight, and not by the scale of the loss",
        test_dividing.test_the_weight_is_not_rounded,
        engine.Engine.prepare,
        "is_scaled or not → not",
    ),
    Mutant(
        "L2: sync_grads gives zeros to parameters that took part on no rank",
        test_dividing.test_sync_grads_gives_what_ddp_gives,
        sync_grads.sync_grads,
        "if some → if some or True",
    ),
    Mutant(
        "L20: the average moves as often as gradients were taken, not once an update",
        test_updates.test_ema_closed_form,
        stages._after,
        """\
            after = through_state("after_update", after, update)
→
            for _ in range(update.grads.taken.num_micro_batches):
                after = through_state("after_update", after, update)
""",
    ),
    Mutant(
        "L20: the past and the present have each other's weight",
        test_updates.test_ema_closed_form,
        ema.ema.after_update,
        "1 - self.decay → self.decay",
    ),
    Mutant(
        "L20: past and present are weighted apart, so what never moves is rounded away",
        test_updates.test_ema_closed_form,
        ema.ema.after_update,
        """\
lists.lerp_([slot[name] for name in moving], params, 1 - self.decay)
→
averages = [slot[name] for name in moving]
    lists.mul_(averages, self.decay)
    lists.add_(averages, params, alpha=1 - self.decay)
""",
    ),
    Mutant(
        "L22: donate=False steps on the given state's own parameters",
        test_purity.test_the_same_step_twice,
        state.TrainState.copy,
        "params=params, → params=self._params,",
    ),
    Mutant(
        "L22: donate=False gives the state away all the same",
        test_purity.test_the_same_step_twice,
        make_step.make_step,
        "state = state.copy() → pass",
    ),
    Mutant(
        "L22: a step on a copy moves the moments of the state that it was made from",
        test_purity.test_the_same_step_twice_on_ranks,
        state.TrainState.copy,
        "opt_state=opt_state, → opt_state=self._opt_state,",
    ),
    Mutant(
        "L22: the slots of a new setup are added to the state that it is applied to",
        test_purity.test_building_and_applying_is_pure,
        state.TrainState.with_setup,
        "slots = entries.carried_over(self._slots, old, new) → slots = self._slots",
    ),
    Mutant(
        "L22: a step that is called under no_grad takes no gradient",
        test_purity.test_the_process_is_as_before,
        contexts.own_modes,
        "stack.enter_context(torch.enable_grad()) → pass",
    ),
    Mutant(
        "L22: batches that are read in the caller's inference mode are made in it",
        test_purity.test_the_process_is_as_before,
        batches.Batches.__iter__,
        "with own_modes(device), span → with span",
    ),
    Mutant(
        "L22: inference mode is taken for what batches are read in",
        test_purity.test_the_process_is_as_before,
        contexts.is_plain,
        """\
        _with_gradients()
        and not _for_inference()
→
        True
""",
    ),
    Mutant(
        "L22: a copy's slots are the very tensors of the state it was made from",
        test_purity.test_forks_do_not_meet,
        state.TrainState.copy,
        "in slots.items() → in self._slots.items()",
    ),
    Mutant(
        "L22: an engine keeps its optimizer's state when it turns to another state",
        test_purity.test_forks_do_not_meet,
        engine.Engine.bind,
        "self._optimizer.load(opt_state)"
        " → self._optimizer._state or self._optimizer.load(opt_state)",
    ),
    Mutant(
        "L22: buffers are written when a loss is computed, not when an update is applied",
        test_purity.test_value_and_grad_changes_nothing,
        buffers.Buffers.end,
        """\
for each in self._found:
→
self.commit(self._scratch)
    for each in self._found:
""",
    ),
    Mutant(
        "L54: the pass after one that raised begins with the buffers that it had written",
        test_faults.test_a_step_that_raised_can_be_tried_again,
        buffers.Buffers.begin,
        "lists.copy_( → (lambda *given: None)(",
    ),
    Mutant(
        "L22: the caller's generator is left where the stream left it",
        test_randomness.test_a_stream_leaves_the_generator_as_it_was,
        draws.seeded.__exit__,
        "_default.set_state(self._saved) → pass",
    ),
    Mutant(
        "L22: a stream does not seed, so a step depends on what was drawn before it",
        test_purity.test_the_same_step_twice,
        draws.seeded.begin,
        "_default.manual_seed(seed) → pass",
    ),
    Mutant(
        "L21: a step runs under the autocast of whoever calls it",
        test_purity.test_the_caller_s_autocast_changes_nothing,
        contexts.own_modes,
        "autocast = _any_autocast() → autocast = False",
        args={"setup": None},
    ),
    Mutant(
        "L21: the setup's autocast changes nothing",
        test_purity.test_autocast_lowers_no_dtype,
        precision.autocast.loss,
        "_casting(kind, dtype) → torch.autocast(kind, dtype=dtype, enabled=False)",
    ),
    Mutant(
        "L21: gradients come back from a transform in another dtype than the parameters'",
        test_purity.test_parameters_keep_their_dtype,
        clip.clip_grad_norm.grads,
        """\
return grads.with_metrics(grad_norm=self._clip_(tensors)), slot
→
norm = self._clip_(tensors)
        return grads.with_metrics(grad_norm=norm).map(torch.Tensor.float), slot
""",
    ),
    Mutant(
        "L26: parameters that take no part in a loss decay all the same",
        test_purity.test_frozen_and_unused_parameters_stay,
        engine.Engine.update,
        """\
opt_state = self._optimizer
→
for param in self._home.trained.values():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
    opt_state = self._optimizer
""",
        args={"kind": "unused"},
    ),
    Mutant(
        "L26: decay goes to every parameter, trained or not",
        test_purity.test_frozen_and_unused_parameters_stay,
        engine.Engine.update,
        """\
opt_state = self._optimizer
→
for param in self._home.params.values():
        param.data.mul_(0.5)
    opt_state = self._optimizer
""",
        args={"kind": "frozen"},
    ),
    Mutant(
        "L27: a tied weight's second place holds a copy, which no update reaches",
        test_parameters.test_tied_is_used_twice,
        skeleton.Skeleton.build,
        """\
return copy.deepcopy(self.module, memo)
→
built = copy.deepcopy(self.module, memo)
    for path in self.aliases:
        owner, _, name = path.rpartition(".")
        module = built.get_submodule(owner)
        module.__dict__[name] = module._parameters.pop(name).detach().clone()
    return built
""",
    ),
    Mutant(
        "L27: in a frozen copy of the model, a tied weight is two",
        test_parameters.test_tied_stays_tied,
        views.frozen,
        """\
return module.eval()
→
for path in state.definition.skeleton.aliases:
        owner, _, name = path.rpartition(".")
        tied = module.get_submodule(owner)._parameters
        tied[name] = nn.Parameter(tied[name].detach().clone())
    return module.eval()
""",
    ),
    Mutant(
        "L25: a transposed tensor is packed as it lies, and unpacked as it reads",
        test_parameters.test_layouts_change_nothing,
        collectives.pack,
        "return _flatten_dense_tensors(tensors)"
        " → return _flatten_dense_tensors([t if t.is_contiguous()"
        " else t.permute(*reversed(range(t.ndim))) for t in tensors])",
    ),
    Mutant(
        "L32: gradients go to the parameters in the order in which they were found",
        test_parameters.test_gradients_go_by_name,
        home.ReplicaHome.put_gradients,
        "grads.as_taken.get(name)"
        " → list(grads.as_taken.values())[list(self.trained).index(name)]",
    ),
    Mutant(
        "L32: a transform leaves out one leaf of the tree",
        test_parameters.test_names_and_order_are_only_names_and_order,
        clip.clip_grad_norm._clip_,
        "lists.mul_(tensors, scale) → lists.mul_(tensors[:-1], scale)",
    ),
    Mutant(
        "L50: dropout draws the same on every rank",
        test_randomness.test_ranks_steps_and_micro_batches_draw_apart,
        engine.Engine._key,
        '"loss", loss.rank) → "loss")',
    ),
    Mutant(
        "L50: dropout draws the same in every micro-batch",
        test_randomness.test_ranks_steps_and_micro_batches_draw_apart,
        engine.Engine.value_and_grad,
        "tried, num_before) → tried, 0)",
    ),
    Mutant(
        "L50: torch keeps 32 bits of a seed, and those of all keys are the same",
        test_randomness.test_different_keys_draw_differently,
        draws.key,
        'return int.from_bytes(digest.digest(), "little")'
        ' → return int.from_bytes(digest.digest(), "little") >> 32 << 32',
    ),
    Mutant(
        "L50: the streams of all steps have the same lower 32 bits",
        test_randomness.test_different_numbers_under_a_key_draw_differently,
        draws.fold,
        "parent = z ^ (z >> 31) → parent = (z ^ (z >> 31)) << 32 & _MASK",
    ),
    Mutant(
        'L50: the number 1 and the text "1" have one key',
        test_randomness.test_different_keys_draw_differently,
        draws.key,
        "{type(part).__name__}:{part}; → {part};",
    ),
    Mutant(
        "L50: step 1 of one stream is step 0 of the next",
        test_randomness.test_seeds_and_names_draw_apart,
        draws.key,
        "return int.from_bytes("
        " → return sum(p for p in parts if type(p) is int) or int.from_bytes(",
    ),
    Mutant(
        "L29: transforms of a nested chain are taken from the right",
        test_composition.test_associativity,
        _flatten,
        "yield from each.transforms → yield from each.transforms[::-1]",
    ),
    Mutant(
        "L30: transforms of one field run in the opposite order",
        test_composition.test_values_flow_left_to_right,
        update.through,
        "setup.owners[field] → setup.owners[field][::-1]",
    ),
    Mutant(
        "L30: what a transform does depends on whether another stands to its left",
        test_composition.test_transforms_about_different_fields_commute,
        chain.__init__,
        "tuple(t for t in flat if has_field(t, f))"
        " → tuple(t for t in flat if has_field(t, f) and (t is not flat[0] or not flat[1:]))",
    ),
    Mutant(
        "L28: accumulate(num_micro_batches=1) makes two",
        test_composition.test_neutral_arguments_change_nothing,
        accumulate.accumulate.data,
        "num_micro_batches=self.num_micro_batches"
        " → num_micro_batches=self.num_micro_batches + 1",
        args={"entry": ENTRIES["accumulate"], "optimizer": "sgd"},
    ),
    Mutant(
        "L28: clip_grad_norm takes norm_type, and does not look at it",
        test_composition.test_every_option_is_observable,
        clip.clip_grad_norm._clip_,
        "_total_norm(tensors, self.norm_type) → _total_norm(tensors, 2.0)",
        args={
            "one": ENTRIES["clip_grad_norm"].transform,
            "two": ENTRIES["clip_grad_norm"].other["norm_type"],
        },
    ),
    Mutant(
        "L28: what a transform prints is not the call that made it",
        test_composition.test_values,
        _repr,
        "and value == field.default → and value is not field",
        args={"value": ENTRIES["accumulate"].transform},
    ),
    Mutant(
        "L29: what a chain prints is the code of another one",
        test_composition.test_chain_prints_as_code,
        chain.__repr__,
        "for each in self.transforms) → for each in self.transforms[::-1])",
    ),
    Mutant(
        "L28: applying a transform replaces those that were applied before",
        test_composition.test_unit_and_application,
        _apply,
        "chain(state.setup, self) → chain(self)",
    ),
    Mutant(
        "L31: a second transform of a name takes over the slot of the first",
        test_composition.test_the_same_name_twice_is_refused,
        _check_chain,
        "if each.name in seen: → if False:",
        args={"value": clip.clip_grad_norm(0.5)},
    ),
    Mutant(
        "L30: a transform looks at those to its right, and not to its left",
        test_composition.test_pairs_without_meaning_are_refused,
        facts.check_together,
        "others = [other for other in transforms if other is not each]"
        " → others = list(transforms)[list(transforms).index(each) + 1 :]",
    ),
    Mutant(
        "L33: a transform that is taken out leaves its slot behind",
        test_composition.test_slots_are_conserved,
        slots.carried_over,
        "if name not in gone → if True",
        args={"value": ema.ema(0.5)},
    ),
    Mutant(
        "L33: adding a transform begins the slots of all others again",
        test_composition.test_slots_are_conserved,
        beginning.begin_slots,
        "if owner.name not in slots: → if True:",
        args={"value": ema.ema(0.25, name="other")},
    ),
    Mutant(
        "L50: numpy draws from the half of a key that torch draws from",
        test_randomness.test_default_generators_draw_apart,
        draws.seeded.begin,
        "seed >> 32 & 0xFFFFFFFF → seed & 0xFFFFFFFF",
    ),
    Mutant(
        "L50: Python's generator is taken to be where CPython keeps it",
        test_randomness.test_pythons_generator_is_found_in_memory_or_asked,
        draws._memory_of_python,
        "if (*words, position) == random.getstate()[1]: → if words:",
    ),
    Mutant(
        "L22: a step adds to the gradient of a leaf that the loss captures",
        test_leaks.test_a_step_adds_to_no_gradient_of_the_caller,
        strangers.Strangers.set_aside,
        "each.grad = None → pass",
    ),
    Mutant(
        "L22: the next state's tensors have the gradients that a user gave this one's",
        test_leaks.test_what_autograd_notes_of_a_state_ends_with_it,
        engine._reset_autograd,
        "each.requires_grad, each.grad = False, None → each.requires_grad = False",
    ),
    Mutant(
        "L22: a list in a transform's options is the caller's own",
        test_leaks.test_an_option_is_what_it_was_when_the_transform_was_made,
        _own,
        "return type(value)(map(_own, value)) → return value",
    ),
]
