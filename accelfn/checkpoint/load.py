# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint: `load` restores the whole state, `load_part` selected fields."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import ref

import attrs
import torch

from accelfn.base.arguments import advise, explain_call_errors
from accelfn.base.tree import clone_shards, is_shard
from accelfn.checkpoint import compare
from accelfn.checkpoint.commit import format_error
from accelfn.checkpoint.elastic import Source, source_of
from accelfn.checkpoint.files import digests
from accelfn.checkpoint.manifest import (
    check_no_store,
    check_not_joint,
    explain_removal,
    read_manifest,
)
from accelfn.checkpoint.save import (
    FIELDS,
    States,
    check_path,
    fields_of,
    states_of,
    with_fields,
)
from accelfn.collectives import by_calls, gather_text
from accelfn.errors import ArgumentError, CheckpointCorruptError, CheckpointError
from accelfn.state.beginning import reset_slots
from accelfn.state.state import TrainState, check_state

# Loading a part of a checkpoint, with a report.


@attrs.frozen(kw_only=True)
class Loaded:
    """The report of a partial load.

    Attributes:
        state: the given state with the loaded values.
        loaded: the loaded names, such as `params.head.weight`.
        missing: requested names that the checkpoint lacks; the state keeps its values.
        unexpected: names of the checkpoint that the state has no place for.
        cast: the old and the new dtype of each converted tensor, by name.
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
    """The fields to load, and the differences that are allowed."""

    only: tuple[str, ...] = attrs.field(validator=_are_fields)
    missing: str = _word("error", "init")
    extra: str = _word("error", "ignore")
    cast: bool = attrs.field(kw_only=True)

    def of(self, field: str, names: Mapping[str, Any]) -> dict[str, Any]:
        """Return the requested entries of a field."""
        if field in self.only:
            return dict(names)
        return {n: value for n, value in names.items() if f"{field}.{n}" in self.only}

    def refuses(self, found: compare.Differences) -> bool:
        """Return whether there is a difference that is not allowed."""
        return bool(
            found.shapes
            or (found.dtypes and not self.cast)
            or found.uncastable
            or (found.missing and self.missing == "error")
            or (found.unexpected and self.extra == "error")
        )


def load_fields(
    state: TrainState, source: Source, wanted: Wanted, saved: dict[str, Any]
) -> Loaded:
    """Return the state with the requested saved fields, and the report."""
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
        found = _compare_field(field, entries, _places(field, fields, entries, wanted))
        if wanted.refuses(found):
            refused.append(found.describe(f"{folder}: {field}"))
            continue
        entries = {
            n: value for n, value in entries.items() if n not in found.unexpected
        }
        for name in found.dtypes:
            cast[f"{field}.{name}"] = found.dtypes[name]
            place = f"{folder}: {field}.{name}"
            entries[name] = convert_dtype(entries[name], current[name].dtype, place)
        fields[field] = {**current, **entries}
        loaded += [f"{field}.{name}" for name in entries]
        missing += [f"{field}.{name}" for name in found.missing]
        unexpected += [f"{field}.{name}" for name in found.unexpected]
    if refused:
        raise CheckpointError("\n".join(refused))
    made = with_fields(state, fields)
    if any(each.startswith("params.") for each in loaded):
        made = _restart_slots(state, made, loaded)
    return Loaded(
        state=made,
        loaded=tuple(loaded),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        cast=cast,
    )


def _restart_slots(
    before: TrainState, after: TrainState, loaded: list[str]
) -> TrainState:
    """Return the state after a load of parameters, with dependent slots started again.

    Slots that were not loaded restart from the new parameters if no step has changed them. The
    next update compares the parameters across ranks.
    """
    kept = {each.split(".")[1] for each in loaded if each.startswith("slots.")}
    slots, going_on = reset_slots(before, after, kept=kept)
    if going_on:
        advise(
            f"af.load_part: the parameters were loaded, and the slots of {going_on} go on as"
            ' they were without them. Load these, too, only=["params", "slots"], or begin them'
            " anew, by state.with_setup(...) without these transforms, and with them."
        )
    after.definition.cache.is_to_compare = True  # ranks may have loaded different files
    return attrs.evolve(after, slots=slots)


def convert_dtype(tensor: torch.Tensor, dtype: torch.dtype, place: str) -> torch.Tensor:
    """Convert a tensor to another dtype, keeping finite values finite.

    Raises:
        CheckpointError: a finite value overflows in the new dtype.
    """
    new = tensor.to(dtype)
    # some dtypes do not support isfinite; float64 does, and has all of their values
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
    """Return the requested entries that a state has a place for, by name."""
    places = wanted.of(field, fields[field])
    if field == "slots":  # a requested slot in neither counts as missing
        asked = (
            n.removeprefix("slots.") for n in wanted.only if n.startswith("slots.")
        )
        places |= dict.fromkeys(name for name in asked if name not in saved)
    if field == "opt_state":  # before its first step, an optimizer has no entries yet
        named = {*fields["params"], *(n for n in saved if n.startswith("<group "))}
        places |= dict.fromkeys(named & saved.keys())
    return places


def _compare_field(
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
    """Return copies of the frozen parameters that were saved as hashes only.

    A collective if these parameters are sharded.

    Raises:
        CheckpointError: the state has other frozen parameters.
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
    return {n: clone_shards(p) if is_shard(p) else p.clone() for n, p in here.items()}


T = TypeVar("T")


def read_all_or_none(state: TrainState, read: Callable[[], T]) -> T:
    """Read on this rank; for a split model, return only after all ranks have succeeded.

    The next calls gather parts of the model, and ranks would wait there for a rank that failed
    to read its file.

    Args:
        state: its layout says whether the model is split.
        read: reads without communication.

    Cost: two small gathers if the model is split.

    Raises:
        CheckpointCorruptError: another rank's file is missing, or has changed.
        CheckpointError: another rank failed for another reason.
        Exception: the error of `read` on this rank.
    """
    if state.definition.layout is None:
        return read()
    outcome: T | Exception
    try:
        outcome, text = read(), ""
    except Exception as error:  # noqa: BLE001 - reported to all ranks, whatever it is
        is_corrupt = isinstance(error, CheckpointCorruptError)
        outcome, text = error, json.dumps([is_corrupt, format_error(error)])
    texts = gather_text(text, state.world, label="load: read files")
    if isinstance(outcome, Exception):
        raise outcome
    for rank, failed in enumerate(texts):
        if failed:
            is_corrupt, why = json.loads(failed)
            kind = CheckpointCorruptError if is_corrupt else CheckpointError
            msg = f"Rank {rank} could not read its part, so no rank loads: {why}"
            raise kind(msg)
    return outcome


@explain_call_errors
def load(
    state: States,
    directory: str | os.PathLike[str],
    *,
    allow: Sequence[str] = (),
    verify: bool = True,
) -> States:
    """Load a saved state into the definition of a given state; call it on all ranks.

    Training resumes at the next sample on any number of ranks. Values that differed between
    ranks, as between two averages of `local_sgd`, return to each rank if the number of ranks is
    the same; otherwise all ranks get the average. The data must have the saved length, batch
    size, order and fingerprint (a hash of some samples). If other parameters are trainable, or
    transforms have other options, an `af.Warning` lists the differences.

    Args:
        state: provides model, optimizer, setup, data and world; it is not changed. For states
            that were saved together, pass all of them by name; `load` then returns a dict.
        directory: a directory that `save` wrote.
        allow: differences to accept: in the data "samples", "batch_size", "remainder", "order"
            and "fingerprint"; also "trainable", "options" (of transforms), and the kinds and
            shapes of "opt_state" and "slots".
        verify: whether to compare every byte with its digest.

    If the model is split among ranks, all ranks load or none does: a file that one rank cannot
    read is an error on all ranks, and the error names the file.

    Cost: reads the files that this rank needs once, with BLAKE3. A split model adds two small
    gathers, and a gather of frozen parameters that were saved as hashes.

    Raises:
        CheckpointCorruptError: a file is missing or has changed; the error names the file and
            its first changed tensor.
        CheckpointError: model, transforms, optimizer, data or world differ from the saved
            ones; the error lists the differences with the nearest names.
        ArgumentError: an option is not one of these words.
    """
    _, states = states_of("af.load(state, directory)", state)
    check_path("af.load", directory, "state, ")
    folder = Path(directory)

    def open_source(name: str) -> Source:
        check_no_store(folder)
        check_not_joint(folder)
        manifest = read_manifest(folder, name, names=states)
        return source_of(states[name], manifest, folder / name, verify=verify)

    words = _several(allow)
    with explain_removal(folder):
        made = {
            name: restore_from(each, folder / name, partial(open_source, name), words)
            for name, each in states.items()
        }
    return cast("States", made.get("", made))


def restore_from(
    state: TrainState,
    where: Path | str,
    open_source: Callable[[], Source],
    allow: Sequence[str] = (),
) -> TrainState:
    """Load a source into the definition of a given state.

    Args:
        state: provides model, optimizer, setup, data and world.
        where: the name of the source in errors.
        open_source: returns the source.
        allow: as in `load`.
    """

    def read() -> tuple[Source, dict[str, Any]]:
        source = open_source()
        compare.check_transforms(state, source.manifest, where)
        compare.check_optimizer(state, source.manifest, where)
        compare.check_allowed(state, source.manifest, allow)
        compare.check_data(state, source.manifest, where, allow)
        compare.check_values(state, source.outline(), source.manifest, where, allow)
        return source, source.fields()

    source, saved = read_all_or_none(state, read)
    saved["params"] = {**saved["params"], **kept_of(source, state)}
    compare.warn_of_changes(state, source.manifest, where, allow)
    made = with_fields(state, saved)
    state.definition.cache.loaded = ref(state.lease), ref(made.lease)
    return made


@explain_call_errors
def load_part(
    state: TrainState,
    directory: str | os.PathLike[str],
    only: Sequence[str],
    *,
    missing: str = "error",
    extra: str = "error",
    cast: bool = False,
    allow: Sequence[str] = (),
    verify: bool = True,
) -> Loaded:
    """Load selected fields of a saved state into a given state; call it on all ranks.

    If you load parameters without a slot that depends on them, such as an average, the slot
    restarts from the loaded parameters if no step has changed it. Otherwise the slot continues
    and an `af.Warning` names it. The next update compares the values across ranks.

    Args:
        state: keeps its values in all other fields; it is not changed.
        directory: a directory that `save` wrote. For states that were saved together, the
            directory of one state, such as `directory/generator`.
        only: fields, of "params", "buffers", "opt_state", "step", "cursor", "seed",
            "num_skipped" and "slots", or a slot by name ("slots.ema").
        missing: "init" keeps the state's values for names that the checkpoint lacks.
        extra: "ignore" skips names that the state has no place for.
        cast: convert parameters and buffers to the state's dtypes; not floats to integers,
            complex to real, or finite values to infinite ones.
        allow: as in `load`, if you load the cursor.
        verify: as in `load`.

    Returns: a report; its `state` is the new state.

    Law: values, names and rejected cases are those of dicts.

    Cost: as `load`.

    Raises: as `load`, for the selected fields.
    """
    check_state("af.load_part(state, directory, only)", state)
    state.lease.check()
    check_path("af.load_part", directory, "state, ")
    folder = Path(directory)

    def read() -> tuple[Source, Wanted, dict[str, Any]]:
        check_no_store(folder)
        source = source_of(state, read_manifest(folder), folder, verify=verify)
        wanted = Wanted(_several(only), missing=missing, extra=extra, cast=cast)
        if "opt_state" in wanted.only:
            compare.check_optimizer(state, source.manifest, folder)
        if "cursor" in wanted.only:
            compare.check_allowed(state, source.manifest, _several(allow))
            compare.check_data(state, source.manifest, folder, _several(allow))
        return source, wanted, source.fields()

    source, wanted, saved = read_all_or_none(state, read)
    return load_fields(state, source, wanted, saved)


def _several(words: Sequence[str]) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else tuple(words)
