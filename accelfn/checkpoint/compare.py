# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint fits a state, and in which words it does not."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs
import torch

from accelfn.checkpoint.grammar import quoted
from accelfn.checkpoint.manifest import Manifest
from accelfn.checkpoint.save import optimizer_name
from accelfn.errors import ArgumentError, CheckpointError
from accelfn.state.state import TrainState

_SHOWN = 10


@attrs.frozen
class Differences:
    """How tensors differ from those that are expected.

    Attributes:
        missing: expected, and not there.
        unexpected: there, and not expected.
        shapes: of another shape: how.
        dtypes: of another dtype alone: how.
        uncastable: those of them that cannot be converted: floats to integers, complex to
            real.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: Mapping[str, str]
    dtypes: Mapping[str, str]
    uncastable: tuple[str, ...]

    def told(self, where: str, whose: str = "the state's") -> str:
        """Return the differences as text, with the nearest name beside each."""
        rows = [f"{where} differ from {whose}:"]
        for what, names, others in (
            ("missing", self.missing, self.unexpected),
            ("unexpected", self.unexpected, self.missing),
        ):
            rows += [f"  {what} {name}{_near(name, others)}" for name in names[:_SHOWN]]
            if len(names) > _SHOWN:
                rows.append(f"  and {len(names) - _SHOWN} more {what}")
        changed = [f"  {n} {how}" for n, how in {**self.shapes, **self.dtypes}.items()]
        rows += changed[:_SHOWN]
        if len(changed) > _SHOWN:
            rows.append(f"  and {len(changed) - _SHOWN} more")
        return "\n".join(rows)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.missing or self.unexpected or self.shapes or self.dtypes)


def differences(
    saved: Mapping[str, torch.Tensor], current: Mapping[str, torch.Tensor]
) -> Differences:
    """Return how saved tensors differ from those of a state."""
    both = [name for name in current if name in saved]
    return Differences(
        missing=tuple(name for name in current if name not in saved),
        unexpected=tuple(name for name in saved if name not in current),
        shapes={
            n: f"saved as {tuple(saved[n].shape)} {saved[n].dtype}, expected"
            f" {tuple(current[n].shape)} {current[n].dtype}"
            for n in both
            if saved[n].shape != current[n].shape
        },
        dtypes={
            n: f"saved as {saved[n].dtype}, expected {current[n].dtype}"
            for n in both
            if saved[n].shape == current[n].shape and saved[n].dtype != current[n].dtype
        },
        uncastable=tuple(
            n for n in both if not torch.can_cast(saved[n].dtype, current[n].dtype)
        ),
    )


def some(names: Sequence[str]) -> str:
    """Return the first of some names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _near(name: str, others: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(others)[:1000], n=1, cutoff=0.7)
    return f" (near {near[0]})" if near else ""


def check_optimizer(state: TrainState, manifest: Manifest, folder: Path | str) -> None:
    """Refuse the state of another optimizer."""
    if manifest.optimizer != optimizer_name(state):
        msg = (
            f"{folder} holds the state of {manifest.optimizer}, but this state's"
            f" optimizer is {optimizer_name(state)}. Create the state with the optimizer that"
            " was saved, or begin this one anew: af.load_part(state, directory, only) takes all"
            " else."
        )
        raise CheckpointError(msg)


def check_transforms(state: TrainState, manifest: Manifest, folder: Path | str) -> None:
    """Refuse slots of transforms that are gone, and transforms whose slot is missing."""
    mine = {each.name for each in state.setup}
    saved = manifest.slots
    gone = [n for n in manifest.transforms if n in saved and n not in mine]
    begun = (e.name for e in state.setup.owners["init"] if e.name in state.slots)
    new = [name for name in begun if name not in saved]
    if gone or new:
        msg = (
            f"{folder}: the setup differs from the saved one: slots of transforms that"
            f" are gone {gone}, transforms without a saved slot {new}. Load into a"
            " state of the saved setup, then use state.with_setup."
        )
        raise CheckpointError(msg)


def check_data(
    state: TrainState, manifest: Manifest, folder: Path | str, allow: Sequence[str]
) -> None:
    """Refuse to go on with other data."""
    saved = manifest.data
    if saved is None or state.data is None:
        return
    facts = state.data.facts
    names = dict.fromkeys((*saved, *facts))
    unknown = sorted(set(allow) - names.keys())
    if unknown:
        msg = (
            f"af.load(allow={tuple(allow)!r}): expected some of {quoted(tuple(names))}."
        )
        raise ArgumentError(msg)
    changed = [n for n in names if n not in allow and saved.get(n) != facts.get(n)]
    if changed:
        listed = "\n".join(
            f"  {name[:80]}: {quoted(saved.get(name))}, now {quoted(facts.get(name))}"
            for name in changed[:_SHOWN]
        )
        msg = (
            f"{folder} was saved with other data:\n{listed}\nIf that is meant, say so:"
            f" af.load(..., allow={quoted(tuple(changed))})."
        )
        raise CheckpointError(msg)
