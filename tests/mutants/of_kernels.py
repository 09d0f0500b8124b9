# SPDX-License-Identifier: Apache-2.0
"""Bugs in calling a fused kernel on lists that were made before."""

from accelfn.engine.optimizer import fused_adam, live_optimizer
from tests.laws import test_kernels
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="a decay by the class",
        says="Adam's own option decoupled_weight_decay is read past",
        law="L19",
        test=test_kernels.test_fused_steps_are_torchs_own,
        place=fused_adam.FusedAdam.of.__func__,
        old='adamw = group["decoupled_weight_decay"]',
        new="adamw = type(optimizer) is AdamW",
    ),
    Mutant(
        name="the lists of another state",
        says="a fused optimizer goes on with the tensors of the state that was bound before",
        law="L22",
        test=test_kernels.test_fused_steps_are_torchs_own,
        place=live_optimizer.LiveOptimizer.load,
        old="self._kernel = None",
        new="pass",
    ),
    Mutant(
        name="one group for all",
        says="every parameter group takes the first one's weight decay",
        law="L19",
        test=test_kernels.test_fused_steps_are_torchs_own,
        place=fused_adam.FusedAdam.step,
        old='group["weight_decay"]',
        new='self._groups[0][0]["weight_decay"]',
    ),
    Mutant(
        name="a gradient of the step before",
        says="a parameter without a gradient is not left out",
        law="L26",
        test=test_kernels.test_fused_steps_are_torchs_own,
        place=fused_adam.FusedAdam.step,
        old="[p.grad for p in params]",
        new="[torch.zeros_like(p) if p.grad is None else p.grad for p in params]",
    ),
    Mutant(
        name="counts of the step before",
        says="what is saved of a fused optimizer's counts stands still",
        law="L22",
        test=test_kernels.test_fused_steps_are_torchs_own,
        place=fused_adam._joined,
        old="counts.unbind()",
        new="counts.clone().unbind()",
    ),
]
