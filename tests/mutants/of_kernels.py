# SPDX-License-Identifier: Apache-2.0
"""Bugs in calling a fused kernel on lists that were made before."""

from accelfn.engine.optimizer import fused_adam, live_optimizer
from tests.laws import test_kernels
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L19: Adam's own option decoupled_weight_decay is read past",
        test_kernels.test_fused_steps_are_torchs_own,
        fused_adam.FusedAdam.of.__func__,
        'adamw = group["decoupled_weight_decay"] → adamw = type(optimizer) is AdamW',
    ),
    Mutant(
        "L22: a fused optimizer goes on with the tensors of the state that was bound before",
        test_kernels.test_fused_steps_are_torchs_own,
        live_optimizer.LiveOptimizer.load,
        "self._kernel = None → pass",
    ),
    Mutant(
        "L19: every parameter group takes the first one's weight decay",
        test_kernels.test_fused_steps_are_torchs_own,
        fused_adam.FusedAdam.step,
        "_stepped(group, own → _stepped((self._groups[0][0], *group[1:]), own",
    ),
    Mutant(
        "L26: a parameter without a gradient is not left out",
        test_kernels.test_fused_steps_are_torchs_own,
        fused_adam.FusedAdam.step,
        "[p.grad for p in params]"
        " → [torch.zeros_like(p) if p.grad is None else p.grad for p in params]",
    ),
    Mutant(
        "L18: a step that a flag skips counts for what Adam divides by",
        test_kernels.test_what_a_flag_skips_counts_for_nothing,
        fused_adam._stepped,
        "counts.sub_(found_inf) → pass",
    ),
    Mutant(
        "L22: what is saved of a fused optimizer's counts stands still",
        test_kernels.test_fused_steps_are_torchs_own,
        fused_adam._joined,
        "counts.unbind() → counts.clone().unbind()",
    ),
]
