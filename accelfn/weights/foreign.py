# SPDX-License-Identifier: Apache-2.0
"""Read the fields of a state from another library's files; sharded tensors are read in slices."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import attrs
import torch

from accelfn import TrainState
from accelfn.errors import CheckpointCorruptError, CheckpointError
from accelfn.plug import arguments, load, optimizer, save, slices, tree

# Tensors in the checkpoint of another library. A rank can read only a slice of a tensor.


@attrs.frozen(eq=False)
class Piece:
    """A tensor in the files of another library.

    Attributes:
        dtype: the tensor's dtype.
        shape: the tensor's full shape.
        read: a function of a slice that reads the slice into new memory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[slices.Slice], torch.Tensor]

    @classmethod
    def of_runs(cls, shape: tuple[int, ...], runs: Sequence[torch.Tensor]) -> Self:
        """Return a `Piece` for a tensor that is saved as several flat tensors.

        Args:
            shape: the tensor's full shape.
            runs: one or more flat tensors; together they have the elements in row-major order.

        Raises:
            CheckpointCorruptError: the number of elements does not fit the shape.
        """
        runs = [run.detach() for run in runs]
        ends = [0, *itertools.accumulate(map(len, runs))]
        if ends[-1] != math.prod(shape):
            msg = f"A tensor of shape {shape} has {ends[-1]} elements in the files."
            raise CheckpointCorruptError(msg)
        dtype = runs[0].dtype
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]

        def read(box: slices.Slice) -> torch.Tensor:
            if not box.count:
                return torch.empty(box.size, dtype=dtype)
            begin = sum(map(math.prod, zip(box.offset, strides, strict=True)))
            last = (n - 1 for n in box.size)
            end = begin + sum(map(math.prod, zip(last, strides, strict=True))) + 1
            parts = [
                run[max(begin - at, 0) : end - at]
                for at, run in zip(ends, runs, strict=False)
                if at < end and at + len(run) > begin
            ]
            return torch.cat(parts).as_strided(box.size, strides).contiguous()

        return cls(dtype, shape, read)


Saved: TypeAlias = Piece | torch.Tensor
"""A saved tensor: in files, or in memory."""


def _read(value: Saved, box: slices.Slice) -> torch.Tensor:
    """Read a slice of a saved tensor into new memory."""
    if isinstance(value, Piece):
        return value.read(box)
    return box.of(value).clone(memory_format=torch.contiguous_format)


@attrs.frozen(kw_only=True, eq=False)
class Found:
    """The contents of a folder that another library saved.

    Attributes:
        weights: parameters and buffers, by their names in the saved model.
        entries: the optimizer's state of each parameter, by the parameter's name.
        step: the number of updates; None if it was not saved.
        prefix: the prefix of the names of weights in the files.
        left: names of other saved values, which accelfn does not read.
    """

    weights: Mapping[str, Saved]
    entries: Mapping[str, Mapping[str, Any]]
    step: int | None = None
    prefix: str = ""
    left: tuple[str, ...] = ()


def read_fields(
    state: TrainState, folder: Path, source: Found, *, strict: bool
) -> tuple[dict[str, Any], load.Loaded]:
    """Read the fields of the new state, and return them with a report.

    Args:
        state: provides the model, optimizer, setup and world; it is not changed.
        folder: the folder's name in errors.
        source: the contents of the folder.
        strict: whether missing or unexpected names are an error. False only warns.

    Raises:
        CheckpointError: names, shapes or the optimizer differ.
    """
    aliases = state.definition.skeleton.aliases
    weights = {aliases.get(n, n): weight for n, weight in source.weights.items()}
    entries = {aliases.get(n, n): entry for n, entry in source.entries.items()}
    model_names = {*state.params, *state.buffers}
    strange = [source.prefix + n for n in weights if n not in model_names]
    weights = {n: weight for n, weight in weights.items() if n in model_names}
    persistent = state.definition.skeleton.persistent
    buffers = {n: b for n, b in state.buffers.items() if n in persistent}
    targets = {**state.params, **buffers}
    _check_names(folder, targets, weights, strange, strict=strict)
    _check_kept(state, entries, folder)
    fields = save.fields_of(state.copy())
    loaded_names, cast = list[str](), dict[str, str]()
    for field in ("params", "buffers"):
        fields[field] = table = dict(fields[field])
        for name in filter(weights.__contains__, table):
            where, key = f"{folder}: {name}", f"{field}.{name}"
            table[name] = _place(where, key, weights[name], table[name], cast)
            loaded_names.append(key)
    opt_state = {
        name: {
            key: _entry(
                f"{folder}: {key} of {name}", key, value, fields["params"][name]
            )
            for key, value in entry.items()
        }
        for name, entry in entries.items()
    }
    if opt_state:
        fields["opt_state"] = opt_state
    counts = [int(entry["step"]) for entry in opt_state.values() if "step" in entry]
    step = max(counts, default=None) if source.step is None else source.step
    if step is not None:
        fields["step"], fields["num_skipped"] = step, 0
    if source.step is None and len({*counts}) > 1:
        arguments.advise(
            f"af.import_state: in {folder}, parameters have from {min(counts)} to {max(counts)}"
            " updates, perhaps because some were unfrozen later. state.step is now the largest"
            f" number, {step}, which is right if some parameter was trained from the start."
        )
    own_names = {transform.name for transform in state.setup}
    fields["slots"] = {n: s for n, s in state.slots.items() if n not in own_names}
    missing = [n for n in targets if n not in weights]
    missing += [] if opt_state else ["opt_state"]
    missing += [] if step is not None else ["step"]
    report = load.Loaded(
        state=state,
        loaded=(*loaded_names, *(f"opt_state.{n}" for n in opt_state)),
        missing=tuple(missing),
        unexpected=(*strange, *source.left),
        cast=cast,
    )
    return fields, report


def _check_names(
    folder: Path,
    targets: Mapping[str, torch.Tensor],
    weights: Mapping[str, Saved],
    extra_names: Iterable[str],
    *,
    strict: bool,
) -> None:
    """Check that saved weights fit the model; if `strict` is false, only warn about names.

    Raises:
        CheckpointError: shapes differ, dtypes cannot be converted, or, if `strict` is true,
            names differ.
    """
    placeholders = {
        n: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        for n, weight in weights.items()
    }
    placeholders |= {n: torch.empty(0, device="meta") for n in extra_names}
    diff = load.differences(placeholders, targets)
    other = {n: how for n, how in diff.dtypes.items() if n in diff.uncastable}
    diff = attrs.evolve(diff, dtypes=other)
    message = diff.describe(str(folder))
    if diff.shapes or diff.dtypes or (diff and strict):
        raise CheckpointError(message)
    if diff:
        arguments.advise(message)


def _place(
    where: str, name: str, value: Saved, old: torch.Tensor, cast: dict[str, str]
) -> torch.Tensor:
    """Read this rank's slice of a saved tensor, and convert it to the state's dtype and device.

    Args:
        where: the name of the tensor in errors.
        name: the name of the tensor in the report.
        value: the saved tensor.
        old: the state's tensor.
        cast: a dict; this function adds an entry for a converted dtype.
    """
    values = _read(value, slices.slice_of(old) or slices.Slice.whole(old.shape))
    if values.dtype != old.dtype:
        cast[name] = f"{values.dtype} to {old.dtype}"
        values = load.convert_dtype(values, old.dtype, where)
    if tree.is_shard(old):
        return slices.dtensor_like(values, old)
    return values.to(old.device)


def _entry(where: str, key: str, value: Any, param: torch.Tensor) -> Any:
    """Return a saved optimizer value of a parameter with torch's device, dtype and sharding."""
    if not isinstance(value, Saved):
        return value
    if value.shape == tuple(param.shape) and key != "step":
        return _place(where, key, value, param, {})
    values = _read(value, slices.Slice.whole(value.shape))
    if key == "step":
        return values
    return values.to(param.device, param.dtype if param.is_floating_point() else None)


def _check_kept(
    state: TrainState, entries: Mapping[str, Mapping[str, Any]], folder: Path
) -> None:
    """Check that saved optimizer state has the entries of the state's optimizer.

    The entries are known only for torch's own optimizers.

    Raises:
        CheckpointError: entries differ, or belong to parameters that the model does not have.
    """
    unknown = sorted(entries.keys() - state.params.keys())
    if unknown:
        msg = (
            f"{folder} has the optimizer state of parameters that this model lacks:"
            f" {arguments.list_names(unknown)}. Create the state with a model"
            " that has the saved model's parameters."
        )
        raise CheckpointError(msg)
    fresh_entries = optimizer.entries_of(
        state.definition.optimizer, state.definition.skeleton
    )
    for name, entry in entries.items():
        fresh = fresh_entries.get(name)
        if fresh is not None and fresh.keys() != entry.keys():
            msg = (
                f"{folder} has {arguments.list_names(sorted(entry))} for {name!r}, but this state's"
                f" optimizer, {save.optimizer_name(state)}, has"
                f" {arguments.list_names(sorted(fresh))}. The saved"
                " optimizer was another one, or had other options. Create the state with"
                " it, or load only the weights with af.import_model."
            )
            raise CheckpointError(msg)
