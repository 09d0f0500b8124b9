# SPDX-License-Identifier: Apache-2.0
"""`compare_loops`: find the first quantity that differs between a training loop and its port."""

import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, TypeAlias, cast

import attrs
import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from accelfn import Batch, Grads, TrainState
from accelfn.errors import ArgumentError, LawError
from accelfn.plug import arguments, devices, tree, update
from accelfn.plug import optimizer as entries
from accelfn.testing.comparing import Comparison, format_differences

Quantities: TypeAlias = Mapping[str, Any]
"""Trees of tensors and numbers, by name, that a loop reports after an update."""
Loop: TypeAlias = Callable[[], Iterable[Quantities]]
"""A function that trains, and yields quantities before training and after each update."""

_SIDES = ("the old loop", "the new loop")
_CAUSES = (
    *("batch", "loss", None, "grads"),
    *("lr", "hyper", "opt_state", "params", "buffers"),
)
"""Names in the order in which a difference spreads within an update. None: all other names."""
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options of an optimizer that do not change its result."""
_LOOK_AT = {
    "batch": "the order and size of batches, shuffling, and a short last batch",
    "loss": (
        "the divisor of the loss over samples and micro-batches (accelfn treats a plain loss"
        ' as a mean; a loss with reduction="sum" is a sum), dropout and other random numbers,'
        " training or evaluation mode, and precision"
    ),
    "grads": "their divisor (samples, micro-batches, ranks), clipping, and zero_grad",
    "lr": "the schedule: its shape and length, and whether it steps once per update",
    "hyper": "the options that you pass to the optimizer",
    "opt_state": "the gradients: their divisor, clipping, and zero_grad",
    "params": "the gradients (their divisor, clipping, zero_grad), and weight decay",
    "buffers": "running statistics: which forward passes update them, and how often",
}
_BEGINNING = "the initial models: build both loops on copies of one model"


@attrs.frozen(kw_only=True)
class Agreement:
    """The result of `compare_loops` if the loops agree.

    Attributes:
        num_updates: the number of compared updates.
        quantities: the names of the compared quantities.
        is_exact: whether all quantities were exactly equal, not only within the tolerance.
    """

    num_updates: int
    quantities: tuple[str, ...]
    is_exact: bool

    def __str__(self) -> str:
        """Return the result as one line of text."""
        how = "exactly" if self.is_exact else "within the tolerance"
        return (
            f"{self.num_updates} updates agree {how}, in {', '.join(self.quantities)}"
        )


def compare_loops(
    old: Loop, new: Loop, *, steps: int, rtol: float = 1e-4, atol: float = 0.0
) -> Agreement:
    """Compare two training loops, update by update, and name the first quantity that differs.

    A loop is a function that trains and yields a dict of named quantities, once before the
    first update and once after every update. Use `quantities` to make this dict from a module
    and its optimizer, or from a state. `old` runs first, then `new`. Both loops start with the
    same state of the random generators of torch, NumPy and Python, which is restored afterwards.

    Within an update, causes are compared before their effects:
    `batch`, `loss`, other reported values, `grads`, `lr`, `hyper`, `opt_state`, `params`,
    `buffers`. Numbers and scalar tensors are compared by value.

    Args:
        old: the loop that you trust.
        new: the port of that loop.
        steps: the number of updates to compare.
        rtol: the tolerance relative to the largest element of a tensor.
        atol: the absolute tolerance.

    Returns:
        The number of updates, the names of the compared quantities, and whether all were exact.

    Raises:
        LawError: a quantity differs, only one loop reports a quantity, or one loop ends early.
        ArgumentError: both loops end before `steps` updates, or the first report of a loop
            has a loss.

    Cost: `steps + 1` copies of all reported values.

    Example:
        >>> def loop(lr):
        ...     model = torch.nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        ...     yield quantities(model)
        ...     while True:
        ...         loss = model(torch.ones(4, 1)).square().mean()
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         optimizer.step()
        ...         yield quantities(model, loss=loss)
        >>> print(compare_loops(lambda: loop(0.1), lambda: loop(0.1), steps=3))
        3 updates agree exactly, in loss, params
    """
    arguments.check_integer("compare_loops", "steps", steps, 1, "a number of updates")
    tolerance, equal = Comparison(rtol=rtol, atol=atol, sides=_SIDES), Comparison()
    with _running(old, steps) as reports:
        old_reports = [tree.clone(dict(report)) for report in reports]
    exact, count = True, 0
    with _running(new, steps) as reports:
        for one, two in zip(old_reports, reports, strict=False):
            _check(count, one, two, tolerance)
            exact = exact and not _differing(one, two, equal)
            count += 1
        _check_lengths(len(old_reports), count, next(iter(reports), None), steps)
    return Agreement(
        num_updates=steps, quantities=_sort_names(*old_reports), is_exact=exact
    )


def quantities(
    source: nn.Module | TrainState | None = None,
    optimizer: Optimizer | None = None,
    /,
    **reported: Any,
) -> dict[str, Any]:
    """Return a dict of a training loop's values after an update, for `compare_loops`.

    From a module, the dict has `params` and `buffers`. With the module's optimizer it also has
    `lr`, `hyper` (weight decay, momentum and so on) and `opt_state`. From a state, it has all of
    these. `lr` and `hyper` are the values for the next update, so yield after the scheduler's
    step. Your own values are copied unchanged, with two exceptions: `batch` may be an
    `af.Batch`, and `grads` may be an `af.Grads` or a module with `.grad`. Empty dicts are left
    out. Sharded tensors are gathered, so call `quantities` on all ranks.

    Args:
        source: a module (with or without DistributedDataParallel), or a state.
        optimizer: the optimizer of the module's parameters.
        reported: your own values by name, such as `loss=loss`, `batch=batch`, or `**metrics` of
            a step.

    Raises:
        ArgumentError: `source` is neither a module nor a state, or an optimizer is passed
            without a module.

    Cost: a copy of every tensor.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> list(quantities(model, optimizer, loss=0.5))
        ['loss', 'params', 'lr', 'hyper']
        >>> quantities(model, optimizer)["lr"]
        [0.1]
    """
    values = dict(reported)
    if isinstance(values.get("batch"), Batch):
        parts = values["batch"].micro_batches
        values["batch"] = parts[0] if len(parts) == 1 else list(parts)
    if isinstance(values.get("grads"), Grads):
        values["grads"] = dict(values["grads"].tensors)
    elif isinstance(values.get("grads"), nn.Module):
        named = _unwrap(values["grads"]).named_parameters()
        values["grads"] = {n: p.grad for n, p in named if p.grad is not None}
    if isinstance(source, TrainState):
        if optimizer is not None:
            msg = "quantities(state, optimizer): the state has an optimizer. Pass only the state."
            raise ArgumentError(msg)
        values |= _of_state(source)
    elif source is not None or optimizer is not None:
        values |= _of_module(source, optimizer)
    full = tree.tree_map(
        lambda leaf: leaf.detach().full_tensor() if tree.is_shard(leaf) else leaf,
        values,
    )
    return {n: tree.clone(v) for n, v in full.items() if not isinstance(v, dict) or v}


def _of_module(source: Any, optimizer: Optimizer | None) -> dict[str, Any]:
    model = _unwrap(source)
    if not isinstance(model, nn.Module):
        msg = (
            f"quantities({source!r}): expected a TrainState, or a torch.nn.Module and"
            " optionally its optimizer."
        )
        raise ArgumentError(msg)
    values: dict[str, Any] = {
        "params": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
    }
    if optimizer is not None:
        names = {id(param): name for name, param in model.named_parameters()}
        values |= _hyperparameters(optimizer, optimizer.param_groups)
        values["opt_state"] = entries.named_state(optimizer, names)
    return values


def _of_state(state: TrainState) -> dict[str, Any]:
    prototype = state.definition.optimizer
    groups: list[dict[str, Any]] = [
        {**group, **state.opt_state.get(entries.group_key(i), {})}
        for i, group in enumerate(prototype.param_groups)
    ]
    for (i, key), value in update.next_hyper(state, state.slots).items():
        groups[i][key] = value
    ours = {entries.group_key(i) for i in range(len(groups))}
    return {
        "params": dict(state.params),
        "buffers": dict(state.buffers),
        **_hyperparameters(prototype, groups),
        "opt_state": {k: v for k, v in state.opt_state.items() if k not in ours},
    }


def _hyperparameters(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return an optimizer's options by name, each as a list with one value per group."""
    names = [name for name in optimizer.defaults if name not in _HOW]
    lists = {name: [group[name] for group in groups] for name in names}
    return {"lr": lists.pop("lr", []), "hyper": lists}


def _unwrap(model: Any) -> Any:
    is_parallel = isinstance(model, (DistributedDataParallel, DataParallel))
    return cast("nn.Module", model.module) if is_parallel else model


@contextmanager
def _running(loop: Loop, steps: int) -> Generator[Iterator[Quantities]]:
    """Run a loop for `steps` updates, and restore the process's random generators afterwards."""
    generators = [torch.default_generator]
    for i in range(devices.count()):
        generators += devices.generators(torch.device(devices.kind(), i))
    with ExitStack() as stack:
        for generator in generators:
            stack.callback(generator.set_state, generator.get_state())
        stack.callback(random.setstate, random.getstate())
        # loops draw from NumPy's default generator
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        reports = iter(loop())
        if isinstance(reports, Generator):
            stack.callback(reports.close)
        yield islice(reports, steps + 1)


def _check(count: int, one: Quantities, two: Quantities, tolerance: Comparison) -> None:
    """Raise an error if two reports differ. Report 0 is the report before training."""
    if count == 0 and ("loss" in one or "loss" in two):
        msg = (
            "compare_loops: the first values that a loop yields are those before training, so"
            " they cannot have a loss. Before the first update, yield quantities(model,"
            " optimizer) or quantities(state)."
        )
        raise ArgumentError(msg)
    diffs = _differing(one, two, tolerance)
    if not diffs:
        return
    first, *rest = diffs
    agree = [name for name in _sort_names(one, two) if name not in diffs]
    when = f"After update {count - 1} (counted from 0)"
    when = when if count else "Before the first update"
    begins = not count and first not in ("lr", "hyper")
    look = _BEGINNING if begins else _LOOK_AT.get(first)
    named = f"{when}, {first} is the first to differ (old loop and new loop):"
    lines = [
        named + format_differences({first: diffs[first]}),
        f"Also different: {', '.join(rest)}." if rest else "",
        f"Not different: {', '.join(agree)}." if agree else "",
        f"Check {look}." if look else "",
    ]
    raise LawError("\n".join(line for line in lines if line))


def _check_lengths(old: int, count: int, next_of_new: Any, steps: int) -> None:
    if count == steps + 1:
        return
    updates = max(count - 1, 0)
    if count == old and next_of_new is None:
        msg = (
            f"compare_loops(steps={steps}): both loops ended after {updates} updates."
            " Pass fewer steps, or let the loops run longer."
        )
        raise ArgumentError(msg)
    short, other = ("new", "old") if count < old else ("old", "new")
    msg = (
        f"The {short} loop ended after {updates} updates, but the {other} loop continues. Until"
        " then they agree. Check the number of epochs, and whether both loops use a short last"
        " batch."
    )
    raise LawError(msg)


def _differing(
    one: Quantities, two: Quantities, comparison: Comparison
) -> dict[str, list[str]]:
    """Return the differences of two reports by quantity, with causes before effects."""
    diffs = comparison.by_name(one, two)
    return {name: diffs[name] for name in _sort_names(diffs)}


def _sort_names(*reports: Quantities) -> tuple[str, ...]:
    """Return the names of all quantities, with causes before effects."""
    names = dict.fromkeys(name for report in reports for name in report)
    return tuple(
        sorted(names, key=lambda n: _CAUSES.index(n if n in _CAUSES else None))
    )
