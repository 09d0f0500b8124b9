# SPDX-License-Identifier: Apache-2.0
"""Compare a checkpoint with the state to load into, and describe the differences."""

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import torch

from accelfn.base.arguments import advise
from accelfn.base.codec import ObjectState, has_state
from accelfn.base.tree import is_shard
from accelfn.checkpoint.grammar import quote
from accelfn.checkpoint.manifest import Manifest
from accelfn.checkpoint.save import definition_of, optimizer_name
from accelfn.errors import ArgumentError, CheckpointError
from accelfn.model.optimizer import OTHERS, entries_of, group_key
from accelfn.state.state import TrainState

_SHOWN = 10
_LONG = 200
"""Characters shown of a name; names in a file can have any length."""
_MEANT = ("trainable", "options", "opt_state", "slots")
"""Words that `allow` takes in addition to the facts of the data."""
_CHANGES = {
    "params.": (
        "trainable",
        "trained",
        "write state.with_trainable(predicate) after the load, as the run did",
    ),
    "setup.": (
        "options",
        "absent",
        "give the transforms the options that were saved",
    ),
}
"""By prefix in a manifest's definition: the word of `allow`, the default, and the advice."""


@attrs.frozen
class Differences:
    """The differences between some tensors and the expected tensors.

    Attributes:
        missing: names that are expected and absent.
        unexpected: names that are present and not expected.
        shapes: by name, a text for each tensor with another shape.
        dtypes: by name, a text for each tensor that differs in its dtype only.
        uncastable: names of tensors that cannot be converted, such as floats to integers
            or complex to real.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: Mapping[str, str]
    dtypes: Mapping[str, str]
    uncastable: tuple[str, ...]

    def describe(self, where: str, whose: str = "the state's") -> str:
        """Return the differences as text, with the nearest expected name for each."""
        rows = [f"{where} differ from {whose}:"]
        for what, names, others in (
            ("missing", self.missing, self.unexpected),
            ("unexpected", self.unexpected, self.missing),
        ):
            shown = (
                f"  {what} {n[:_LONG]}{_nearest_hint(n, others)}"
                for n in names[:_SHOWN]
            )
            rows += shown
            if len(names) > _SHOWN:
                rows.append(f"  and {len(names) - _SHOWN} more {what}")
        both = {**self.shapes, **self.dtypes}
        changed = [f"  {n[:_LONG]} {how}" for n, how in both.items()]
        rows += changed[:_SHOWN]
        if len(changed) > _SHOWN:
            rows.append(f"  and {len(changed) - _SHOWN} more")
        return "\n".join(rows)

    def __bool__(self) -> bool:
        """Return whether there are any differences."""
        return bool(self.missing or self.unexpected or self.shapes or self.dtypes)


def differences(
    saved: Mapping[str, torch.Tensor],
    current: Mapping[str, torch.Tensor],
    *,
    is_laid: bool = False,
) -> Differences:
    """Compare saved tensors with a state's tensors.

    Args:
        saved: the saved tensors, by name.
        current: the state's tensors, by name.
        is_laid: whether the saved tensors are DTensors wherever the state's are.
    """
    both = [name for name in current if name in saved]
    return Differences(
        missing=tuple(name for name in current if name not in saved),
        unexpected=tuple(name for name in saved if name not in current),
        shapes={
            n: f"saved as {tuple(saved[n].shape)} {saved[n].dtype}, expected"
            f" {tuple(current[n].shape)} {current[n].dtype}"
            for n in both
            if saved[n].shape != current[n].shape
            or (is_laid and is_shard(saved[n]) != is_shard(current[n]))
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
    """Return the first names as text, with the number of further names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name[:_LONG] for name in names[:_SHOWN]) + more


def _nearest_hint(name: str, others: Iterable[str]) -> str:
    known = [each for each in list(others)[:1000] if len(each) <= _LONG]
    near = difflib.get_close_matches(name[:_LONG], known, n=1, cutoff=0.7)
    return f" (near {near[0]})" if near else ""


def check_optimizer(state: TrainState, manifest: Manifest, folder: Path | str) -> None:
    """Reject a checkpoint of another optimizer."""
    if manifest.optimizer != optimizer_name(state):
        msg = (
            f"{folder} holds the state of {manifest.optimizer[:_LONG]}, but this state's"
            f" optimizer is {optimizer_name(state)}. Create the state with the optimizer that"
            " was saved, or begin this one anew: af.load_part(state, directory, only) takes all"
            " else."
        )
        raise CheckpointError(msg)


def check_transforms(state: TrainState, manifest: Manifest, folder: Path | str) -> None:
    """Reject slots without a transform, and transforms without a slot."""
    mine = {each.name for each in state.setup}
    saved = manifest.slots
    gone = [n for n in manifest.transforms if n in saved and n not in mine]
    begun = (e.name for e in state.setup.owners["init"] if e.name in state.slots)
    new = [name for name in begun if name not in saved]
    if gone or new:
        msg = (
            f"{folder}: the setup differs from the saved one: slots of transforms that"
            f" are gone {quote(gone)}, transforms without a saved slot {new}. Load into a"
            " state of the saved setup, then use state.with_setup."
        )
        raise CheckpointError(msg)


def check_allowed(state: TrainState, manifest: Manifest, allow: Sequence[str]) -> None:
    """Reject unknown words in `allow`."""
    facts = {} if state.data is None else state.data.facts
    known = (*dict.fromkeys((*(manifest.data or ()), *facts)), *_MEANT)
    if not {*allow} <= {*known}:
        msg = f"af.load(allow={tuple(allow)!r}): expected some of {quote(known)}."
        raise ArgumentError(msg)


def check_data(
    state: TrainState, manifest: Manifest, folder: Path | str, allow: Sequence[str]
) -> None:
    """Reject a checkpoint that was saved with other data."""
    saved = manifest.data
    if saved is None or state.data is None:
        return
    facts = state.data.facts
    names = dict.fromkeys((*saved, *facts))
    changed = [n for n in names if n not in allow and saved.get(n) != facts.get(n)]
    if changed:
        listed = "\n".join(
            f"  {name[:80]}: {quote(saved.get(name))}, now {quote(facts.get(name))}"
            for name in changed[:_SHOWN]
        )
        msg = (
            f"{folder} was saved with other data:\n{listed}\nIf that is meant, say so:"
            f" af.load(..., allow={quote(tuple(changed))})."
        )
        raise CheckpointError(msg)


def check_values(
    state: TrainState,
    saved: Mapping[str, Any],
    manifest: Manifest,
    where: Path | str,
    allow: Sequence[str],
) -> None:
    """Reject saved tensors and numbers that differ in kind or shape from the state's.

    Args:
        state: the state to load into.
        saved: the saved fields; their tensors need no values.
        manifest: the manifest of the checkpoint.
        where: the name of the checkpoint in errors.
        allow: as in `load`.

    Raises:
        CheckpointError: kinds or shapes differ; the error lists them.
    """
    if manifest.kept.keys() - state.params.keys():
        return  # `kept_of` raises and names these parameters
    params = {n: p for n, p in state.params.items() if n not in manifest.kept}
    for field, current in (("params", params), ("buffers", state.buffers)):
        found = differences(saved[field], current, is_laid=True)
        if found:
            msg = (
                f"{found.describe(f'{where}: {field}')}\nLoad into a state of the model that was"
                ' saved; what fits into this one af.load_part(state, directory, ["params"],'
                ' missing="init", extra="ignore") takes.'
            )
            raise CheckpointError(msg)
    for field, rows in (
        ("opt_state", _misfits_of_entries(state, saved["opt_state"])),
        ("slots", _misfits_of_slots(state, saved["slots"])),
    ):
        some = [] if field in allow else list(itertools.islice(rows, _SHOWN))
        if some:
            listed = "\n".join(f"  {row}" for row in some)
            msg = (
                f"{where}: {field} do not fit the state:\n{listed}\nCreate the state with the"
                " options that were saved. If the difference is meant, write"
                f" af.load(..., allow=({field!r},))."
            )
            raise CheckpointError(msg)


def _misfits_of_slots(state: TrainState, saved: Mapping[str, Any]) -> Iterator[str]:
    for each in state.setup:
        if each.name in saved and each.name in state.slots:
            rows = (saved[each.name], state.slots[each.name], each.name)
            yield from _misfits(*rows, may_change=True)


def _misfits_of_entries(state: TrainState, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield how optimizer entries differ from the state's, or from new ones of torch."""
    definition = state.definition
    made = entries_of(definition.optimizer, definition.skeleton) if saved else {}
    groups = definition.optimizer.param_groups
    known = {group_key(i): group for i, group in enumerate(groups)}
    for name, entry in saved.items():
        if name in known:
            expected = {key: known[name].get(key) for key in entry}
        elif name in state.params:
            kept = {**made.get(name, {}), **state.opt_state.get(name, {})}
            expected = {
                key: _expected_like_param(state, name, each)
                for key, each in kept.items()
            }
        elif name == OTHERS:
            continue
        else:
            expected = None
            yield f"{name[:_LONG]}: the optimizer has no such parameter or group"
        yield from _misfits(entry, expected, name[:_LONG])


def _expected_like_param(state: TrainState, name: str, value: Any) -> Any:
    """Return the parameter for a value of its shape and dtype; None accepts any value."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    param = state.params[name]
    if (value.shape, value.dtype) == (param.shape, param.dtype):
        return param
    # an optimizer that reads parts of a parameter may keep a tensor of another shape
    return value if state.definition.layout is None else None


def _misfits(
    saved: Any, current: Any, path: str, *, may_change: bool = False
) -> Iterator[str]:
    """Yield a line for each difference in kind or shape; a current None accepts any value.

    With `may_change` (slots), entries may come and go, and numbers and tensors may replace
    one another.
    """
    if isinstance(current, Mapping) and isinstance(saved, Mapping):
        for key, value in cast("Mapping[Any, Any]", current).items():
            inside = f"{path}.{key}"[:_LONG]
            if key in saved:
                yield from _misfits(saved[key], value, inside, may_change=may_change)
            elif not may_change:
                yield f"{inside}: missing"
    elif isinstance(current, (list, tuple)) and isinstance(saved, (list, tuple)):
        for i, pair in enumerate(zip(saved, current, strict=False)):
            inside = f"{path}[{i}]"[:_LONG]
            yield from _misfits(*pair, inside, may_change=may_change)
    elif current is not None:
        one, other = _kind(saved), _kind(current)
        became_tensor = other == "a number" and one.startswith("a lone")
        are_numbers = {one, other} <= {"a number", "a lone float", "a lone integer"}
        if one != other and not became_tensor and not (may_change and are_numbers):
            yield f"{path}: saved as {one}, expected {other}"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor) and not value.dim():
        # torch counts updates in float64 or float32, depending on default dtype and kernel
        return "a lone float" if value.is_floating_point() else "a lone integer"
    if isinstance(value, torch.Tensor):
        split = " in parts" if is_shard(value) else ""
        return f"{tuple(value.shape)} {value.dtype}{split}"
    if isinstance(value, (bool, int, float)):
        return "a number"
    is_object = isinstance(value, ObjectState) or has_state(value)
    return "an object" if is_object else type(value).__name__


def warn_of_changes(
    state: TrainState, manifest: Manifest, where: Path | str, allow: Sequence[str]
) -> None:
    """Warn if trainable parameters or options of transforms differ from the saved ones."""
    saved, now = manifest.definition, definition_of(state)
    if saved is None:
        return
    rows, ways = list[str](), dict[str, str]()
    for begin, (word, default, way) in _CHANGES.items():
        for name in dict.fromkeys((*saved, *now)):
            old, new = (each.get(name, default)[:_LONG] for each in (saved, now))
            if name.startswith(begin) and old != new and word not in allow:
                rows.append(f"  {name[:_LONG]}: {old}, now {new}")
                ways[word] = way
    if rows:
        listed = "\n".join(rows[:_SHOWN])
        advise(
            f"{where} was saved by a run that trained otherwise:\n{listed}\nTo continue that"
            f" run, {' and '.join(ways.values())}. If the difference is meant, write"
            f" af.load(..., allow={(*ways,)!r})."
        )
