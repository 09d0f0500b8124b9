# SPDX-License-Identifier: Apache-2.0
"""A step as text: the nested calls in which transforms have a say."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from accelfn.definition.facts import facts_of

Owners: TypeAlias = Mapping[str, tuple[Any, ...]]


def explanation(owners: Owners) -> str:
    """Return the nested calls of one step as text, of who has a say in which field."""
    engine, reduce = owners["engine"], owners["reduce"]
    if reduce:
        how = "not reduced" if reduce[0].reduce is None else "reduced"
        how = f"{how} over ranks: {reduce[0].name}"
    else:
        how = "averaged over ranks" if engine else "not reduced over ranks"
    wraps = _nested(
        owners,
        "value_and_grad",
        f"value_and_grad({_nested(owners, 'loss', 'loss_fn')})",
    )
    made = _piped(owners, "module", "module")
    lies = _nested(owners, "runner", engine[0].name if engine else "local")
    lies = lies if made == "module" else f"{lies} of {made}"
    scales = "".join(f" * {e.name}.loss_scale" for e in owners["loss_scale"])
    mean = f"grads / (weight{scales})" if scales else "grads / weight"
    noting = [e.name for e in owners["after_update"] if facts_of(e).get("sees_skips")]
    lines = [
        f"plan = {_piped(owners, 'data', 'plan')}  # who takes which samples",
        f"metrics, grads = {wraps}(state, batch)",
        f"# engine: {lies}; gradients {how}",
        f"grads = {_piped(owners, 'grads', mean)}",
        *(f"# if skipped, it goes on with after_update: {name}" for name in noting),
        f"hyper = {_piped(owners, 'hyper', 'schedule(state.step)')}",
        "state = optimizer(state, grads, hyper)",
        f"state = {_piped(owners, 'after_update', 'state')}",
    ]
    told = [line for line in lines if line != "state = state"]
    return "\n    ".join(["step(state, batch):", *told])


def _nested(owners: Owners, field: str, inner: str) -> str:
    """Return the wraps of a field, the leftmost outermost."""
    calls = [f"{each.name}.{field}(" for each in owners[field]]
    return "".join(calls) + inner + ")" * len(calls)


def _piped(owners: Owners, field: str, value: str) -> str:
    """Return the calls through which a value flows, the leftmost innermost."""
    for each in owners[field]:
        value = f"{each.name}.{field}({value})"
    return value
