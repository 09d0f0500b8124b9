# SPDX-License-Identifier: Apache-2.0
"""Adam's fused kernel on lists that are made once.

Before torch's Adam calls its kernel it gathers gradients and state from each parameter,
at every step. For a small network that takes as long as the kernel. In the steady loop
these are the very tensors of the step before, so they are gathered once. Each parameter has
a count of its updates, a tensor; the kernel's caller adds 1 to each, which takes as long again.
Here they are views of one tensor, to which 1 is added once.
"""

from collections.abc import Iterable
from typing import Any, Self, TypeAlias, cast

import torch
from torch.optim import Adam, AdamW, Optimizer

from accelfn.base import lists

_set_grad_enabled = torch._C._set_grad_enabled  # pyright: ignore[reportPrivateUsage]
_MEANT = frozenset({"lr", "betas", "eps", "weight_decay", "maximize"})
"""Options of a group that are read at each step."""
_OTHERS = ("amsgrad", "capturable", "differentiable")
Group: TypeAlias = tuple[
    dict[str, Any], Any, tuple[list[torch.Tensor], ...], torch.Tensor
]


class FusedAdam:
    """The kernel calls of one optimizer, as long as its state's tensors stay."""

    def __init__(self, groups: list[Group]) -> None:
        """Take options, kernel, parameters with their state, and counts, of each group."""
        self._groups = groups

    @classmethod
    def of(cls, optimizer: Optimizer) -> Self | None:
        """Return the calls that an optimizer's step would make; None if it is another's."""
        if type(optimizer) not in (Adam, AdamW):
            return None
        found: list[Group] = []
        for group in optimizer.param_groups:
            params = cast("list[torch.Tensor]", group["params"])
            entries = [cast("Any", optimizer.state).get(param) for param in params]
            if not group["fused"] or any(group[name] for name in _OTHERS):
                return None
            if not all(entries) or len({(p.device, p.dtype) for p in params}) != 1:
                return None
            if len({_kind(entry["step"]) for entry in entries}) != 1:
                return None
            counts = _joined(entries)
            names = ("exp_avg", "exp_avg_sq", "step")
            state = tuple([entry[name] for entry in entries] for name in names)
            adamw = group["decoupled_weight_decay"]
            kernel = lists.fused_adamw_ if adamw else lists.fused_adam_
            found.append((group, kernel, (params, *state), counts))
        return cls(found)

    @staticmethod
    def reads(option: str) -> bool:
        """Whether an option may change from step to step."""
        return option in _MEANT

    def step(
        self, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> bool:
        """Update the parameters; return False, and do nothing, where some have no gradient."""
        grads = [[p.grad for p in params] for _, _, (params, *_), _ in self._groups]
        if [grad for each in grads for grad in each if grad is None]:
            return False
        # as a call in C, which takes a tenth of what a `no_grad` block does
        before = torch.is_grad_enabled()
        _set_grad_enabled(False)  # noqa: FBT003 - in C it has no name
        try:
            for group, own in zip(self._groups, grads, strict=True):
                _stepped(group, own, grad_scale, found_inf)
        finally:
            _set_grad_enabled(before)
        return True


def _stepped(
    group: Group,
    grads: list[torch.Tensor | None],
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    options, kernel, (params, exp_avgs, exp_avg_sqs, steps), counts = group
    counts.add_(1)
    beta1, beta2 = options["betas"]
    kernel(
        *(params, grads, exp_avgs, exp_avg_sqs, [], steps),
        amsgrad=False,
        lr=options["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=options["maximize"],
        grad_scale=grad_scale,
        found_inf=found_inf,
    )
    if found_inf is not None:  # it left all as it was
        counts.sub_(found_inf)


def _kind(count: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return count.shape, count.dtype, count.device


def _joined(entries: Iterable[dict[str, Any]]) -> torch.Tensor:
    """Return the parameters' counts as one tensor, of which each entry gets a view."""
    with torch.no_grad():
        counts = torch.stack([entry["step"] for entry in entries])
    for entry, own in zip(entries, counts.unbind(), strict=True):
        entry["step"] = own
    return counts
