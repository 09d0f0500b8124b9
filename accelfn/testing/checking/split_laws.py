# SPDX-License-Identifier: Apache-2.0
"""Whether training depends on how an update is split: over ranks, micro-batches or rows."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn.definition.facts import facts_of
from accelfn.definition.fields import has_field
from accelfn.definition.transform import chain
from accelfn.errors import CompositionError
from accelfn.errors import Warning as AdviceWarning
from accelfn.state.mean import mean
from accelfn.state.state import TrainState
from accelfn.testing.checking.laws import Law
from accelfn.testing.checking.subject import OWN, History, Subject
from accelfn.testing.comparing.differences import Comparison
from accelfn.testing.simulate import simulate
from accelfn.transforms.accumulate import accumulate
from accelfn.transforms.fsdp import wrap_fsdp
from accelfn.world import World

_SPLITTING = frozenset({"data", "reduce", "engine", "layout"})
_RESULT = frozenset(
    {"loss", "loss_scale", "grads", "hyper", "after_update", "eval_params", "finalize"}
)
_DRAWING = ("loss", "value_and_grad", "module", "runner")
_NEAR = Comparison(rtol=1e-4, atol=1e-6)
_COARSE = Comparison(rtol=5e-2, atol=1e-3)
"""For what is computed in 16 bits or less, where each order of a sum rounds otherwise."""


_ADVICE = {
    "wrap_fsdp": " There tensors are DTensors: take a number of norm().full_tensor(), or say"
    ' that it does not go: refuses = {"layout": "..."}.',
    "micro-batches": " What needs a batch as a whole says so: refuses ="
    ' {"micro_batches": "..."}.',
}
"""What to do, by the way in which an update was split."""
_FAR = 0.4
"""How far, of the way, methods may go otherwise that send a part of a gradient later."""


Around: TypeAlias = Callable[..., chain]
"""Returns the whole setup around some transforms, of other parts where they are given."""


def split_law(members: Sequence[Any], around: Around) -> Law:
    """Return the law that a result does not depend on how an update is split.

    The reference is one rank that takes each update whole, without the transforms that only
    split it.
    """
    rough = "reduces_to_mean" in chain(*members).gives_up()
    lossy = rough or any("apart" in facts_of(each) for each in members)
    draws = any(has_field(each, field) for each in members for field in _DRAWING)
    whole = [each for each in members if lossy or not _only_splits(each)]

    def law(subject: Subject) -> str | None:
        if not subject.splits:
            return None
        with warnings.catch_warnings():
            # that all ranks take the same samples is meant
            warnings.simplefilter("ignore", AdviceWarning)
            wanted = _histories(subject, around(whole), 1)
            if isinstance(wanted, str):
                return f"on one rank, the run raised {wanted}"
            for how, setup in _ways(members, around, subject.size, lossy=lossy).items():
                broken = _compare(subject, setup, wanted[0], rough=rough)
                if broken and draws:  # other numbers for each rank and micro-batch
                    again = _histories(subject, around(whole), 1, name="another")
                    if isinstance(again, str) or _differ(wanted[0], again, _NEAR):
                        return None
                if broken:
                    advice = "".join(_ADVICE[each] for each in _ADVICE if each in how)
                    return (
                        f"a run on one rank, and the same run {how}, {broken}{advice}"
                    )
        return None

    return law


def _compare(
    subject: Subject, setup: chain, wanted: History, *, rough: bool
) -> str | None:
    """Return how a run in a setup differs from what is wanted, or failed."""
    found = _histories(subject, setup, subject.size)
    if isinstance(found, str):
        return f"are not alike: the second raised {found}"
    if rough:
        off = max(_distance(wanted, history) for history in found)
        said = f"move the parameters by {off:.2g} of the way otherwise"
        return said if off > _FAR else None
    broken = _differ(wanted, found, _NEAR)
    if broken and _is_coarse(subject, setup):
        # whether scaled losses overflow depends on how large the sums of a part are
        scales = any(has_field(each, "loss_scale") for each in setup)
        broken = None if scales else _differ(wanted, found, _COARSE)
    return broken and f"differ {broken}"


def _distance(wanted: History, found: History) -> float:
    """Return how far parameters moved otherwise than wanted, relative to how far they moved."""

    def way(history: History) -> torch.Tensor:
        last, names = history[-1], [n for n in history[0] if n.startswith("params[")]
        return torch.cat([(last[n] - history[0][n]).flatten().double() for n in names])

    return float((way(found) - way(wanted)).norm() / way(wanted).norm())


def _only_splits(transform: Any) -> bool:
    """Whether a transform says how an update is split, and has no say in its result."""
    splits, results = (
        any(has_field(transform, field) for field in fields)
        for fields in (_SPLITTING, _RESULT)
    )
    return splits and not results


def _ways(
    members: Sequence[Any], around: Around, size: int, *, lossy: bool
) -> Mapping[str, chain]:
    """Return, by how a message calls it, the setups in which updates are split.

    Ranks that are to differ, or send a part of their gradients later, take the same samples.
    """
    splits = {f for f in _SPLITTING if any(has_field(m, f) for m in members)}
    several = f"on {size} ranks"
    wanted: dict[str, dict[str, Any]] = {}
    if size > 1 and lossy and "data" not in splits:
        wanted[f"{several} that all take the same samples"] = {"shares": None}
    if size > 1 and not lossy:
        wanted[f"{several} with their shares"] = {}
    if size > 1 and not lossy and not splits - {"data"}:
        wanted[f"{several} under wrap_fsdp"] = {"engine": wrap_fsdp()}
    if not lossy and "data" not in splits:
        how = f"{several} in two micro-batches" if size > 1 else "in two micro-batches"
        wanted[how] = {"outside": accumulate(num_micro_batches=2)}
    found: dict[str, chain] = {}
    for how, parts in wanted.items():
        try:
            found[how] = around(members, **parts)
        except CompositionError:
            continue  # it does not go there, and says so
    return found


def _histories(
    subject: Subject, setup: chain, size: int, *, name: str | None = None
) -> list[History] | str:
    """Return each rank's history in a setup, with means of metrics; or how it failed.

    Under another name, a state draws other random numbers.
    """
    within = subject.within(setup)

    def start(world: World) -> TrainState:
        state = within.start(world)
        name_of = attrs.evolve(state.definition, name=name or state.name)
        return attrs.evolve(state, definition=name_of)

    def advance(
        state: TrainState, done: int, number: int
    ) -> Iterator[tuple[TrainState, Any]]:
        for after, metrics in subject.advance(state, done, number):
            yield after, mean(metrics, after.world)

    split = attrs.evolve(subject, size=size, start=start, advance=advance)
    try:
        return split.histories()
    except Exception as error:  # noqa: BLE001 - whatever it is, the plain run had none
        return f"{type(error).__name__}: {error}"


def _differ(wanted: History, found: Sequence[History], near: Comparison) -> str | None:
    """Return the first difference of some ranks' histories from one, beyond rounding."""
    for rank, history in enumerate(found):
        for update, (one, other) in enumerate(zip(wanted, history, strict=True), 1):
            where = "at the end" if update == len(wanted) else f"after update {update}"
            names = [n for n in other if not n.startswith(OWN)]
            differences = near.by_name(
                {n: one[n] for n in names if n in one},
                {n: other[n] for n in names if n in one or "metrics" not in n},
            )
            for each in differences.values():
                return f"{where} on rank {rank}: {each[0]}"
    return None


class _Dtypes(TorchDispatchMode):
    """Notes whether an operator returned numbers of 16 bits or less."""

    found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call an operator, and look at what it returns."""
        returned = func(*args, **(kwargs or {}))
        if isinstance(returned, torch.Tensor) and returned.dtype is not torch.bool:
            self.found = self.found or returned.dtype.itemsize < 4
        return returned


def _is_coarse(subject: Subject, setup: chain) -> bool:
    """Whether a setup rounds to 16 bits or less, in the first updates."""
    within = subject.within(setup)

    def rank(world: World) -> bool:
        state = within.start(world)
        with _Dtypes() as dtypes:
            for _ in within.advance(state, 0, 2):
                pass
        return dtypes.found

    return any(simulate(subject.size, rank))
