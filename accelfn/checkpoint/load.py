# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint: `load` restores the whole state, `load_part` selected fields."""

import difflib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from weakref import ref

import attrs
import torch

from accelfn.base.arguments import advise, as_path, explain_call_errors, list_names
from accelfn.base.codec import ObjectState, has_state
from accelfn.base.tree import clone_shards, is_shard
from accelfn.checkpoint.commit import format_error
from accelfn.checkpoint.elastic import Source, source_of
from accelfn.checkpoint.manifest import (
    Manifest,
    check_no_store,
    check_not_joint,
    explain_removal,
    quote,
    read_manifest,
)
from accelfn.checkpoint.save import (
    FIELDS,
    States,
    definition_of,
    digests_of,
    fields_of,
    optimizer_name,
    states_of,
    with_fields,
)
from accelfn.collectives.packed import gather_text
from accelfn.errors import ArgumentError, CheckpointCorruptError, CheckpointError
from accelfn.model.optimizer import OTHERS, entries_of, group_key
from accelfn.state.beginning import reset_slots
from accelfn.state.state import TrainState, check_state

# Comparing a checkpoint with the state to load into.


_SHOWN = 10
_LONG = 200
"""Characters shown of a name; names in a file can have any length."""
_MEANT = ("trainable", "options", "name", "opt_state", "slots")
"""Words that `allow` takes in addition to the facts of the data."""
_CHANGES = {
    "params.": (
        "trainable",
        "trained",
        "write state.with_trainable(predicate) after the load, as the run did",
    ),
    "setup.": ("options", "absent", "give the transforms the options that were saved"),
    "name": ("name", "", "give TrainState.create the name that was saved"),
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
    shapes: Mapping[str, str] = attrs.field(factory=dict)
    dtypes: Mapping[str, str] = attrs.field(factory=dict)
    uncastable: tuple[str, ...] = ()

    def describe(self, where: str, owner: str = "the state's") -> str:
        """Return the differences as text, with the nearest expected name for each."""
        rows = [f"{where} differ from {owner}:"]
        kinds = {**self.shapes, **self.dtypes}
        for some in (
            [
                f"missing {n[:_LONG]}{_suggest_name(n, self.unexpected)}"
                for n in self.missing
            ],
            [
                f"unexpected {n[:_LONG]}{_suggest_name(n, self.missing)}"
                for n in self.unexpected
            ],
            [f"{n[:_LONG]} {how}" for n, how in kinds.items()],
        ):
            rows += [f"  {row}" for row in some[:_SHOWN]]
            if len(some) > _SHOWN:
                rows.append(f"  and {len(some) - _SHOWN} more")
        return "\n".join(rows)

    def __bool__(self) -> bool:
        """Return whether there are any differences."""
        return bool(self.missing or self.unexpected or self.shapes or self.dtypes)


def differences(
    old: Mapping[str, torch.Tensor],
    current: Mapping[str, torch.Tensor],
    *,
    is_laid: bool = False,
) -> Differences:
    """Compare saved tensors with a state's tensors.

    Args:
        old: the saved tensors, by name.
        current: the state's tensors, by name.
        is_laid: whether the saved tensors must be DTensors if the state's are.
    """
    common = [name for name in current if name in old]
    return Differences(
        missing=tuple(name for name in current if name not in old),
        unexpected=tuple(name for name in old if name not in current),
        shapes={
            n: f"saved as {tuple(old[n].shape)} {old[n].dtype}, expected"
            f" {tuple(current[n].shape)} {current[n].dtype}"
            for n in common
            if old[n].shape != current[n].shape
            or (is_laid and is_shard(old[n]) != is_shard(current[n]))
        },
        dtypes={
            n: f"saved as {old[n].dtype}, expected {current[n].dtype}"
            for n in common
            if old[n].shape == current[n].shape and old[n].dtype != current[n].dtype
        },
        uncastable=tuple(
            n for n in common if not torch.can_cast(old[n].dtype, current[n].dtype)
        ),
    )


def _suggest_name(name: str, names: Iterable[str]) -> str:
    short_names = [other for other in list(names)[:1000] if len(other) <= _LONG]
    matches = difflib.get_close_matches(name[:_LONG], short_names, n=1, cutoff=0.7)
    return f" (near {matches[0]})" if matches else ""


def check_optimizer(state: TrainState, manifest: Manifest, folder: Path | str) -> None:
    """Reject a checkpoint of another optimizer."""
    if manifest.optimizer != optimizer_name(state):
        msg = (
            f"{folder} holds the state of {manifest.optimizer[:_LONG]}, but this state's"
            f" optimizer is {optimizer_name(state)}. Create the state with the saved optimizer,"
            " or load all else: af.load_part(state, directory, only)."
        )
        raise CheckpointError(msg)


def check_transforms(state: TrainState, manifest: Manifest, folder: Path | str) -> None:
    """Reject slots without a transform, and transforms without a slot."""
    own_names = {transform.name for transform in state.setup}
    slots = manifest.slots
    absent = [n for n in manifest.transforms if n in slots and n not in own_names]
    names = (e.name for e in state.setup.owners["init"] if e.name in state.slots)
    new = [name for name in names if name not in slots]
    if absent or new:
        msg = (
            f"{folder}: the setup differs from the saved one: slots of transforms that"
            f" are gone {quote(absent)}, transforms without a saved slot {new}. Load into a"
            " state of the saved setup, then use state.with_setup."
        )
        raise CheckpointError(msg)


def check_data(
    state: TrainState, manifest: Manifest, folder: Path | str, allow: Sequence[str]
) -> None:
    """Reject unknown words in `allow`, and a checkpoint that was saved with other data."""
    facts = {} if state.data is None else state.data.facts
    words = (*dict.fromkeys((*(manifest.data or ()), *facts)), *_MEANT)
    if not {*allow} <= {*words}:
        msg = f"af.load(allow={tuple(allow)!r}): expected some of {quote(words)}."
        raise ArgumentError(msg)
    old_facts = manifest.data
    if old_facts is None or state.data is None:
        return
    names = dict.fromkeys((*old_facts, *facts))
    diffs = [n for n in names if n not in allow and old_facts.get(n) != facts.get(n)]
    if diffs:
        lines = "\n".join(
            f"  {name[:80]}: {quote(old_facts.get(name))}, now {quote(facts.get(name))}"
            for name in diffs[:_SHOWN]
        )
        msg = (
            f"{folder} was saved with other data:\n{lines}\nTo accept that, write"
            f" af.load(..., allow={quote(tuple(diffs))})."
        )
        raise CheckpointError(msg)


def check_values(
    state: TrainState,
    fields: Mapping[str, Any],
    manifest: Manifest,
    where: Path | str,
    allow: Sequence[str],
) -> None:
    """Reject saved tensors and numbers that differ in kind or shape from the state's.

    Args:
        state: the state to load into.
        fields: the saved fields; their tensors need no values.
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
        diff = differences(fields[field], current, is_laid=True)
        if diff:
            msg = (
                f"{diff.describe(f'{where}: {field}')}\nLoad into a state of the model that was"
                ' saved; what fits into this one af.load_part(state, directory, ["params"],'
                ' missing="init", extra="ignore") takes.'
            )
            raise CheckpointError(msg)
    for field, rows in (
        ("opt_state", _misfits_of_entries(state, fields["opt_state"])),
        ("slots", _misfits_of_slots(state, fields["slots"])),
    ):
        some = [] if field in allow else list(itertools.islice(rows, _SHOWN))
        if some:
            lines = "\n".join(f"  {row}" for row in some)
            msg = (
                f"{where}: {field} do not fit the state:\n{lines}\nCreate the state with the"
                " options that were saved. If the difference is meant, write"
                f" af.load(..., allow=({field!r},))."
            )
            raise CheckpointError(msg)


def _misfits_of_slots(state: TrainState, slots: Mapping[str, Any]) -> Iterator[str]:
    for transform in state.setup:
        if transform.name in slots and transform.name in state.slots:
            old, slot = slots[transform.name], state.slots[transform.name]
            if isinstance(slot, Mapping) and isinstance(old, Mapping) and old:
                missing = [
                    key for key in cast("Mapping[Any, Any]", slot) if key not in old
                ]
                yield from (
                    f"{transform.name}.{key}: missing"[:_LONG] for key in missing
                )
            yield from _misfits(old, slot, transform.name, may_change=True)


def _misfits_of_entries(state: TrainState, entries: Mapping[str, Any]) -> Iterator[str]:
    """Yield how optimizer entries differ from the state's, or from new ones of torch."""
    definition = state.definition
    fresh = entries_of(definition.optimizer, definition.skeleton) if entries else {}
    groups = definition.optimizer.param_groups
    by_key = {group_key(i): group for i, group in enumerate(groups)}
    for name, entry in entries.items():
        if name in by_key:
            target = {key: by_key[name].get(key) for key in entry}
        elif name in state.params:
            values = {**fresh.get(name, {}), **state.opt_state.get(name, {})}
            target = {
                key: _expected_like_param(state, name, value)
                for key, value in values.items()
            }
        elif name == OTHERS:
            continue
        else:
            target = None
            yield f"{name[:_LONG]}: the optimizer has no such parameter or group"
        yield from _misfits(entry, target, name[:_LONG])


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
    old: Any, current: Any, path: str, *, may_change: bool = False
) -> Iterator[str]:
    """Yield a line for each difference in kind or shape; a current None accepts any value.

    With `may_change` (slots), tables may have other keys, such as parts that are under way, and
    numbers and tensors may replace one another.
    """
    if isinstance(current, Mapping) and isinstance(old, Mapping):
        for key, value in cast("Mapping[Any, Any]", current).items():
            inside = f"{path}.{key}"[:_LONG]
            if key in old:
                yield from _misfits(old[key], value, inside, may_change=may_change)
            elif not may_change:
                yield f"{inside}: missing"
    elif isinstance(current, (list, tuple)) and isinstance(old, (list, tuple)):
        for i, pair in enumerate(zip(old, current, strict=False)):
            inside = f"{path}[{i}]"[:_LONG]
            yield from _misfits(*pair, inside, may_change=may_change)
    elif current is not None:
        one, other = _kind(old), _kind(current)
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
    old_facts, now = manifest.definition, definition_of(state)
    if old_facts is None:
        return
    rows, hints = list[str](), dict[str, str]()
    for begin, (word, default, hint) in _CHANGES.items():
        for name in dict.fromkeys((*old_facts, *now)):
            old, new = (facts.get(name, default)[:_LONG] for facts in (old_facts, now))
            is_known = bool(old) or begin != "name"  # older checkpoints have no name
            if name.startswith(begin) and old != new and is_known and word not in allow:
                rows.append(f"  {name[:_LONG]}: {old}, now {new}")
                hints[word] = hint
    if rows:
        lines = "\n".join(rows[:_SHOWN])
        advise(
            f"{where} was saved by a run with other training options:\n{lines}\nTo continue that"
            f" run, {' and '.join(hints.values())}. If the difference is meant, write"
            f" af.load(..., allow={(*hints,)!r})."
        )


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
        for kind in ("missing", "unexpected"):
            names = getattr(self, kind)
            if names:
                rows.append(f"{kind} {len(names)}: {list_names(names)}")
        rows += [f"cast {name}: {how}" for name, how in self.cast.items()]
        return "\n".join(rows)


@attrs.frozen
class Wanted:
    """The fields to load, and the differences that are allowed; see `load_part`."""

    only: tuple[str, ...]
    missing: str
    extra: str
    cast: bool

    def check(self) -> None:
        """Reject other words than those of `load_part`."""
        for name in self.only:
            field, dot, inside = name.partition(".")
            if field not in FIELDS or (dot and (field != "slots" or not inside)):
                msg = (
                    f"af.load_part(only={self.only!r}): expected some of {FIELDS}, or slots by"
                    ' name as "slots.ema".'
                )
                raise ArgumentError(msg)
        for option, word, other in (
            ("missing", self.missing, "init"),
            ("extra", self.extra, "ignore"),
        ):
            if word not in ("error", other):
                msg = f'af.load_part({option}={word!r}): expected "error" or "{other}".'
                raise ArgumentError(msg)

    def of(self, field: str, names: Mapping[str, Any]) -> dict[str, Any]:
        """Return the requested entries of a field."""
        if field in self.only:
            return dict(names)
        return {n: value for n, value in names.items() if f"{field}.{n}" in self.only}

    def refuses(self, diff: Differences) -> bool:
        """Return whether there is a difference that is not allowed."""
        return bool(
            diff.shapes
            or (diff.dtypes and not self.cast)
            or diff.uncastable
            or (diff.missing and self.missing == "error")
            or (diff.unexpected and self.extra == "error")
        )


def load_fields(
    state: TrainState, source: Source, request: Wanted, saved_fields: dict[str, Any]
) -> Loaded:
    """Return the state with the requested saved fields, and the report."""
    folder, fields = source.folder, fields_of(state.copy())
    if "params" in request.only:
        saved_fields["params"] = {**saved_fields["params"], **kept_of(source, state)}
    errors: list[str] = []
    loaded_names, missing, extra = list[str](), list[str](), list[str]()
    cast: dict[str, str] = {}
    for field, current in fields.items():
        if not isinstance(current, dict):
            if field in request.only:
                fields[field] = saved_fields[field]
                loaded_names.append(field)
            continue
        entries = request.of(field, saved_fields[field])
        diff = _compare_field(field, entries, _places(field, fields, entries, request))
        if request.refuses(diff):
            errors.append(diff.describe(f"{folder}: {field}"))
            continue
        entries = {n: value for n, value in entries.items() if n not in diff.unexpected}
        for name in diff.dtypes:
            cast[f"{field}.{name}"] = diff.dtypes[name]
            place = f"{folder}: {field}.{name}"
            entries[name] = convert_dtype(entries[name], current[name].dtype, place)
        fields[field] = {**current, **entries}
        loaded_names += [f"{field}.{name}" for name in entries]
        missing += [f"{field}.{name}" for name in diff.missing]
        extra += [f"{field}.{name}" for name in diff.unexpected]
    if errors:
        raise CheckpointError("\n".join(errors))
    after = with_fields(state, fields)
    if any(path.startswith("params.") for path in loaded_names):
        after = _restart_slots(state, after, loaded_names)
    return Loaded(
        state=after,
        loaded=tuple(loaded_names),
        missing=tuple(missing),
        unexpected=tuple(extra),
        cast=cast,
    )


def _restart_slots(
    before: TrainState, after: TrainState, names: list[str]
) -> TrainState:
    """Return the state after a load of parameters, with dependent slots started again.

    Slots that were not loaded restart from the new parameters if no step has changed them. The
    next update compares the parameters across ranks.
    """
    slot_names = {name.split(".")[1] for name in names if name.startswith("slots.")}
    slots, going_on = reset_slots(before, after, kept=slot_names)
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
    before, after = (x.isfinite() for x in wide)
    if (before & ~after).any():
        msg = (
            f"{place} has values that {dtype} has not; it was saved as {tensor.dtype}."
        )
        raise CheckpointError(msg)
    return new


def _places(
    field: str, fields: Mapping[str, Any], entries: Mapping[str, Any], request: Wanted
) -> dict[str, Any]:
    """Return the requested entries that a state has a place for, by name."""
    places = request.of(field, fields[field])
    if field == "slots":  # a requested slot in neither counts as missing
        names = (
            n.removeprefix("slots.") for n in request.only if n.startswith("slots.")
        )
        places |= dict.fromkeys(name for name in names if name not in entries)
    if field == "opt_state":  # before its first step, an optimizer has no entries yet
        named = {*fields["params"], *(n for n in entries if n.startswith("<group "))}
        places |= dict.fromkeys(named & entries.keys())
    return places


def _compare_field(
    field: str, entries: Mapping[str, Any], places: Mapping[str, Any]
) -> Differences:
    if field in ("params", "buffers"):
        return differences(entries, places, is_laid=True)
    return Differences(
        missing=tuple(name for name in places if name not in entries),
        unexpected=tuple(name for name in entries if name not in places),
    )


def kept_of(source: Source, state: TrainState) -> dict[str, torch.Tensor]:
    """Return copies of the frozen parameters that were saved as hashes only.

    A collective if these parameters are sharded.

    Raises:
        CheckpointError: the state has other frozen parameters.
    """
    digests = source.manifest.kept
    if not digests:
        return {}
    params = {n: p for n, p in state.params.items() if n in digests}
    current = digests_of(params, state.world)
    differing = [n for n in params if current[n] != digests[n]]
    if differing or params.keys() != digests.keys():
        absent = sorted(digests.keys() - params.keys())
        msg = (
            f'{source.folder} was saved with frozen="hash", and the state has other frozen'
            f" parameters: missing {list_names(absent)}, with other values"
            f" {list_names(differing)}. Import them first."
        )
        raise CheckpointError(msg)
    return {n: clone_shards(p) if is_shard(p) else p.clone() for n, p in params.items()}


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
    for rank, report in enumerate(texts):
        if report:
            is_corrupt, why = json.loads(report)
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
    transforms have other options, an `AccelfnWarning` lists the differences.

    Args:
        state: provides model, optimizer, setup, data and world; it is not changed. For states
            that were saved together, pass all of them by name; `load` then returns a dict.
        directory: a directory that `save` wrote.
        allow: differences to accept: in the data "samples", "batch_size", "remainder", "order"
            and "fingerprint"; also "trainable", "options" (of transforms), "name", and the kinds
            and shapes of "opt_state" and "slots".
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
    folder = as_path("af.load(state, directory)", directory, "a directory")

    def open_source(name: str) -> Source:
        check_no_store(folder)
        check_not_joint(folder)
        manifest = read_manifest(folder, name, names=states)
        return source_of(states[name], manifest, folder / name, verify=verify)

    words = _several(allow)
    with explain_removal(folder):
        results = {
            name: restore_from(state, folder / name, partial(open_source, name), words)
            for name, state in states.items()
        }
    return cast("States", results.get("", results))


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
        check_transforms(state, source.manifest, where)
        check_optimizer(state, source.manifest, where)
        check_data(state, source.manifest, where, allow)
        check_values(state, source.outline(), source.manifest, where, allow)
        return source, source.fields()

    source, fields = read_all_or_none(state, read)
    fields["params"] = {**fields["params"], **kept_of(source, state)}
    warn_of_changes(state, source.manifest, where, allow)
    new_state = with_fields(state, fields)
    state.definition.cache.loaded = ref(state.lease), ref(new_state.lease)
    return new_state


@explain_call_errors
def load_part(
    state: TrainState,
    directory: str | os.PathLike[str],
    only: Sequence[str],
    *,
    missing: Literal["error", "init"] = "error",
    extra: Literal["error", "ignore"] = "error",
    cast: bool = False,
    allow: Sequence[str] = (),
    verify: bool = True,
) -> Loaded:
    """Load selected fields of a saved state into a given state; call it on all ranks.

    If you load parameters without a slot that depends on them, such as an average, the slot
    restarts from the loaded parameters if no step has changed it. Otherwise the slot continues
    and an `AccelfnWarning` names it. The next update compares the values across ranks.

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
    call = "af.load_part(state, directory, only)"
    check_state(call, state)
    state.lease.check()
    folder = as_path(call, directory, "a directory")

    request = Wanted(_several(only), missing, extra, cast)
    request.check()

    def read() -> tuple[Source, dict[str, Any]]:
        check_no_store(folder)
        source = source_of(state, read_manifest(folder), folder, verify=verify)
        if "opt_state" in request.only:
            check_optimizer(state, source.manifest, folder)
        if "cursor" in request.only:
            check_data(state, source.manifest, folder, _several(allow))
        return source, source.fields()

    source, fields = read_all_or_none(state, read)
    return load_fields(state, source, request, fields)


def _several(words: Sequence[str]) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else tuple(words)
