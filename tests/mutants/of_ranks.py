# SPDX-License-Identifier: Apache-2.0
"""Bugs in how ranks and micro-batches are put together."""

from accelfn import collectives
from accelfn.collectives import averages
from accelfn.definition import transform
from accelfn.engine import ddp, engine, read_loss
from accelfn.engine.optimizer import live_optimizer
from accelfn.loop import evaluate
from accelfn.state import grads, mean
from accelfn.state.grads import never_zero
from accelfn.step import stages, sync_grads
from accelfn.step.value_and_grad import _check_into
from accelfn.testing.simulation import standings
from accelfn.transforms import accumulate, local_sgd
from accelfn.transforms import ddp as wrap_ddp
from tests.laws import (
    test_collectives,
    test_ddp,
    test_equivalence,
    test_faults,
    test_interleaving,
    test_local_sgd,
)
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L1: gradients of totals are applied without a division by their weight",
        test_equivalence.test_ranks_and_micro_batches_are_exactly_neutral,
        grads.Grads.divided,
        "divide_(self.as_taken.values(), self.taken.scale) → pass",
    ),
    Mutant(
        "L1: gradients averaged over N ranks are divided by N once more",
        test_equivalence.test_three_ranks,
        engine.Engine.value_and_grad,
        "divisor=weight if averaged is None else averaged"
        " → divisor=weight if averaged is None else averaged * self._num_losses",
    ),
    Mutant(
        "L3: each rank's and micro-batch's mean counts alike, however many samples it has",
        test_equivalence.test_ranks_and_micro_batches_are_neutral_up_to_rounding,
        read_loss.read_loss,
        "weight = samples.count() → weight = min(1, samples.count())",
    ),
    Mutant(
        "L3: a loss with a weight of its own is weighted by its number of samples",
        test_equivalence.test_a_step_is_the_loop_by_hand,
        read_loss.read_loss,
        "weight = _detached(returned.weight) → weight = samples.count()",
    ),
    Mutant(
        "L7: the stand-in of an empty share is seen as a sample",
        test_equivalence.test_ranks_and_micro_batches_are_neutral_up_to_rounding,
        read_loss.Samples.count,
        "return self.known → return max(1, self.known)",
    ),
    Mutant(
        "L4: gradients of earlier micro-batches are dropped",
        test_equivalence.test_micro_batches_alone,
        accumulate.accumulate.value_and_grad,
        "metrics, grads = inner(state, last, *extras, into=into, sync=sync)"
        " → metrics, grads = inner(state, last, *extras, sync=sync)",
    ),
    Mutant(
        "L34: a step reports what its last micro-batch saw",
        test_equivalence.test_micro_batches_alone,
        accumulate.accumulate.value_and_grad,
        "return total + metrics, grads → return metrics, grads",
    ),
    Mutant(
        "L5: into= adds to a mean as if it were a total",
        test_equivalence.test_adding_what_is_a_mean_already,
        engine.Engine._take_in,
        "into.multiplied() → pass",
    ),
    Mutant(
        "L5: gradients are summed over ranks, their weight is not",
        test_equivalence.test_accumulating_by_hand,
        sync_grads.sync_grads,
        "divisor=counts[0] → divisor=taken.divisor",
    ),
    Mutant(
        "L6: DistributedDataParallel reduces after each micro-batch, to the same numbers",
        test_ddp.test_one_reduction_an_update,
        ddp.DDPRunner.forward,
        "with ddp.no_sync(): → if True:",
    ),
    Mutant(
        "L22: what value_and_grad returned is overwritten by the next backward pass",
        test_ddp.test_gradients_are_the_holders_own,
        engine.Engine._move_out,
        "part.data = part.clone() → pass",
    ),
    Mutant(
        "L22: the weight of gradients is overwritten by the next backward pass",
        test_ddp.test_gradients_are_the_holders_own,
        ddp.DDPRunner.backward,
        "averaged if averaged._base is None else averaged.clone() → averaged",
    ),
    Mutant(
        "L2: what is added to reduced gradients is of one rank, and replicas drift",
        test_equivalence.test_what_would_drift_is_refused,
        _check_into,
        "if into.reduced and → if False and",
    ),
    Mutant(
        "L2: a setup in which nothing reduces gradients trains ranks apart",
        test_equivalence.test_what_would_drift_is_refused,
        stages.reduced,
        """\
if not owners:
→
if not owners: return update
    if not owners:
""",
    ),
    Mutant(
        "L2: ranks that hold other numbers under the same names train together",
        test_ddp.test_ranks_that_differ_in_a_bit_are_refused,
        collectives.check_replicas,
        "check_values(tensors, world, label=label, advice=_CREATED, sums=sums) → pass",
    ),
    Mutant(
        "L2: ranks whose models have other shapes are said to differ in values",
        test_ddp.test_ranks_that_differ_in_shape_are_refused,
        collectives.check_replicas,
        '_refuse_difference(tables, "structure", _CREATED) → pass',
    ),
    Mutant(
        "L24: gradients that are no views into DistributedDataParallel's buckets are overlooked",
        test_ddp.test_buckets_change_nothing,
        engine.Engine._found,
        """\
self._home.take_gradients()
→
{n: g for n, g in self._home.take_gradients().items()
 if g._base is not None or not reduced}
""",
    ),
    Mutant(
        "L24: the size of buckets does not reach DistributedDataParallel",
        test_ddp.test_options_reach_ddp,
        wrap_ddp.wrap_ddp.engine,
        """\
return build(
→
options['bucket_cap_mb'] = None
    return build(
""",
        args={"option": "bucket_cap_mb", "value": 1.5},
    ),
    Mutant(
        "L1: an optimizer that divides gradients itself is not told by what",
        test_ddp.test_fused_optimizers_divide_alike,
        live_optimizer.LiveOptimizer.update,
        "scale = divisor if isinstance(divisor, torch.Tensor) else None"
        " → scale = torch.ones(()) if isinstance(divisor, torch.Tensor) else None",
        args={"optimizer": "SGD"},
    ),
    Mutant(
        "L3: to divide by no 0, weights below 1 are taken for 1",
        test_equivalence.test_the_unit_of_weights_does_not_matter,
        never_zero,
        "torch.where(divisor == 0, 1, divisor) → divisor.clamp(min=1)",
    ),
    Mutant(
        "L49: ranks reduce with another operation than was meant",
        test_collectives.test_all_reduce_is_the_sum,
        collectives.sum_,
        "dist.all_reduce(flat, group"
        " → dist.all_reduce(flat, op=dist.ReduceOp.MAX, group",
    ),
    Mutant(
        "L25: tensors that are not contiguous keep what they held before the reduction",
        test_collectives.test_all_reduce_is_the_sum,
        collectives.unpack_,
        "[tensor.detach() for tensor in tensors]"
        " → [tensor.detach().contiguous() for tensor in tensors]",
    ),
    Mutant(
        "L49: all ranks get the values of the last one, not of rank 0",
        test_collectives.test_broadcast_gives_the_values_of_rank_0,
        collectives.broadcast_,
        "group_src=root → group_src=world.size - 1",
    ),
    Mutant(
        "L49: in a world of one, all_gather returns the very tensor that it was given",
        test_collectives.test_all_gather_gives_each_rank_s_tensor,
        collectives.all_gather,
        "return [tensor.clone()] → return [tensor]",
    ),
    Mutant(
        "L48: rows that only filled up a short share are among the results",
        test_collectives.test_ragged_rows_are_put_together,
        collectives.all_gather_rows,
        "[part.view_as(like)[:count] for → [part.view_as(like) for",
    ),
    Mutant(
        "L48: characters that ASCII has not arrive as question marks",
        test_collectives.test_texts_arrive_whole,
        collectives.gather_text,
        "text.encode() → text.encode('ascii', 'replace')",
    ),
    Mutant(
        "L34: metrics of ranks are averaged without their weights",
        test_collectives.test_mean_is_that_of_the_union,
        mean.mean,
        "(each.total, each.weight) → (metrics[name], 1)",
    ),
    Mutant(
        "L49: no rank waits",
        test_collectives.test_a_barrier_waits_for_all_and_changes_nothing,
        collectives.barrier,
        "all_reduce_( → (lambda *given, label: None)(",
    ),
    Mutant(
        "L55: one rank skips the reduction in which all others wait for it",
        test_collectives.test_mean_is_that_of_the_union,
        collectives.sum_,
        "if world.size > 1: → if world.rank > 0:",
    ),
    Mutant(
        "L36: the sample that an empty share evaluates is in the mean",
        test_equivalence.test_evaluation_sees_each_sample_once,
        evaluate.evaluate,
        "_measured(returned, batch.weights[0] or 0, fn)"
        " → _measured(returned, max(1, batch.weights[0]), fn)",
    ),
    Mutant(
        "L36: each rank reports the mean of what it saw itself",
        test_equivalence.test_evaluation_sees_each_sample_once,
        evaluate.evaluate,
        "return mean(total, state.world)"
        " → return {name: float(total[name]) for name in total}",
    ),
    Mutant(
        "L8: ranks' parameters count alike, however few samples a rank has seen",
        test_local_sgd.test_every_update_is_ddp_for_sgd,
        averages._average_bucket_,
        "flat.mul_(seen) → flat.mul_(1)",
    ),
    Mutant(
        "L8: ranks do not train apart, so that it is DistributedDataParallel for Adam too",
        test_local_sgd.test_for_adam_it_differs_from_ddp,
        stages.reduced,
        """\
return update
    with span
→
from accelfn.collectives import average_
        mine = list(grads.tensors.values())
        average_(mine, grads.weight, definition.world, label="mutant")
        return update
    with span
""",
    ),
    Mutant(
        "L9: in a world of one, parameters are multiplied by a weight and divided by it",
        test_local_sgd.test_alone_it_is_plain_training,
        averages.average_,
        "if world.size == 1: → if False:",
    ),
    Mutant(
        "L10: the weight of a rank is that of its last update",
        test_local_sgd.test_a_last_average_is_owed,
        local_sgd.local_sgd.after_update,
        'slot["weight"] + update.weight → 0 + update.weight',
    ),
    Mutant(
        "L10: the period is one update longer than was asked for",
        test_local_sgd.test_it_communicates_when_it_says,
        local_sgd.local_sgd.after_update,
        ">= self.sync_every → > self.sync_every",
    ),
    Mutant(
        "L10: eval_params averages the state's own parameters in place",
        test_local_sgd.test_a_last_average_is_owed,
        local_sgd.local_sgd.eval_params,
        "tree.clone({ → dict({",
    ),
    Mutant(
        "L10: local_sgd averages nothing that is evaluated just after an average",
        test_local_sgd.test_what_ema_keeps_is_evaluated_alike,
        local_sgd.local_sgd.eval_params,
        'agree = state.step == slot["since"] and all('
        ' → agree = state.step == slot["since"] or not (',
    ),
    Mutant(
        "L10: behind local_sgd each rank evaluates the average that it keeps itself",
        test_local_sgd.test_what_ema_keeps_is_evaluated_alike,
        transform.chain.__init__,
        '(("eval_params", "apart"), ("module", "recomputes"))'
        ' → (("module", "recomputes"),)',
    ),
    Mutant(
        "L10: what another rank does not hold is averaged, too",
        test_local_sgd.test_momentum_is_averaged_by_name,
        local_sgd._held_by_all,
        "if same → if entry",
    ),
    Mutant(
        "L23: a draw depends on how often any rank of the process has drawn",
        test_interleaving.test_any_order_of_ranks_gives_the_same,
        engine.Engine.value_and_grad,
        "tried, num_before)"
        " → next(self._key.__func__.__dict__.setdefault('n', iter(range(10**9)))), 0)",
    ),
    Mutant(
        "L54: a state whose update was cut off can be used as if it were whole",
        test_faults.test_no_rank_holds_half_a_step,
        stages.begin_donation,
        "state.lease.end(StateDonatedError, _INTERRUPTED, update=update) → pass",
    ),
    Mutant(
        "L54: the next step adds to what a step that raised had found",
        test_faults.test_a_step_that_raised_can_be_tried_again,
        engine.Engine._abandon,
        "self.discard() → self._live, self._live_buffers = None, {}",
    ),
    Mutant(
        "L54: when a reduction fails, a rank goes on with its own share",
        test_faults.test_no_rank_holds_half_a_step,
        collectives.sum_,
        "dist.all_reduce("
        " → with __import__('contextlib').suppress(Exception): dist.all_reduce(",
    ),
    Mutant(
        "L55: of the ranks that wait, the first alone is in the table",
        test_faults.test_a_failure_ends_all_and_names_the_culprit,
        standings.Standings.__str__,
        "range(len(cells)) → range(1)",
    ),
]
