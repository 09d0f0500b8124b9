# SPDX-License-Identifier: Apache-2.0
"""Convert a state's values to and from ZeRO's sharded flat tensors.

For each parameter group, or a part of a group, ZeRO keeps a flat tensor with this rank's elements,
which the optimizer updates. Other transforms and checkpoints expect the same values by parameter
name, sharded by rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import attrs
import torch

from accelfn import World, all_to_all
from accelfn.errors import OptimizerError, StateError
from accelfn.plug import Layout, optimizer, tree

# `redistribute`: send elements of parameters between ranks, to change their sharding.
#
# A rank has a contiguous range of the elements of each flattened parameter, called a run: its
# rows in a state, or its ZeRO shard in DeepSpeed. Runs follow from shapes, so each rank knows the
# runs of all ranks, and only elements are sent.


OptState: TypeAlias = dict[str, dict[str, Any]]
Run: TypeAlias = tuple[int, int]
"""The start and end of a range of elements of a flattened parameter."""
Runs: TypeAlias = Mapping[str, Sequence[Run]]
"""By parameter name: the run of each rank."""

_AT_ONCE = 2**25
"""How many bytes of full tensors to redistribute in one collective."""


def cut_of(run: Run, within: Run) -> Run:
    """Return the overlap of two runs (ranges of elements); the overlap may be empty."""
    begin = max(run[0], within[0])
    return begin, max(begin, min(run[1], within[1]))


def evenly(count: int, part: int, ranks: int) -> list[Run]:
    """Return each rank's run (range of elements), if runs of `part` elements cover `count`."""
    return [cut_of((r * part, (r + 1) * part), (0, count)) for r in range(ranks)]


def row_runs(shape: torch.Size, ranks: int, *, is_cut: bool) -> list[Run]:
    """Return each rank's run in a state: its rows if they are sharded, or all elements."""
    if not is_cut:
        return [(0, shape.numel())] * ranks
    rows = -(-shape[0] // ranks)
    return evenly(shape.numel(), rows * shape[1:].numel(), ranks)


def redistribute(
    pieces: Mapping[str, torch.Tensor],
    have: Runs,
    want: Runs,
    among: World,
    *,
    label: str,
) -> dict[str, torch.Tensor]:
    """Send elements between ranks; return the elements that this rank needs, in new memory.

    All ranks must call this function.

    Args:
        pieces: by parameter name, the elements that this rank has, flattened. The dtype must be
            the same on all ranks.
        have: the runs that each rank has. If several ranks have an element, the first of them
            sends it.
        want: the runs that each rank needs.
        among: the ranks that exchange elements.
        label: the name of the collective in error messages.
    """
    result: dict[str, torch.Tensor] = {}
    for names in _by_calls(pieces, have):
        outbox = [
            {
                name: _overlap(pieces[name], have[name], among.rank, want[name][to])
                for name in names
            }
            for to in range(among.size)
        ]
        got = all_to_all(outbox, among, label=label)
        for name in names:
            parts = [piece[name] for piece in got if piece[name].numel()]
            result[name] = torch.cat(parts) if parts else got[0][name]
    return result


def _overlap(
    piece: torch.Tensor, runs: Sequence[Run], rank: int, want: Run
) -> torch.Tensor:
    """Return the elements of a parameter that this rank sends to a rank that needs `want`."""
    begin, end = runs[rank]
    for earlier in runs[:rank]:  # an earlier rank with the same elements sends them
        if earlier[0] < earlier[1] and begin < end:
            begin = max(begin, min(end, earlier[1]))
    low, high = cut_of(want, (begin, end))
    return piece[low - runs[rank][0] : high - runs[rank][0]]


def _by_calls(pieces: Mapping[str, torch.Tensor], have: Runs) -> Iterator[list[str]]:
    """Yield lists of parameter names; each list is sent in one collective on all ranks."""
    names: list[str] = []
    total = 0
    for name, piece in pieces.items():
        size = have[name][-1][1] * piece.element_size()
        if names and total + size > _AT_ONCE:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names


_TO_ROWS, _TO_FLATS = "ZeRO: read a state", "ZeRO: take over a state"


@attrs.frozen
class Place:
    """Where a parameter is in ZeRO's flat tensors.

    Attributes:
        flat: the index of the flat tensor.
        offset: the offset of this rank's elements in the flat tensor.
        runs: the elements of the parameter that each rank has.
    """

    flat: int
    offset: int
    runs: Sequence[Run]


@attrs.frozen(eq=False)
class Flats:
    """Where all trained parameters are in flat tensors, and conversions to and from them.

    Attributes:
        places: the place of each parameter, by name.
        sizes: the number of elements, including padding, of each flat tensor on this rank.
        device: the device of flat tensors.
        layout: how the state shards its parameters by rows.
        ranks: the ranks that share the flat tensors.
    """

    places: Mapping[str, Place]
    sizes: Sequence[int]
    device: torch.device
    layout: Layout
    ranks: World

    @cached_property
    def rows(self) -> Runs:
        """By parameter name: the run of each rank in a state."""
        shapes, cuts, ranks = self.layout.shapes, self.layout.cuts, self.ranks.size
        return {n: row_runs(shapes[n], ranks, is_cut=n in cuts) for n in self.places}

    @property
    def cuts(self) -> Runs:
        """By parameter name: the run of each rank in ZeRO."""
        return {name: place.runs for name, place in self.places.items()}

    def names_of(self, flat: int) -> list[str]:
        """Return the names of the parameters in a flat tensor."""
        return [name for name, place in self.places.items() if place.flat == flat]

    def read(self, flats: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert flat tensors to values by parameter name, sharded by rows; a collective."""
        pieces: dict[str, torch.Tensor] = {}
        for name, place in self.places.items():
            if place.flat in flats:
                begin, end = place.runs[self.ranks.rank]
                flat = flats[place.flat].detach()
                piece = flat[place.offset : place.offset + end - begin]
                # the optimizer's shard may be on another device
                pieces[name] = piece.to(self.layout.device)
        rows = redistribute(pieces, self.cuts, self.rows, self.ranks, label=_TO_ROWS)
        return {name: self._value(name, piece) for name, piece in rows.items()}

    def _value(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        shape = self.layout.shapes[name]
        if name not in self.layout.cuts:
            return piece.view(shape)
        part = piece.view(-1, *shape[1:])
        like = torch.empty(shape, dtype=piece.dtype, device="meta")
        full = tree.pad_part(part, self.layout.room(name, shape))
        return self.layout.held(name, full, like)

    def to_flats(self, values: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Convert values by parameter name, sharded by rows, to flat tensors; a collective."""
        pieces = {n: tree.local(v).detach().reshape(-1) for n, v in values.items()}
        parts = redistribute(pieces, self.rows, self.cuts, self.ranks, label=_TO_FLATS)
        flats: dict[int, torch.Tensor] = {}
        for name, part in parts.items():
            place = self.places[name]
            if place.flat not in flats:
                size, device = self.sizes[place.flat], self.device
                flats[place.flat] = part.new_zeros(size, device=device)
            flats[place.flat][place.offset : place.offset + part.numel()] = part
        return flats


@attrs.define(eq=False, repr=False)
class Flat(Mapping[str, Any]):
    """A field of a state in flat tensors, converted to rows by parameter name when read.

    Attributes:
        field: the name of the field, for errors.
        where: where trained parameters are in the flat tensors.
        content: the flat tensors by index, which a step changes in place. For optimizer state, the
            optimizer's entries, by the key of a flat tensor or group, or by the name of a frozen
            parameter.
        plain: the values that are not converted, such as frozen parameters, by name.
        names: all names, in order.
        convert: converts the other values; a collective.
    """

    field: str
    where: Flats
    content: Any
    plain: Mapping[str, Any] = attrs.field(kw_only=True)
    names: Sequence[str] = attrs.field(kw_only=True)
    convert: Callable[[], dict[str, Any]] = attrs.field(kw_only=True)
    _rows: dict[str, Any] | None = attrs.field(default=None, init=False)
    _versions: dict[str, int] = attrs.field(factory=dict, init=False)

    def __getitem__(self, name: str) -> Any:
        """Return a value; the first read converts all values, which is a collective."""
        if name in self.plain:
            return self.plain[name]
        if self._rows is None:
            with torch.no_grad():
                self._rows = self.convert()
            self._versions = self._count_writes()
        return self._rows[name]

    def __contains__(self, name: object) -> bool:
        """Return whether a value has this name; this does not convert values."""
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.names)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.names)

    def mark_changed(self) -> None:
        """Drop converted values after a step changed the flat tensors."""
        self._rows = None

    def _count_writes(self) -> dict[str, int]:
        """Return how often each converted tensor was written in place."""
        values: dict[str, Any] = {}
        for name, row in (self._rows or {}).items():
            entry = row if isinstance(row, dict) else {}
            values |= {f"{name}.{key}": value for key, value in entry.items()}
            values[name] = row
        tensors = {n: t for n, t in values.items() if isinstance(t, torch.Tensor)}
        # a write to a DTensor increments the DTensor's version; a write to the local shard
        # increments the shard's version
        return {n: t._version + tree.local(t)._version for n, t in tensors.items()}

    def check_read(self) -> None:
        """Check that no converted value was written in place: flat tensors do not change with it.

        Raises:
            StateError: a value was written in place.
        """
        now = self._count_writes()
        names = [name for name in now if now[name] != self._versions[name]]
        if names:
            msg = (
                f"state.{self.field}: {', '.join(names[:5])} were changed in place. Under"
                " af.wrap_deepspeed these tensors are copies, so DeepSpeed would not see the"
                " change. Use state = state.with_params(...), or change the state before its"
                " first step."
            )
            raise StateError(msg)


def flat_params(
    names: Iterable[str],
    where: Flats,
    flats: Mapping[int, torch.Tensor],
    frozen: Mapping[str, torch.Tensor],
) -> Flat:
    """Return a state's parameters in flat tensors; `names` are those of all parameters."""
    names, convert = tuple(names), partial(where.read, flats)
    return Flat("params", where, flats, plain=frozen, names=names, convert=convert)


def flat_opt_state(where: Flats, state: OptState) -> Flat:
    """Return a state's optimizer state in flat tensors, whose entries are `state`."""
    keys = [flat_key(i) for i in range(len(where.sizes))]
    names = [n for i, key in enumerate(keys) if key in state for n in where.names_of(i)]
    plain = {key: entry for key, entry in state.items() if key not in keys}
    convert = partial(_read_entries, where, state, names)
    return Flat(
        "opt_state", where, state, plain=plain, names=(*names, *plain), convert=convert
    )


def _read_entries(where: Flats, state: OptState, names: Iterable[str]) -> OptState:
    """Convert the entries of flat tensors to entries by parameter name; a collective."""
    rows = {name: dict[str, Any]() for name in names}
    by_key: dict[str, dict[int, torch.Tensor]] = {}
    for i, size in enumerate(where.sizes):
        for key, value in state.get(flat_key(i), {}).items():
            if isinstance(value, torch.Tensor) and value.shape == (size,):
                by_key.setdefault(key, {})[i] = value
                continue
            # a value that is not elementwise, such as a count: copy it for each parameter
            for name in where.names_of(i):
                rows[name][key] = tree.clone(value)
    for key in sorted(by_key):
        for name, value in where.read(by_key[key]).items():
            rows[name][key] = value
    return rows


def flat_key(index: int) -> str:
    """Return the key of a flat tensor's optimizer entry."""
    return f"<flat {index}>"


def flatten_opt_state(
    where: Flats, opt_state: Mapping[str, Mapping[str, Any]]
) -> OptState:
    """Convert optimizer state by parameter name to state by flat tensor; a collective.

    Raises:
        OptimizerError: parameters in the same flat tensor have different update counts, or only
            some of them have optimizer state.
    """
    out: OptState = {k: dict(e) for k, e in opt_state.items() if k not in where.places}
    by_key: dict[str, dict[str, torch.Tensor]] = {}
    for i in range(len(where.sizes)):
        names = where.names_of(i)
        entries = {name: opt_state[name] for name in names if name in opt_state}
        if not entries:
            continue
        # choose a parameter with dims, because a count has the shape of a scalar parameter
        lead = max(entries, key=lambda name: len(where.layout.shapes[name]))
        _check_alike(names, entries, lead, where)
        out[flat_key(i)] = {}
        for key, value in entries[lead].items():
            if _has_shape(key, value, lead, where):
                values = {name: entry[key] for name, entry in entries.items()}
                by_key.setdefault(key, {}).update(values)
            else:
                out[flat_key(i)][key] = tree.clone(value)
    for key in sorted(by_key):
        for i, flat in where.to_flats(by_key[key]).items():
            out[flat_key(i)][key] = flat
    return out


def _has_shape(key: str, value: Any, name: str, where: Flats) -> bool:
    """Return whether a value has its parameter's shape, and is not a count of updates."""
    if not isinstance(value, torch.Tensor) or optimizer.is_count(key, value):
        return False
    return value.shape == where.layout.shapes[name]


def _check_alike(
    names: Sequence[str],
    entries: Mapping[str, Mapping[str, Any]],
    first: str,
    where: Flats,
) -> None:
    one = entries[first]
    shared = [key for key in one if not _has_shape(key, one[key], first, where)]
    for name in names:
        entry = entries.get(name, {})
        is_alike = entry.keys() == one.keys() and name in entries
        if name != first and not (
            is_alike and all(bool(one[key] == entry[key]) for key in shared)
        ):
            reason = "another number of" if name in entries else "fewer"
            msg = (
                "DeepSpeed keeps one optimizer state for all parameters of a group, but"
                f" {name!r} has {reason} updates than {first!r} in the same group. Put"
                " parameters that you unfreeze later in separate groups, or use af.wrap_fsdp()."
            )
            raise OptimizerError(msg)
