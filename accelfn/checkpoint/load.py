# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint: `load` restores a whole state, and `load_part` restores some fields."""

import difflib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, cast
from weakref import ref

import attrs
import torch

from accelfn.base.arguments import advise, as_path, explain_call_errors, list_names
from accelfn.base.codec import ObjectState, has_state
from accelfn.base.tree import clone_shards, is_shard
from accelfn.checkpoint import files
from accelfn.checkpoint.commit import format_error
from accelfn.checkpoint.elastic import ByName, Source, source_of
from accelfn.checkpoint.manifest import (
    check_no_store,
    check_not_joint,
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

# Compare a checkpoint with the state to load into.


_SHOWN = 10
"""The number of differences that an error message lists."""
_LONG = 200
"""The number of characters of a name to show, because names in a file can have any length."""
_MEANT = ("trainable", "options", "name", "opt_state", "slots")
"""Words that `allow` accepts, in addition to the names of facts of the data."""
_CHANGES = {
    "params.": (
        "trainable",
        "trained",
        "write state.with_trainable(predicate) after the load, as the run did",
    ),
    "setup.": ("options", "absent", "pass the saved options to the transforms"),
    "name": ("name", "", "pass the saved name to TrainState.create"),
}
"""What to say if an entry of a manifest's definition differs, by the prefix of the entry.

Each row has the word for `allow`, the text for an entry that is missing, and the advice.
"""


@attrs.frozen
class Differences:
    """The differences between saved tensors and the tensors of a state or model.

    Attributes:
        missing: names that are expected, but were not saved.
        unexpected: names that were saved, but are not expected.
        shapes: for tensors with another shape: a dict from the name to a text about the shapes.
        dtypes: for tensors with only another dtype: a dict from the name to a text about the
            dtypes.
        uncastable: names of tensors that cannot be converted to the expected dtype, for
            example from float to integer or from complex to real.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: Mapping[str, str] = attrs.field(factory=dict)
    dtypes: Mapping[str, str] = attrs.field(factory=dict)
    uncastable: tuple[str, ...] = ()

    def describe(self, where: str, owner: str = "the state's") -> str:
        """Return the differences as lines of text, with a similar name for each wrong name."""
        rows = [f"{where} differ from {owner}:"]
        for some in (
            [f"missing {_with_similar(n, self.unexpected)}" for n in self.missing],
            [f"unexpected {_with_similar(n, self.missing)}" for n in self.unexpected],
            [f"{n[:_LONG]} {how}" for n, how in {**self.shapes, **self.dtypes}.items()],
        ):
            rows += [f"  {row}" for row in some[:_SHOWN]]
            if len(some) > _SHOWN:
                rows.append(f"  and {len(some) - _SHOWN} more")
        return "\n".join(rows)

    def __bool__(self) -> bool:
        """Return whether there are any differences."""
        return bool(self.missing or self.unexpected or self.shapes or self.dtypes)


def differences(
    old: ByName, current: ByName, *, is_laid: bool = False, are_tensors: bool = True
) -> Differences:
    """Compare saved tensors with a state's tensors.

    Args:
        old: the saved tensors, by name.
        current: the state's tensors, by name.
        is_laid: whether a saved tensor must be a DTensor exactly if the state's tensor is.
        are_tensors: whether the values are tensors. Otherwise only their names are compared.
    """
    common = [name for name in current if name in old and are_tensors]
    shapes, dtypes = dict[str, str](), dict[str, str]()
    for name in common:
        was, now = old[name], current[name]
        if was.shape != now.shape or (is_laid and is_shard(was) != is_shard(now)):
            kinds = (f"{tuple(t.shape)} {t.dtype}" for t in (was, now))
            shapes[name] = "saved as {}, expected {}".format(*kinds)
        elif was.dtype != now.dtype:
            dtypes[name] = f"saved as {was.dtype}, expected {now.dtype}"
    return Differences(
        missing=tuple(name for name in current if name not in old),
        unexpected=tuple(name for name in old if name not in current),
        shapes=shapes,
        dtypes=dtypes,
        uncastable=tuple(
            n for n in common if not torch.can_cast(old[n].dtype, current[n].dtype)
        ),
    )


def _with_similar(name: str, names: Iterable[str]) -> str:
    """Return a name, shortened, with the most similar one of other names."""
    short_names = [other for other in list(names)[:1000] if len(other) <= _LONG]
    name = name[:_LONG]
    matches = difflib.get_close_matches(name, short_names, n=1, cutoff=0.7)
    return f"{name} (similar: {matches[0]})" if matches else name


def check_optimizer(state: TrainState, source: Source) -> None:
    """Raise `CheckpointError` if a checkpoint was saved with another optimizer class."""
    name = source.manifest.optimizer
    if name != optimizer_name(state):
        msg = (
            f"{source.folder} has the state of {name[:_LONG]}, but this state's"
            f" optimizer is {optimizer_name(state)}. Create the state with the saved optimizer,"
            ' or load only some fields: af.load_part(state, directory, ["params", "buffers"]).'
        )
        raise CheckpointError(msg)


def check_transforms(state: TrainState, source: Source) -> None:
    """Raise `CheckpointError` if saved slots and the setup's transforms do not match."""
    own_names = {transform.name for transform in state.setup}
    slots, saved_names = source.manifest.slots, source.manifest.transforms
    absent = [n for n in saved_names if n in slots and n not in own_names]
    names = (e.name for e in state.setup.owners["init"] if e.name in state.slots)
    new = [name for name in names if name not in slots]
    if absent or new:
        lacks = f" Saved, but not in this setup: {', '.join(map(quote, absent))}."
        more = f" In this setup, but not saved: {', '.join(map(quote, new))}."
        msg = (
            f"{source.folder}: the setup of this state differs from the saved setup."
            f"{lacks if absent else ''}{more if new else ''} Create the state with the saved"
            " setup, load, and then change the setup with state.with_setup(...)."
        )
        raise CheckpointError(msg)


def check_data(state: TrainState, source: Source, allow: Sequence[str]) -> None:
    """Raise an error if `allow` has unknown words, or if the saved data were different."""
    facts = {} if state.data is None else state.data.facts
    old_facts = source.manifest.data
    words = (*dict.fromkeys((*(old_facts or ()), *facts)), *_MEANT)
    if not {*allow} <= {*words}:
        msg = f"af.load(allow={tuple(allow)!r}): expected some of {quote(words)}."
        raise ArgumentError(msg)
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
            f"{source.folder} was saved with other data:\n{lines}\nTo load it anyway, write"
            f" af.load(..., allow={quote(tuple(diffs))})."
        )
        raise CheckpointError(msg)


def check_values(state: TrainState, source: Source, allow: Sequence[str]) -> None:
    """Check that saved tensors and numbers have the types and shapes of the current ones.

    Raises:
        CheckpointError: types or shapes differ. The message lists the differences.
    """
    fields, digests, where = source.outline(), source.manifest.kept, source.folder
    if digests.keys() - state.params.keys():
        return  # `kept_of` raises an error that names these parameters
    params = {n: p for n, p in state.params.items() if n not in digests}
    for field, current in (("params", params), ("buffers", state.buffers)):
        diff = differences(fields[field], current, is_laid=True)
        if diff:
            msg = (
                f"{diff.describe(f'{where}: {field}')}\nCreate the state with the saved model."
                " To load only the parameters that fit, write"
                ' af.load_part(state, directory, ["params"], missing="init", extra="ignore").'
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
                f"{where}: the saved {field} does not fit this state:\n{lines}\nCreate the state"
                f" with the saved options, or load it with af.load(..., allow=({field!r},))."
            )
            raise CheckpointError(msg)


def _misfits_of_slots(state: TrainState, slots: Mapping[str, Any]) -> Iterator[str]:
    for transform in state.setup:
        if transform.name in slots and transform.name in state.slots:
            old, slot = slots[transform.name], state.slots[transform.name]
            if isinstance(slot, Mapping) and isinstance(old, Mapping) and old:
                for key in cast("Mapping[Any, Any]", slot):
                    if key not in old:
                        yield f"{transform.name}.{key}: missing"[:_LONG]
            yield from _misfits(old, slot, transform.name, may_change=True)


def _misfits_of_entries(state: TrainState, entries: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each difference between saved and expected optimizer state.

    The expected entries are the state's. Before the first update, they are those that torch
    would create.
    """
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
    """Return what to compare a saved optimizer value with; None accepts any saved value.

    If the value has the shape and dtype of its parameter, the result is the parameter, which
    also shows whether the value must be sharded.
    """
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    param = state.params[name]
    if (value.shape, value.dtype) == (param.shape, param.dtype):
        return param
    # under a layout, the value's shape depends on how the saved run sharded the parameter
    return value if state.definition.layout is None else None


def _misfits(
    old: Any, current: Any, path: str, *, may_change: bool = False
) -> Iterator[str]:
    """Yield a text for each difference in type or shape between a saved and a current value.

    A current value of None accepts any saved value. `may_change` is for slots: keys may be
    missing, because a slot has some entries only at times, and a scalar may be a number or a
    tensor.
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
        became_tensor = other == "a number" and one.startswith("a scalar")
        scalars = {"a number", "a scalar float tensor", "a scalar integer tensor"}
        are_numbers = {one, other} <= scalars
        if one != other and not became_tensor and not (may_change and are_numbers):
            yield f"{path}: saved as {one}, expected {other}"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor) and not value.dim():
        # torch counts updates in a float32 or float64 tensor, so dtypes of scalars may differ
        kind = "float" if value.is_floating_point() else "integer"
        return f"a scalar {kind} tensor"
    if isinstance(value, torch.Tensor):
        split = " (sharded)" if is_shard(value) else ""
        return f"{tuple(value.shape)} {value.dtype}{split}"
    if isinstance(value, (bool, int, float)):
        return "a number"
    is_object = isinstance(value, ObjectState) or has_state(value)
    return "an object" if is_object else type(value).__name__


def warn_of_changes(state: TrainState, source: Source, allow: Sequence[str]) -> None:
    """Warn if trainable parameters, transform options or the name differ from the saved run."""
    old_facts, now = source.manifest.definition, definition_of(state)
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
            f"{source.folder} was saved by a run with other training options:\n{lines}\nTo continue"
            f" that run, {' and '.join(hints.values())}. If you want the difference, write"
            f" af.load(..., allow={(*hints,)!r})."
        )


# Load some fields of a checkpoint, and report which names were loaded.


@attrs.frozen(kw_only=True)
class Loaded:
    """The report of `load_part`.

    Attributes:
        state: the new state, with the loaded values.
        loaded: the names that were loaded, such as `params.head.weight`.
        missing: the requested names that the checkpoint does not have. The state keeps its own
            values for them.
        unexpected: the names in the checkpoint that the state does not have.
        cast: for converted tensors: a dict from the name to a text with the old and the new
            dtype.
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
    """The fields to load and the differences to accept, which are arguments of `load_part`."""

    only: tuple[str, ...]
    missing: str
    extra: str
    cast: bool

    def __attrs_post_init__(self) -> None:
        """Raise `ArgumentError` for values that `load_part` does not accept."""
        for name in self.only:
            field, dot, inside = name.partition(".")
            if field not in FIELDS or (dot and (field != "slots" or not inside)):
                names = f"{FIELDS}, or one slot: 'slots.NAME'"
                msg = (
                    f"af.load_part(only={self.only!r}): expected names out of {names}."
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
        """Return the requested entries of a field, out of all entries by name."""
        if field in self.only:
            return dict(names)
        return {n: value for n, value in names.items() if f"{field}.{n}" in self.only}

    def refuses(self, diff: Differences) -> bool:
        """Return whether any of these differences is not accepted."""
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
    """Return a report with the new state, which has the requested saved fields.

    Args:
        state: keeps its values in all other fields; it is not changed.
        source: the checkpoint, whose frozen parameters may be saved as hashes.
        request: the fields to load.
        saved_fields: all fields of the checkpoint.
    """
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
        places = _places(field, fields, entries, request)
        are_tensors = field in ("params", "buffers")
        diff = differences(entries, places, is_laid=True, are_tensors=are_tensors)
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


def _restart_slots(old: TrainState, new: TrainState, names: list[str]) -> TrainState:
    """Return the state after parameters were loaded, with new slots where possible.

    A slot that was not loaded, and that no step has changed, is created again from the new
    parameters. The next update checks that all ranks have the same parameters.
    """
    slot_names = {name.split(".")[1] for name in names if name.startswith("slots.")}
    slots, going_on = reset_slots(old, new, kept=slot_names)
    if going_on:
        names_of = ", ".join(map(repr, going_on))
        advise(
            f"af.load_part: the parameters were loaded, but the slots of {names_of} were not,"
            ' and no longer fit them. Load the slots too, with only=["params", "slots"], or'
            " create them again: call state.with_setup(...) without these transforms, and then"
            " with them."
        )
    new.definition.cache.is_to_compare = True  # compare ranks at the next update
    return attrs.evolve(new, slots=slots)


def convert_dtype(tensor: torch.Tensor, dtype: torch.dtype, place: str) -> torch.Tensor:
    """Convert a tensor to another dtype, and check that finite values stay finite.

    Raises:
        CheckpointError: a finite value overflows in the new dtype.
    """
    new = tensor.to(dtype)
    # some dtypes do not support isfinite, but float64 does, and can represent their values
    wide = (
        t.to(torch.complex128 if t.is_complex() else torch.float64)
        for t in (tensor, new)
    )
    before, after = (x.isfinite() for x in wide)
    if (before & ~after).any():
        msg = (
            f"{place} was saved as {tensor.dtype}, and has values too large for {dtype}. Create"
            f" the state with {tensor.dtype} there."
        )
        raise CheckpointError(msg)
    return new


def _places(
    field: str, fields: Mapping[str, Any], entries: Mapping[str, Any], request: Wanted
) -> dict[str, Any]:
    """Return the requested entries that the state has or can have, by name."""
    places = request.of(field, fields[field])
    if field == "slots":  # requested slots count as missing if they exist nowhere
        names = (
            n.removeprefix("slots.") for n in request.only if n.startswith("slots.")
        )
        places |= dict.fromkeys(name for name in names if name not in entries)
    if field == "opt_state":  # before its first step, an optimizer has no entries yet
        named = {*fields["params"], *(n for n in entries if n.startswith("<group "))}
        places |= dict.fromkeys(named & entries.keys())
    return places


def kept_of(source: Source, state: TrainState) -> dict[str, torch.Tensor]:
    """Return copies of the state's parameters that were saved only as hashes.

    The call is a collective if these parameters are sharded.

    Raises:
        CheckpointError: the state does not have these parameters with the saved values.
    """
    digests = source.manifest.kept
    if not digests:
        return {}
    params = {n: p for n, p in state.params.items() if n in digests}
    current = digests_of(params, state.world)
    differing = [n for n in params if current[n] != digests[n]]
    if differing or params.keys() != digests.keys():
        absent = sorted(digests.keys() - params.keys())
        lacks = f" Missing: {list_names(absent)}." if absent else ""
        more = f" With other values: {list_names(differing)}." if differing else ""
        msg = (
            f'{source.folder} was saved with frozen="hash", so the state must have the same frozen'
            f" parameters.{lacks}{more} First load their values with af.import_model."
        )
        raise CheckpointError(msg)
    return {n: clone_shards(p) if is_shard(p) else p.clone() for n, p in params.items()}


T = TypeVar("T")


def read_all_or_none(state: TrainState, read: Callable[[], T]) -> T:
    """Call `read`; if the model is sharded, return only after all ranks have succeeded.

    After a load, ranks gather parts of a sharded model. They would wait there for a rank that
    failed to read its file.

    Args:
        state: the state to load into. Its layout shows whether the model is sharded.
        read: reads this rank's files, without communication.

    Cost: two small gathers if the model is sharded.

    Raises:
        CheckpointCorruptError: a file of another rank is missing, or has changed.
        CheckpointError: another rank failed for another reason.
        Exception: the error of `read` on this rank.
    """
    if state.definition.layout is None:
        return read()
    outcome: T | Exception
    try:
        outcome, text = read(), ""
    except Exception as error:  # noqa: BLE001 - any error is reported to all ranks
        is_corrupt = isinstance(error, CheckpointCorruptError)
        outcome, text = error, json.dumps([is_corrupt, format_error(error)])
    texts = gather_text(text, state.world, label="load: read files")
    if isinstance(outcome, Exception):
        raise outcome
    for rank, report in enumerate(texts):
        if report:
            is_corrupt, why = json.loads(report)
            kind = CheckpointCorruptError if is_corrupt else CheckpointError
            msg = f"Rank {rank} could not read its files, so no rank loads the state: {why}"
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
    """Return the saved state, with the definition of the given state; call it on all ranks.

    Training resumes at the next sample, on any number of ranks. Under `local_sgd`, for example,
    ranks may have saved different values. On the same number of ranks, each rank gets its own
    values back. On another number of ranks, all ranks get the average. The data must have the
    saved length, batch size, order and fingerprint (a hash of some samples). If other
    parameters are trainable, or if transforms have other options, an `AccelfnWarning` lists the
    differences.

    Args:
        state: provides the model, optimizer, setup, data and world; it is not changed. For
            states that were saved together, pass a dict of all of them. Then `load` returns a
            dict too.
        directory: a directory that `save` wrote.
        allow: the differences to accept. Words for the data are "samples", "batch_size",
            "remainder", "order" and "fingerprint". Other words are "trainable", "options" (of
            transforms), "name", and "opt_state" and "slots" (types and shapes of their values).
        verify: whether to compare every byte with its digest.

    If the model is sharded, either all ranks load or none does: if one rank cannot read a file,
    all ranks raise an error that names the file.

    Cost: reads the files that this rank needs once, and computes their BLAKE3 digests. A sharded
    model adds two small gathers, and a gather of frozen parameters that were saved as hashes.

    Raises:
        CheckpointCorruptError: a file is missing or has changed. The message names the file
            and its first changed tensor.
        CheckpointError: the model, transforms, optimizer, data or world differ from the saved
            run. The message lists the differences, with similar names.
        ArgumentError: `allow` has an unknown word.
    """
    _, states = states_of("af.load(state, directory)", state)
    folder = as_path("af.load(state, directory)", directory, "a directory")

    def open_source(name: str) -> Source:
        check_no_store(folder)
        check_not_joint(folder)
        manifest = read_manifest(folder, name, names=states)
        source = Source(folder=folder / name, manifest=manifest, verify=verify)
        return source_of(states[name], source)

    words = _several(allow)
    try:
        results = {
            name: restore_from(state, partial(open_source, name), words)
            for name, state in states.items()
        }
    except (CheckpointCorruptError, FileNotFoundError) as error:
        if files.is_there(folder):
            raise
        msg = (
            f"{folder} was removed while it was loaded, because a running job removes the older"
            " checkpoints of its store. Load the newest checkpoint:"
            f" af.CheckpointStore({str(folder.parent)!r}).restore(state)."
        )
        raise CheckpointError(msg) from error
    return cast("States", results.get("", results))


def restore_from(
    state: TrainState, open_source: Callable[[], Source], allow: Sequence[str] = ()
) -> TrainState:
    """Return the state from a source, with the definition of the given state.

    Args:
        state: provides the model, optimizer, setup, data and world.
        open_source: returns the source of the saved fields, such as a checkpoint.
        allow: the differences to accept, as in `load`.
    """

    def read() -> tuple[Source, dict[str, Any]]:
        source = open_source()
        check_transforms(state, source)
        check_optimizer(state, source)
        check_data(state, source, allow)
        check_values(state, source, allow)
        return source, source.fields()

    source, fields = read_all_or_none(state, read)
    fields["params"] = {**fields["params"], **kept_of(source, state)}
    warn_of_changes(state, source, allow)
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
    """Load some fields of a saved state into a state; call it on all ranks.

    Some slots depend on the parameters, such as the average of `ema`. If you load the
    parameters without such a slot, and no step has changed the slot, it is created again from
    the loaded parameters. Otherwise it keeps its value, and an `AccelfnWarning` names it. The
    next update checks that all ranks have the same parameters.

    Args:
        state: keeps its values in all other fields; it is not changed.
        directory: a directory that `save` wrote. For states that were saved together, the
            directory of one state, such as `directory/generator`.
        only: the fields to load: "params", "buffers", "opt_state", "step", "cursor", "seed",
            "num_skipped" or "slots", or one slot, such as "slots.ema".
        missing: what to do if the checkpoint lacks a name. "init" keeps the state's value.
        extra: what to do if the state lacks a saved name. "ignore" skips it.
        cast: whether to convert parameters and buffers to the state's dtypes. Conversions from
            float to integer, from complex to real, and of finite to infinite values are errors.
        allow: the differences in the data to accept if you load the cursor, as in `load`.
        verify: whether to compare every byte with its digest.

    Returns: a report. Its `state` is the new state.

    Law: selecting, missing and extra names work as for Python dicts.

    Cost: the same as the cost of `load`.

    Raises: the errors of `load`, for the selected fields.
    """
    call = "af.load_part(state, directory, only)"
    check_state(call, state)
    state.lease.check()
    folder = as_path(call, directory, "a directory")

    request = Wanted(_several(only), missing, extra, cast)

    def read() -> tuple[Source, dict[str, Any]]:
        check_no_store(folder)
        source = source_of(state, attrs.evolve(Source.at(folder), verify=verify))
        if "opt_state" in request.only:
            check_optimizer(state, source)
        if "cursor" in request.only:
            check_data(state, source, _several(allow))
        return source, source.fields()

    source, fields = read_all_or_none(state, read)
    return load_fields(state, source, request, fields)


def _several(words: Sequence[str]) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else tuple(words)
