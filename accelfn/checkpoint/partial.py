# SPDX-License-Identifier: Apache-2.0
"""Loading a part of a checkpoint, and saying aloud which."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from accelfn.base.advice import advise
from accelfn.base.shards import copied, is_shard
from accelfn.checkpoint import compare
from accelfn.checkpoint.elastic import Source
from accelfn.checkpoint.fields import FIELDS, fields_of, with_fields
from accelfn.checkpoint.files import digests
from accelfn.collectives import by_calls
from accelfn.errors import ArgumentError, CheckpointError
from accelfn.state.anew import begun_anew
from accelfn.state.state import TrainState


@attrs.frozen(kw_only=True)
class Loaded:
    """What a partial load did.

    Attributes:
        state: the given state with what was loaded.
        loaded: the names that were loaded, as `params.head.weight`.
        missing: what was asked for and the checkpoint lacks; it is as it was in the state.
        unexpected: the checkpoint's names that the state has no place for.
        cast: what was converted, from which dtype to which.
    """

    state: TrainState = attrs.field(repr=False)
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: Mapping[str, str]

    def __str__(self) -> str:
        """Return the report as text."""
        rows = [f"loaded {len(self.loaded)} of {len(self.loaded) + len(self.missing)}"]
        for what in ("missing", "unexpected"):
            names = getattr(self, what)
            if names:
                rows.append(f"{what} {len(names)}: {compare.some(names)}")
        rows += [f"cast {name}: {how}" for name, how in self.cast.items()]
        return "\n".join(rows)


def _are_fields(_owner: object, _field: object, value: tuple[str, ...]) -> None:
    for name in value:
        field, dot, inside = name.partition(".")
        if field not in FIELDS or (dot and (field != "slots" or not inside)):
            msg = (
                f"af.load_part(only={value!r}): expected some of {FIELDS}, or slots by name as"
                ' "slots.ema".'
            )
            raise ArgumentError(msg)


def _word(*words: str) -> Any:
    def check(_owner: object, field: Any, value: object) -> None:
        if value not in words:
            expected = " or ".join(f'"{word}"' for word in words)
            msg = f"af.load_part({field.name}={value!r}): expected {expected}."
            raise ArgumentError(msg)

    return attrs.field(kw_only=True, validator=check)


@attrs.frozen
class Wanted:
    """Which fields to load, and what may be amiss with them."""

    only: tuple[str, ...] = attrs.field(validator=_are_fields)
    missing: str = _word("error", "init")
    extra: str = _word("error", "ignore")
    cast: bool = attrs.field(kw_only=True)

    def of(self, field: str, names: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a field that are asked for."""
        if field in self.only:
            return dict(names)
        return {n: value for n, value in names.items() if f"{field}.{n}" in self.only}

    def refuses(self, found: compare.Differences) -> bool:
        """Whether something is amiss that may not be."""
        return bool(
            found.shapes
            or (found.dtypes and not self.cast)
            or found.uncastable
            or (found.missing and self.missing == "error")
            or (found.unexpected and self.extra == "error")
        )


def taken(
    state: TrainState, source: Source, wanted: Wanted, saved: dict[str, Any]
) -> Loaded:
    """Return the state with what was asked for of the saved fields, and what that was."""
    folder, fields = source.folder, fields_of(state.copy())
    if "params" in wanted.only:
        saved["params"] = {**saved["params"], **kept_of(source, state)}
    refused: list[str] = []
    loaded, missing, unexpected = list[str](), list[str](), list[str]()
    cast: dict[str, str] = {}
    for field, current in fields.items():
        if not isinstance(current, dict):
            if field in wanted.only:
                fields[field] = saved[field]
                loaded.append(field)
            continue
        entries = wanted.of(field, saved[field])
        found = _compared(field, entries, _places(field, fields, entries, wanted))
        if wanted.refuses(found):
            refused.append(found.told(f"{folder}: {field}"))
            continue
        entries = {
            n: value for n, value in entries.items() if n not in found.unexpected
        }
        for name in found.dtypes:
            cast[f"{field}.{name}"] = found.dtypes[name]
            place = f"{folder}: {field}.{name}"
            entries[name] = converted(entries[name], current[name].dtype, place)
        fields[field] = {**current, **entries}
        loaded += [f"{field}.{name}" for name in entries]
        missing += [f"{field}.{name}" for name in found.missing]
        unexpected += [f"{field}.{name}" for name in found.unexpected]
    if refused:
        raise CheckpointError("\n".join(refused))
    made = with_fields(state, fields)
    if any(each.startswith("params.") for each in loaded):
        made = _gone_on(state, made, loaded)
    return Loaded(
        state=made,
        loaded=tuple(loaded),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        cast=cast,
    )


def _gone_on(before: TrainState, after: TrainState, loaded: list[str]) -> TrainState:
    """Return a state that goes on with parameters of a file: ranks are to compare them.

    Slots that were not loaded begin with them, if they have not come further.
    """
    kept = {each.split(".")[1] for each in loaded if each.startswith("slots.")}
    slots, going_on = begun_anew(before, after, kept=kept)
    if going_on:
        advise(
            f"af.load_part: the parameters were loaded, and the slots of {going_on} go on as"
            ' they were without them. Load these, too, only=["params", "slots"], or begin them'
            " anew, by state.with_setup(...) without these transforms, and with them."
        )
    after.definition.cache.is_to_compare = True  # what each rank was given
    return attrs.evolve(after, slots=slots)


def converted(tensor: torch.Tensor, dtype: torch.dtype, place: str) -> torch.Tensor:
    """Return a tensor as another dtype, in which every finite value is one.

    Raises:
        CheckpointError: some is not.
    """
    new = tensor.to(dtype)
    # not all dtypes are asked what is finite; float64 is, and has their values
    wide = (
        t.to(torch.complex128 if t.is_complex() else torch.float64)
        for t in (tensor, new)
    )
    before, after = (each.isfinite() for each in wide)
    if (before & ~after).any():
        msg = (
            f"{place} has values that {dtype} has not; it was saved as {tensor.dtype}."
        )
        raise CheckpointError(msg)
    return new


def _places(
    field: str, fields: Mapping[str, Any], saved: Mapping[str, Any], wanted: Wanted
) -> dict[str, Any]:
    """Return what is asked for and a state has a place for, by name."""
    places = wanted.of(field, fields[field])
    if field == "slots":  # a slot that neither has is missing
        asked = (
            n.removeprefix("slots.") for n in wanted.only if n.startswith("slots.")
        )
        places |= dict.fromkeys(name for name in asked if name not in saved)
    if field == "opt_state":  # an optimizer that has not begun has entries to come
        named = {*fields["params"], *(n for n in saved if n.startswith("<group "))}
        places |= dict.fromkeys(named & saved.keys())
    return places


def _compared(
    field: str, saved: Mapping[str, Any], places: Mapping[str, Any]
) -> compare.Differences:
    if field in ("params", "buffers"):
        return compare.differences(saved, places, is_laid=True)
    return compare.Differences(
        missing=tuple(name for name in places if name not in saved),
        unexpected=tuple(name for name in saved if name not in places),
        shapes={},
        dtypes={},
        uncastable=(),
    )


def kept_of(source: Source, state: TrainState) -> dict[str, torch.Tensor]:
    """Return copies of the frozen parameters of which hashes alone were saved.

    Where each rank has a part of them, a collective.

    Raises:
        CheckpointError: the state has others.
    """
    kept = source.manifest.kept
    here = {n: p for n, p in state.params.items() if n in kept}
    found = digests({n: p for n, p in here.items() if not is_shard(p)})
    for some in by_calls(here, state.world, label="compare frozen parameters"):
        found |= digests(some)
    changed = [n for n in here if found[n] != kept[n]]
    if changed or here.keys() != kept.keys():
        gone = sorted(kept.keys() - here.keys())
        msg = (
            f'{source.folder} was saved with frozen="hash", and the frozen parameters of the'
            f" state that it is loaded into are not those: missing {compare.some(gone)},"
            f" with other values {compare.some(changed)}. Import them first."
        )
        raise CheckpointError(msg)
    return {n: copied(p) if is_shard(p) else p.clone() for n, p in here.items()}
