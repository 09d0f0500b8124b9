# SPDX-License-Identifier: Apache-2.0
"""Bugs by which something that should be a copy is the same, or the other way round."""

from accelfn.base import sharing
from accelfn.checkpoint import background, partial
from accelfn.collectives import packed, swapped, trees
from accelfn.data import sources
from accelfn.data.orders import numbers, weights
from accelfn.engine import buffers, engine, read_loss
from accelfn.loop import evaluate
from accelfn.state import beginning, metrics
from accelfn.state.grads import Grads
from accelfn.state.state import TrainState
from accelfn.step import value_and_grad
from accelfn.structure import skeleton
from accelfn.transforms import diloco, ema, local_sgd, plateau
from accelfn.weights import export
from tests.laws import test_sharing, test_written_again
from tests.mutants.mutant import Mutant

APART = test_sharing.test_what_is_taken_is_apart
LENT = test_sharing.test_what_is_lent_is_not_copied
WITHIN = test_sharing.test_no_two_fields_of_a_state_share_memory
KEPT = test_written_again.test_metrics_stay_what_they_were
NUMBERS = test_written_again.test_metrics_have_their_own_numbers
AROUND = test_written_again.test_memory_that_others_hold_is_copied
TOGETHER = test_written_again.test_gradients_that_are_the_same_are_given_away_together
GIVEN = test_written_again.test_what_was_given_may_change
AGAIN = test_written_again.test_what_a_call_was_given_is_the_callers_again

MUTANTS = [
    Mutant(
        "L34: what a loss reports of a parameter, or of a counter, moves with it",
        KEPT,
        read_loss._detached,
        "own(value.detach().reshape(())) → value.detach().reshape(())",
        args={"kind": "counted"},
    ),
    Mutant(
        "L34: a loss that is a view of a parameter is reported as it is after the update",
        KEPT,
        read_loss._checked,
        "scalar.is_leaf or scalar._is_view() → scalar.is_leaf",
        args={"kind": "a view of one"},
    ),
    Mutant(
        "L34: a loss that is a parameter is reported as it is after the update",
        KEPT,
        read_loss._checked,
        "scalar.is_leaf or scalar._is_view() → scalar._is_view()",
        args={"kind": "a parameter"},
    ),
    Mutant(
        "L34: who writes to a metric that was read writes to the metrics",
        KEPT,
        metrics.WeightedSum.mean,
        "own(self.amount) if → self.amount if",
        args={"kind": "computed"},
    ),
    Mutant(
        "L34: metrics are of the tensors that they were made of, which may change",
        NUMBERS,
        metrics._pair,
        "WeightedSum(own(amount), own(weight)) → WeightedSum(amount, weight)",
    ),
    Mutant(
        "L34: the weight of metrics is the caller's tensor",
        NUMBERS,
        metrics._pair,
        "own(weight) → weight",
    ),
    Mutant(
        "L34: a measure that counts in place is added up as it is in the end",
        test_written_again.test_a_measure_may_count_in_place,
        metrics._pair,
        "WeightedSum(own(amount), own(weight)) → WeightedSum(amount, weight)",
    ),
    Mutant(
        "L22: a table around which a model is built is trained with it",
        AROUND,
        sharing.apart_from_others,
        "t.detach().clone() if n in held else t.detach() → t.detach()",
    ),
    Mutant(
        "L22: only what three hold of a model's memory is copied",
        AROUND,
        sharing.apart_from_others,
        "> len(by_memory[_memory(t)]) → > len(by_memory[_memory(t)]) + 1",
    ),
    Mutant(
        "L22: constants that are buffers are shared by all models of a class",
        AROUND,
        beginning._copies,
        "each.detach().clone() → each.detach()",
    ),
    Mutant(
        "L22: memory is copied when a model is given away, though nobody else holds it",
        test_written_again.test_what_nobody_else_holds_is_not_copied,
        sharing._holders,
        "_cdata) - 1 → _cdata)",
    ),
    Mutant(
        "L22: gradients that are mapped to themselves may be applied twice",
        TOGETHER,
        Grads.map,
        "if have_memory_in_common(tensors.values(), self.tensors.values()): → if False:",
    ),
    Mutant(
        "L22: copies of gradients are given away with them",
        TOGETHER,
        Grads.map,
        "if have_memory_in_common(tensors.values(), self.tensors.values()): → if True:",
    ),
    Mutant(
        "L22: gradients that were taken out are written by the next pass, under DDP",
        APART,
        value_and_grad.value_and_grad,
        "engine_of(state).hand_out() → pass",
        args={"what": "value_and_grad"},
    ),
    Mutant(
        "L22: gradients that a transform took are written when it takes others",
        test_sharing.test_a_wrapper_may_keep_what_it_took,
        value_and_grad._innermost,
        "may_be_kept=is_wrapped → may_be_kept=False",
    ),
    Mutant(
        "L22: gradients that were added to others are written by the next pass",
        APART,
        engine.Engine.hand_out,
        "self._handed_out |= buckets.keys() → self._handed_out = frozenset(buckets)",
        args={"what": "value_and_grad, into"},
    ),
    Mutant(
        "L22: buffers that value_and_grad gave are written by the next pass",
        APART,
        buffers.Buffers.leave,
        "torch.empty_like(self._scratch[each.name]) → self._scratch[each.name]",
        args={"what": "value_and_grad"},
    ),
    Mutant(
        "L22: a copied state has the objects and lists of slots in common with the first",
        APART,
        TrainState.copy,
        "slots={name: entries.own_objects(slot) for name, slot in slots.items()}"
        " → slots=dict(self._slots)",
        args={"what": "a copy"},
    ),
    Mutant(
        "L22: a copied state has the first one's buffers",
        APART,
        TrainState.copy,
        "buffers=buffers, → buffers=self._buffers,",
        args={"what": "a copy"},
    ),
    Mutant(
        "L22: a copied state has the first one's momentum",
        APART,
        TrainState.copy,
        "opt_state=opt_state, → opt_state=dict(self._opt_state),",
        args={"what": "a step that leaves the state"},
    ),
    Mutant(
        "L22: what is evaluated of another average is the average itself, in full_params",
        APART,
        export.full_params,
        "_host(t).clone() for n, t in found.items() → _host(t) for n, t in found.items()",
        args={"what": "full_params, to evaluate"},
    ),
    Mutant(
        "L22: a partial load leaves what was not asked for to both states",
        APART,
        partial.taken,
        "fields_of(state.copy()) → fields_of(state)",
        args={"what": "load_part"},
    ),
    Mutant(
        "L49: of a lone tensor, what ranks send is the tensor itself",
        APART,
        packed.pack,
        "torch.cat([tensors[0].reshape(-1)]) → tensors[0].reshape(-1)",
        args={"what": "collectives"},
    ),
    Mutant(
        "L49: a mean by weight is taken in the values that were given",
        APART,
        trees.reduce,
        "each.clone() for each in → each for each in",
        args={"what": "collectives"},
    ),
    Mutant(
        "L49: a world of one gathers the rows that it was given",
        APART,
        packed.all_gather_rows,
        ".clone(memory_format=_CONTIGUOUS) → .contiguous()",
        args={"what": "collectives"},
    ),
    Mutant(
        "L49: a world of one swaps nothing",
        APART,
        swapped.all_to_all,
        "return [tree.clone(each) for each in values] → return list(values)",
        args={"what": "collectives"},
    ),
    Mutant(
        "L49: an empty tree is given back itself",
        APART,
        trees._gathered,
        "return tree.with_leaves(values, joined)"
        " → return tree.with_leaves(values, joined) if rows else values",
        args={"what": "collectives"},
    ),
    Mutant(
        "L22: an average begins in the memory of the parameters",
        WITHIN,
        ema.ema.init,
        "param.clone() → param.detach()",
    ),
    Mutant(
        "L22: evaluation writes the state's buffers",
        APART,
        evaluate._Lent.__init__,
        "tree.clone(dict(state.buffers)) → dict(state.buffers)",
        args={"what": "predict"},
    ),
    Mutant(
        "L22: a setup is put on copies",
        LENT,
        TrainState.with_setup,
        "attrs.evolve(self, **values.by_field, definition=definition)"
        " → attrs.evolve(self.copy(), slots=slots, definition=definition)",
        args={"what": "with_setup"},
    ),
    Mutant(
        "L22: other parameters are trained in copies",
        LENT,
        TrainState.with_trainable,
        "return attrs.evolve(self, definition=changed)"
        " → return attrs.evolve(self.copy(), definition=changed)",
        args={"what": "with_trainable"},
    ),
    Mutant(
        "L22: a lent module has copies",
        LENT,
        skeleton.Skeleton.build,
        "parameter_like(meta, params[name]) → parameter_like(meta, params[name].clone())",
        args={"what": "bind"},
    ),
    Mutant(
        "L22: values that have begun to be reduced are those of when they arrive",
        AGAIN,
        packed.pack,
        "torch.cat([tensors[0].reshape(-1)]) → tensors[0].reshape(-1)",
        args={"what": "sent"},
    ),
    Mutant(
        "L22: what is saved behind the back of training is what it has come to",
        AGAIN,
        background.Buffers.copies_of,
        "copies[name] = held.copy_(tensor.detach(), non_blocking=True)"
        " → copies[name] = tensor.detach()",
        args={"what": "saved behind its back"},
    ),
    Mutant(
        "L22: rates are the caller's list",
        GIVEN,
        plateau._frozen,
        "tuple(value) if isinstance(value, list) else value → value",
        args={"what": "rates of plateau"},
    ),
    Mutant(
        "L22: weights of samples are the caller's array",
        GIVEN,
        weights._as_weights,
        "weights.astype(np.float64) → weights.astype(np.float64, copy=False)",
        args={"what": "weights of samples"},
    ),
    Mutant(
        "L22: lengths of samples are the caller's array",
        GIVEN,
        numbers.as_counts,
        "counts.astype(np.int64) → counts.astype(np.int64, copy=False)",
        args={"what": "lengths of samples"},
    ),
    Mutant(
        "L22: costs of samples are the caller's array",
        GIVEN,
        numbers.as_counts,
        "counts.astype(np.int64) → counts.astype(np.int64, copy=False)",
        args={"what": "costs of samples"},
    ),
    Mutant(
        "L22: an anchor begins in the memory of the parameters",
        WITHIN,
        diloco.diloco.init,
        "tree.clone({name: state.params[name] for name in names})"
        " → {name: state.params[name] for name in names}",
    ),
    Mutant(
        "L22: ranks that are evaluated at their average train on from there",
        APART,
        local_sgd.local_sgd.eval_params,
        "tree.clone({n: p for n, p in params.items() if n in trained})"
        " → {n: p for n, p in params.items() if n in trained}",
        args={"what": "full_params, to evaluate"},
    ),
    Mutant(
        "L22: a batch of rows that follow one another is a part of the dataset",
        test_written_again.test_who_writes_to_a_batch_leaves_the_data,
        sources.Rows.batch,
        "column.index_select(0, where) for column in columns →"
        " column[int(where[0]) : int(where[-1]) + 1] if (where.diff() == 1).all()"
        " else column.index_select(0, where) for column in columns",
    ),
]
