# SPDX-License-Identifier: Apache-2.0
"""`assert_equivalent`: check that two setups give the same training, on any number of ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice, product
from typing import Any, TypeAlias

import torch
from torch import nn

import accelfn as af
from accelfn.errors import ArgumentError, LawError
from accelfn.plug import arguments, tree
from accelfn.testing.comparing import Comparison, format_differences
from accelfn.testing.simulate import simulate

Make: TypeAlias = Callable[
    [af.World, af.chain], tuple[af.TrainState, Callable[..., Any]]
]
"""A function of a world and a setup that returns the initial state and its step."""
Held: TypeAlias = Mapping[str, Any]
"""A rank's state fields and metrics, by name. Causes of a difference come before effects."""


def assert_equivalent(
    setup_a: Any,
    setup_b: Any,
    *,
    make: Make | None = None,
    optimizer: Any | None = None,
    updates: int = 4,
    sizes: Sequence[int] = (1, 2, 4),
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Assert that two setups give the same training, on any number of ranks.

    Each setup trains in simulated worlds of the given sizes. After every update, and after
    `af.finalize`, these values must be equal on each rank under both setups: the step and
    cursor, the mean of each metric over all ranks, `opt_state`, `params`, `buffers`, `slots` and
    `af.eval_params`. The comparison ignores metrics that only one setup reports, and slots of
    transforms that only one setup has.

    On several ranks, a setup without an engine and without `reduce` gets `af.shard_data()` and
    `af.wrap_ddp()`.

    The default problem is *dyadic*: all sums are exact in float64, in any order, so equivalent
    setups give equal bits. Its samples have different weights, some of them 0, and its last
    batch is short. It has no dropout and no batch statistics, because these depend on how a
    batch is split.

    Args:
        setup_a: a transform, a chain, or None for an empty setup.
        setup_b: the other setup.
        make: a function `(world, setup) -> (state, step)` that creates your own problem. The
            state must have data. To check that your loss is a mean, compare the setups
            `af.accumulate(num_micro_batches=3)` and None.
        optimizer: the optimizer of the default problem. Default: SGD with a learning rate of
            0.5 and a momentum of 0.5. Use powers of two as options, or pass a tolerance.
        updates: the number of updates. The default problem is exact up to 5 updates.
        sizes: the sizes of the worlds.
        rtol: the tolerance relative to the largest element of a tensor.
        atol: the absolute tolerance.

    Raises:
        LawError: the setups differ. The message names the world's size, the rank, the update and
            the values that differ.
        ArgumentError: both `make` and `optimizer` are given, or a count is not positive.

    Example:
        >>> import accelfn as af
        >>> assert_equivalent(af.accumulate(num_micro_batches=3), None)
        >>> assert_equivalent(af.clip_grad_norm(0.5), None)
        Traceback (most recent call last):
        ...
        accelfn.errors.LawError: The two setups train differently: in a world of size 1, ...
    """
    if make is not None and optimizer is not None:
        msg = (
            "assert_equivalent(make=, optimizer=): the state that make returns already has an"
            " optimizer. Leave out optimizer=."
        )
        raise ArgumentError(msg)
    call = "assert_equivalent"
    arguments.check_integer(call, "updates", updates, 1, "a number of updates")
    arguments.check_sizes(call, sizes)
    pair = af.chain(setup_a), af.chain(setup_b)
    is_own = make is not None
    make = partial(dyadic_problem, optimizer) if make is None else make
    comparison = Comparison(rtol=rtol, atol=atol)
    for size in sizes:
        runs = [_runs(make, setup, updates, size) for setup in pair]
        for moment, rank in product(range(updates + 1), range(size)):
            contents = [run[rank][moment] for run in runs]
            diffs = comparison.by_name(*_comparable(contents, pair))
            if diffs:
                when = f"after update {moment} (counted from 0)"
                when = when if moment < updates else "after af.finalize"
                where = f"in a world of size {size}, on rank {rank}, {when}"
                hint = _hint(contents, comparison) if moment == 0 and is_own else ""
                raise LawError(_format_error(pair, where, diffs) + hint)


def _runs(make: Make, setup: af.chain, updates: int, size: int) -> Sequence[list[Held]]:
    """Return each rank's state fields and metrics after each update and after finalize."""
    full_setup = _over_ranks(setup, size)

    def train(world: af.World) -> list[Held]:
        state, step = make(world, full_setup)
        if state.world is not world or state.setup != full_setup:
            msg = (
                "assert_equivalent(make=): the state that make(world, setup) returns has another"
                " world or setup. Write TrainState.create(..., setup=setup, world=world)."
            )
            raise ArgumentError(msg)
        contents: list[Held] = []
        for batch in islice(af.batches(state), updates):
            state, metrics = step(state, batch)
            contents.append(_state_contents(state, metrics))
        return [*contents, _state_contents(af.finalize(state), {})]

    return simulate(size, train)


def _over_ranks(setup: af.chain, size: int) -> af.chain:
    """Add `shard_data` and `wrap_ddp` to a setup that has neither an engine nor `reduce`."""
    if size == 1 or setup.owners["engine"] or setup.owners["reduce"]:
        return setup
    has_sharding = any(isinstance(transform, af.shard_data) for transform in setup)
    return af.chain(None if has_sharding else af.shard_data(), af.wrap_ddp(), setup)


def _state_contents(state: af.TrainState, metrics: Any) -> Held:
    if isinstance(metrics, af.Metrics):
        metrics = metrics.all_reduce_mean(state.world)
    names = "opt_state", "params", "buffers", "slots"
    contents = {
        "step": state.step,
        "num_skipped": state.num_skipped,
        "cursor": [state.cursor.epoch, state.cursor.samples],
        "metrics": metrics,
        **{name: getattr(state, name) for name in names},
        "eval_params": af.eval_params(state),
    }
    return tree.clone(contents)


def _comparable(runs: Sequence[Held], pair: Sequence[af.chain]) -> list[Held]:
    """Return the values of both runs without the metrics and slots of only one setup."""
    names = [{transform.name for transform in setup} for setup in pair]
    has_average = any(setup.owners["eval_params"] for setup in pair)
    reports = [run["metrics"] for run in runs]
    if all(isinstance(report, Mapping) for report in reports):
        shared = set.intersection(*map(set, reports))
        reports = [{n: r[n] for n in r if n in shared} for r in reports]
    contents: list[Held] = []
    for run, report in zip(runs, reports, strict=True):
        slots = {n: s for n, s in run["slots"].items() if n not in names[0] ^ names[1]}
        values = {**run, "metrics": report, "slots": slots}
        contents.append(
            {n: values[n] for n in run if has_average or n != "eval_params"}
        )
    return contents


def _format_error(
    pair: Sequence[af.chain], where: str, diffs: Mapping[str, list[str]]
) -> str:
    codes = [f"af.chain({', '.join(map(repr, setup))})" for setup in pair]
    return (
        f"The two setups train differently: {where}, these values differ: {', '.join(diffs)}"
        f" (first setup and second setup):{format_differences(diffs)}\nThe first setup is"
        f" {codes[0]}, the second setup is {codes[1]}."
    )


def _hint(runs: Sequence[Held], comparison: Comparison) -> str:
    """Return advice about the loss if it differs in the first update, else an empty text."""
    reports = [run["metrics"] for run in runs]
    if not all(isinstance(report, Mapping) and "loss" in report for report in reports):
        return ""
    if not any(comparison.differences("loss", *(report["loss"] for report in reports))):
        return ""
    return (
        "\nThe loss of the first update already differs. Check its divisor: accelfn treats a"
        ' plain loss as a mean over samples, but a loss with reduction="sum" is a sum, so it'
        " changes with the split of the samples. Return the mean, or af.Loss(total, weight)."
        " Dropout and batch statistics also change with the split."
    )


_TURN = ((0.0, -1.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0))
_WEIGHTS = (
    *(0, 0, 3, 1, 1, 1, 2, 0),
    *(0, 0, 0, 0, 1, 3, 2, 2),
    *(1, 1, 2, 0),
)
"""The weights of the samples; each line is a batch. The weights of a batch, and of its shares on
2 and 4 ranks, add up to a power of two or to 0, so a division by the sum is exact."""


class _Dyadic(nn.Module):
    """A frozen layer that rotates the input, and a trained layer. Weights are multiples of 0.5."""

    def __init__(self) -> None:
        super().__init__()
        turn = torch.tensor(_TURN, dtype=torch.float64)
        self.turn = nn.Linear(3, 3, bias=False)
        self.turn.weight = nn.Parameter(turn, requires_grad=False)
        self.head = nn.Linear(3, 2, dtype=torch.float64)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[1, -0.5, 0.5], [-1, 0.5, 1]]))
            self.head.bias.copy_(torch.tensor([0.5, -1]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.turn(inputs))


def _dyadic_loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> af.Loss:
    inputs, targets, weights = batch
    errors = model(inputs) - targets
    total = (errors.square().sum(1) * weights).sum() / 2
    return af.Loss(total, weights.sum(), error=(errors * weights[:, None]).sum())


def dyadic_problem(
    optimizer: Any | None, world: af.World, setup: af.chain
) -> tuple[af.TrainState, Callable[..., Any]]:
    """Return the state and step of the default problem: all sums are exact in any order."""
    rows = torch.arange(len(_WEIGHTS))
    inputs = torch.stack([rows % 3 - 1, rows // 3 % 3 - 1, rows * rows % 5 % 3 - 1], 1)
    targets = torch.stack([rows % 4 - 2, rows * 3 % 5 - 2], 1)
    weights = torch.tensor(_WEIGHTS)
    data = tuple(tensor.double() for tensor in (inputs, targets, weights))
    sgd = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
    state = af.TrainState.create(
        model=_Dyadic,
        optimizer=sgd if optimizer is None else optimizer,
        schedule=af.schedules.linear(2, end=0.5),
        data=af.Data(data, global_batch_size=8),
        setup=setup,
        world=world,
    )
    return state, af.make_step(_dyadic_loss)
