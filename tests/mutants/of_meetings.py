# SPDX-License-Identifier: Apache-2.0
"""Bugs that show only where two features meet, each of which is right alone."""

from accelfn.checkpoint import elastic
from accelfn.engine import compression, ddp, engine
from accelfn.engine.optimizer import fused_adam, live_optimizer
from accelfn.state import hyper
from accelfn.step import counts, sync_grads, value_and_grad
from accelfn.transforms import clip, ema, local_sgd, plateau
from tests.laws import (
    test_dividing,
    test_random_optimizers,
    test_random_remainders,
    test_random_replicas,
    test_random_steps,
)
from tests.mutants.mutant import Mutant

OPTIMIZERS = test_random_optimizers.test_any_optimizer_does_as_torchs_own
REPLICAS = test_random_replicas.test_ranks_apart_are_loops_apart
STEPS = test_random_steps.test_any_step_is_the_loop_by_hand
REMAINDERS = test_random_remainders.test_nothing_that_is_left_out_is_lost

MUTANTS = [
    Mutant(
        "L3: beside parameters of other dtypes those in float64 are divided by a"
        " weight that crossed the ranks in float32",
        test_dividing.test_the_weight_is_not_rounded,
        ddp.DDPRunner.__init__,
        "bool(dtypes & {torch.float64, torch.complex128}) → dtypes == {torch.float64}",
    ),
    Mutant(
        "L24: Adam's own decoupled decay goes through the moments once its kernel"
        " is called",
        OPTIMIZERS,
        fused_adam.FusedAdam.of.__func__,
        "lists.fused_adamw_ if adamw → lists.fused_adamw_ if type(optimizer) is AdamW",
    ),
    Mutant(
        "L30: of two that set a rate, the one for all groups loses to an earlier"
        " one for one",
        OPTIMIZERS,
        hyper.laid_over,
        """\
planned[i, key] = value
→
if isinstance(where, str):
                planned.setdefault((i, key), value)
            else:
                planned[i, key] = value
""",
    ),
    Mutant(
        "L19: what a transform set in one update only stays for those after it",
        OPTIMIZERS,
        live_optimizer.LiveOptimizer._assign,
        "{**over, **hyper} → hyper",
    ),
    Mutant(
        "L19: once plateau has reduced the rates, schedules and others have no say",
        OPTIMIZERS,
        plateau.plateau.hyper,
        'hyper.get((i, "lr"), group["lr"]) → group["lr"]',
    ),
    Mutant(
        "L16: clipping brings every gradient to the bound",
        OPTIMIZERS,
        clip.clip_grad_norm._clip_,
        "norm > self.max_norm → norm > 0",
    ),
    Mutant(
        "L20: the moving average of a complex parameter stays where it began",
        OPTIMIZERS,
        ema.ema.after_update,
        "_averages(param) → param.is_floating_point()",
    ),
    Mutant(
        "L10: between averages, parameters that were frozen in mid-run are each"
        " rank's own",
        REPLICAS,
        local_sgd.local_sgd.eval_params,
        "skeleton.once_trained → skeleton.trainable",
    ),
    Mutant(
        "L10: after finalize in mid-run the period goes on as if there had been no"
        " average",
        REPLICAS,
        local_sgd.local_sgd.finalize,
        "return state, self._begun(state) →"
        ' return state, {**self._begun(state), "since": slot["since"]}',
    ),
    Mutant(
        "L10: skipped updates count in the period between averages",
        REPLICAS,
        local_sgd.local_sgd.after_update,
        "state.step - slot → state.num_tried - slot",
    ),
    Mutant(
        "L10: just after an average each rank evaluates its own moving average",
        REPLICAS,
        local_sgd.local_sgd.eval_params,
        "params[name] is param → True",
    ),
    Mutant(
        "L45: loaded on other ranks just after an average, what differs becomes zeros",
        REPLICAS,
        elastic.Source.mean,
        "1 / len(weights) → 0",
    ),
    Mutant(
        "L20: the moving average of a parameter that was frozen in mid-run moves no"
        " more",
        REPLICAS,
        ema.ema.after_update,
        "if _averages(param) → if name in state.definition.skeleton.trainable",
    ),
    Mutant(
        "L1: in an update of weight 0 under fp16, what was left out is divided by"
        " the scale",
        REMAINDERS,
        compression.LowRank.weigh,
        "weight / self._ranks.size, 1.0) * scale"
        " → weight / self._ranks.size * scale, 1.0)",
    ),
    Mutant(
        "L1: PowerSGD begins an update late, where updates are skipped or cut",
        REMAINDERS,
        compression.LowRank.reduce,
        'self._before["iter"] >= self._start → self._before["iter"] > self._start',
    ),
    Mutant(
        "L3: under local_sgd a mean that sync_grads reduces is summed as if it were"
        " a total",
        STEPS,
        sync_grads.sync_grads,
        "taken.scale if taken.lease.is_mean else 1 → 1",
    ),
    Mutant(
        "L3: where one of several counts is 0, losses are scaled by a whole that is"
        " too large",
        STEPS,
        counts.counted,
        "sum(totals.values()) → sum(told.values())",
    ),
    Mutant(
        "L4: an empty share's stand-in counts in what losses are divided by",
        STEPS,
        counts._of_part,
        "None if is_stand_in else _checked → _checked",
    ),
    Mutant(
        "L34: a batch that is taken again after a later one moves the place in the"
        " data back",
        STEPS,
        value_and_grad._cursor_after,
        "return max(before, after, key=lambda each: (each.epoch, each.samples))"
        " → return after",
    ),
    Mutant(
        "L34: of two places the one with more samples counts as later, whatever its"
        " epoch",
        STEPS,
        value_and_grad._cursor_after,
        "(each.epoch, each.samples) → each.samples",
    ),
    Mutant(
        "L3: batch statistics of gradients that are added to are not gone on from",
        STEPS,
        engine._buffers_of,
        "{} if into is None else into.buffers → {}",
    ),
    Mutant(
        "L3: gradients that are held while another batch is differentiated get its"
        " statistics",
        STEPS,
        engine.Engine._move_out,
        "self._buffers.leave() → pass",
    ),
    Mutant(
        "L3: gradients that are held while another batch is differentiated get its"
        " weight",
        STEPS,
        ddp.DDPRunner.backward,
        "averaged if averaged._base is None else averaged.clone() → averaged",
    ),
]
