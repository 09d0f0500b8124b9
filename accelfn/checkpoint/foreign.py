# SPDX-License-Identifier: Apache-2.0
"""Load what another library saved: tensors read in boxes, and the state made of them."""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs
import torch

from accelfn.base.arguments import advise, as_path
from accelfn.base.tree import is_shard
from accelfn.checkpoint.load import Loaded, convert_dtype, differences, read_all_or_none
from accelfn.checkpoint.save import fields_of, optimizer_name, with_fields
from accelfn.checkpoint.slices import Slice, dtensor_like, slice_of
from accelfn.errors import CheckpointCorruptError, CheckpointError
from accelfn.model.optimizer import entries_of
from accelfn.state.state import TrainState, check_state

# Tensors of another library's checkpoint, which are read in boxes.


@attrs.frozen(eq=False)
class Piece:
    """A tensor in files.

    Attributes:
        dtype: the tensor's dtype.
        shape: the full shape.
        read: reads a box of the tensor into new memory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Slice], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Return a piece of a tensor in memory."""

        def read(box: Slice) -> torch.Tensor:
            return box.of(tensor).clone(memory_format=torch.contiguous_format)

        return cls(tensor.dtype, tuple(tensor.shape), read)

    @classmethod
    def of_runs(cls, shape: tuple[int, ...], runs: Sequence[torch.Tensor]) -> Self:
        """Return a piece that concatenates flat tensors.

        Args:
            shape: the full shape.
            runs: the elements in row-major order; at least one tensor.

        Raises:
            CheckpointCorruptError: the number of elements does not fit the shape.
        """
        runs = [run.detach() for run in runs]
        ends = [0, *itertools.accumulate(map(len, runs))]
        if ends[-1] != math.prod(shape):
            msg = f"A tensor of {shape} has {ends[-1]} elements in its files."
            raise CheckpointCorruptError(msg)
        dtype = runs[0].dtype
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]

        def read(box: Slice) -> torch.Tensor:
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


@attrs.frozen(kw_only=True, eq=False)
class Found:
    """The tensors of a saved training.

    Attributes:
        weights: parameters and buffers, by their names in the model.
        entries: the optimizer's tensors and numbers of each parameter, by its name.
        step: the number of updates, if saved.
        strange: names next to the weights that the model lacks.
        left: names of other contents, which are not read.
    """

    weights: Mapping[str, Piece]
    entries: Mapping[str, Mapping[str, Any]]
    step: int | None = None
    strange: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def load_found(
    call: str,
    state: TrainState,
    directory: str | os.PathLike[str],
    find: Callable[[Path], Found],
    *,
    strict: bool,
) -> Loaded:
    """Return a report with a state of the tensors that are found in a folder; a collective.

    Args:
        call: the caller, for errors.
        state: provides model, optimizer, setup and world; it is not changed.
        directory: the folder.
        find: returns what the folder has.
        strict: False only warns about names that are missing or unexpected.

    Raises:
        CheckpointError: names, shapes or the optimizer differ.
    """
    check_state(call, state)
    state.lease.check()
    folder = as_path(call, directory, "a folder")

    def read() -> tuple[dict[str, Any], Loaded]:
        return _read_fields(state, folder, find(folder), strict=strict)

    fields, report = read_all_or_none(state, read)
    own_names = {transform.name for transform in state.setup}
    slots = {name: slot for name, slot in state.slots.items() if name not in own_names}
    after = with_fields(state, {**fields, "slots": slots})
    return attrs.evolve(report, state=after.with_setup(state.setup))


def _read_fields(
    state: TrainState, folder: Path, source: Found, *, strict: bool
) -> tuple[dict[str, Any], Loaded]:
    """Read the fields of the new state, and return them with the report."""
    aliases = state.definition.skeleton.aliases
    weights = {aliases.get(n, n): weight for n, weight in source.weights.items()}
    entries = {aliases.get(n, n): entry for n, entry in source.entries.items()}
    persistent = state.definition.skeleton.persistent
    targets = {
        **state.params,
        **{n: b for n, b in state.buffers.items() if n in persistent},
    }
    _check_names(folder, targets, weights, source.strange, strict=strict)
    _check_kept(state, entries, folder)
    cast: dict[str, str] = {}

    def values(name: str, field: str, piece: Piece, old: torch.Tensor) -> torch.Tensor:
        return _place_piece(f"{folder}: {name}", f"{field}.{name}", piece, old, cast)

    current = fields_of(state.copy())
    params, buffers = dict(current["params"]), dict(current["buffers"])
    for field, table in (("params", params), ("buffers", buffers)):
        for name in [name for name in table if name in weights]:
            table[name] = values(name, field, weights[name], table[name])
    opt_state = {
        name: {
            key: _entry(f"{folder}: {key} of {name}", key, value, params[name])
            for key, value in entry.items()
        }
        for name, entry in entries.items()
        if name in params
    }
    fields = {**current, "params": params, "buffers": buffers}
    if opt_state:
        fields["opt_state"] = opt_state
    counts = [int(entry["step"]) for entry in opt_state.values() if "step" in entry]
    step = max(counts, default=None) if source.step is None else source.step
    if step is not None:
        fields["step"], fields["num_skipped"] = step, 0
    if source.step is None and len({*counts}) > 1:
        advise(
            f"af.import_state: {folder} counts {min(counts)} to {max(counts)} updates of the"
            f" parameters, as if some were thawed later. state.step is the largest, {step},"
            " which is what a schedule needs if a parameter was trained from the beginning."
        )
    missing = [
        *(n for n in targets if n not in weights),
        *([] if opt_state else ["opt_state"]),
        *([] if step is not None else ["step"]),
    ]
    report = Loaded(
        state=state,
        loaded=(
            *(f"params.{n}" for n in params if n in weights),
            *(f"buffers.{n}" for n in buffers if n in weights),
            *(f"opt_state.{n}" for n in opt_state),
        ),
        missing=tuple(missing),
        unexpected=(*source.strange, *source.left),
        cast=cast,
    )
    return fields, report


def _check_names(
    folder: Path,
    targets: Mapping[str, torch.Tensor],
    weights: Mapping[str, Piece],
    extra_names: Iterable[str],
    *,
    strict: bool,
) -> None:
    """Reject tensors that do not fit the model, or warn about them.

    Raises:
        CheckpointError: shapes or kinds of numbers differ, or names if `strict` is true.
    """
    placeholders = {
        n: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        for n, weight in weights.items()
    }
    placeholders |= {n: torch.empty(0, device="meta") for n in extra_names}
    diff = differences(placeholders, targets)
    other = {n: how for n, how in diff.dtypes.items() if n in diff.uncastable}
    diff = attrs.evolve(diff, dtypes=other)
    message = diff.describe(str(folder))
    if diff.shapes or diff.dtypes or (diff and strict):
        raise CheckpointError(message)
    if diff:
        advise(message)


def _place_piece(
    where: str, name: str, piece: Piece, old: torch.Tensor, cast: dict[str, str]
) -> torch.Tensor:
    """Read this rank's part of a piece in the state's dtype, on its device."""
    place = slice_of(old) or Slice.whole(old.shape)
    values = piece.read(place)
    if values.dtype != old.dtype:
        cast[name] = f"{values.dtype} to {old.dtype}"
        values = convert_dtype(values, old.dtype, where)
    return dtensor_like(values, old) if is_shard(old) else values.to(old.device)


def _entry(where: str, key: str, value: Any, param: torch.Tensor) -> Any:
    """Return an optimizer's entry of a parameter in the form that torch's optimizers load."""
    if not isinstance(value, Piece):
        return value
    if value.shape == tuple(param.shape) and key != "step":
        return _place_piece(where, key, value, param, {})
    values = value.read(Slice.whole(value.shape))
    if key == "step":
        return values
    return values.to(param.device, param.dtype if param.is_floating_point() else None)


def _check_kept(
    state: TrainState, entries: Mapping[str, Mapping[str, Any]], folder: Path
) -> None:
    """Reject entries of another optimizer, if the state's is one of torch's.

    Raises:
        CheckpointError: the entries differ, or belong to parameters that the model lacks.
    """
    unknown = sorted(entries.keys() - state.params.keys())
    if unknown:
        msg = f"{folder}: an optimizer's {unknown[:5]} are no parameters of the model."
        raise CheckpointError(msg)
    fresh_entries = entries_of(state.definition.optimizer, state.definition.skeleton)
    for name, entry in entries.items():
        fresh = fresh_entries.get(name)
        if fresh is not None and fresh.keys() != entry.keys():
            msg = (
                f"{folder} has {sorted(entry)} of {name!r}, and {optimizer_name(state)}, the"
                f" state's optimizer, keeps {sorted(fresh)}: it is another optimizer's, or its"
                " options differ. Load the weights alone, with af.import_model."
            )
            raise CheckpointError(msg)
