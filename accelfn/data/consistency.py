# SPDX-License-Identifier: Apache-2.0
"""Whether ranks that share data hold the same samples, in the same order.

A split that each rank drew for itself, or files in the order of a folder, give ranks other
samples at the same index: some are then seen twice, others never, and nothing else shows it.
So ranks tell one another what they find at a few indices.

Samples that a dataset draws with a generator of its own differ wherever they are read. They
are told from others by being read again, which is done only where ranks have found a
difference; what differs within a rank is no difference between ranks.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from torch.utils.data import Subset

from accelfn.base import tree
from accelfn.base.arguments import advise
from accelfn.collectives import (
    check_rows,
    first_difference,
    gather_text,
    is_same_text,
)
from accelfn.data.epoch import (
    bytes_of,
    epoch_of,
    form_of,
    places_of,
    sample_at,
)
from accelfn.data.loaders import skip_seeding
from accelfn.data.order import Sequential, Shuffled
from accelfn.data.sources import Items, Joined, Rows, Source
from accelfn.errors import BatchError, ReplicaMismatchError
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.data.dataset import Data

_BYTES = 1 << 22
"""As much of a dataset made of tensors is compared."""
_INDICES = 1 << 16
"""As many of a Subset's indices are."""
_AGAIN = 4
"""How often samples are read again where ranks differ."""

_SAMPLE, _FAILED = "sample ", "cannot be read: "

_LABEL = "compare data"

Seen: TypeAlias = dict[str, dict[str, list[str | None]]]
"""Of each dataset, and each thing seen of it, a digest a leaf; None where it changes."""


class Looks:
    """What this process sees of a dataset at a few indices; read when it is first asked."""

    def __init__(self, source: Source) -> None:
        """Take what samples are read from."""
        self._source = source
        self._reads: list[Seen] = []

    def seen(self) -> Seen:
        """Return what was the same each time that it was read."""
        self._read(1)
        return {
            part: {
                what: _same([each[part][what] for each in self._reads])
                for what in found
            }
            for part, found in self._reads[0].items()
        }

    def look_again(self) -> None:
        """Read samples some more times, so that what changes by itself is known."""
        self._read(1 + _AGAIN)

    def _read(self, times: int) -> None:
        while len(self._reads) < times:
            self._reads.append(dict(_looked_at(self._source, "")))


def check_readers(data: "Data", world: World) -> None:
    """Raise unless all ranks read alike, where they meet as they read.

    A rank that reads otherwise meets the others when its state is built, before its first
    update: the calls are one, and what each says of its data comes first in both.

    Cost: where ranks meet to read, a small all-reduce as reading begins; else none.

    Raises:
        ReplicaMismatchError: they do not; the option is named, a row a rank.
    """
    if data.sharded or data.dispatch:
        check_definition_rows(readers_told(data), world)


def check_definition_rows(rows: dict[str, str], world: World) -> None:
    """Raise unless all ranks say the same of what they train with, and how they read.

    Raises:
        ReplicaMismatchError: they do not; the first difference is named, a row a rank.
    """
    check_rows(
        rows,
        world,
        label="compare definitions",
        advice=(
            "Such ranks would drift apart in silence. Give TrainState.create the same setup,"
            " optimizer, schedule, seed and data on all of them."
        ),
    )


def readers_told(data: "Data | None") -> dict[str, str]:
    """Return who reads for whom, as ranks tell one another."""
    told = {"sharded": data is not None and data.sharded}
    told["dispatch"] = data is not None and data.dispatch
    return {f"data, {name}": str(value) for name, value in told.items()}


def check_alike(data: "Data", looks: Looks | None, world: World) -> None:
    """Raise unless all ranks hold the same samples in the same order, and batch them alike.

    Data that name themselves, `fingerprint=`, are compared by name; streams by how they are
    batched.

    Args:
        data: that ranks share.
        looks: what is seen of its samples; None of a stream.
        world: whose ranks share them.

    Cost: one small all-reduce, and eight samples are read once for each `Data`. Of a
    dataset made of tensors up to 4 MiB are read, and of a Subset up to 65,536 indices. Where
    ranks differ, samples are read four times more.

    Raises:
        ReplicaMismatchError: they do not; the first difference is named, a row a rank.
    """
    if world.size == 1:
        return
    form, looks = _form(data, looks)
    if is_same_text(_describe_view(form, looks), world, label=_LABEL):
        return
    if looks is not None:
        looks.look_again()
    told = gather_text(_describe_view(form, looks), world, label=_LABEL)
    tables = [json.loads(each) for each in told]
    rows = _rows_of([found or {} for _, found in tables])
    named = [[f"{k}: {v}" for k, v in each.items()] for each, _ in tables]
    differing = first_difference([a + b for a, b in zip(named, rows, strict=True)])
    if differing is not None:
        msg = (
            "The ranks hold data that differ; this is the first of what"
            f" differs:\n{differing}\nThey would see some samples twice and others never."
            " Make the dataset alike on all ranks: give random_split a generator with a"
            " seed, and sort what a folder lists. Where samples differ on purpose, give the"
            ' data a name: af.Data(..., fingerprint="...").'
        )
        raise ReplicaMismatchError(msg)


def are_alike(data: "Data", looks: Looks | None, world: World) -> bool:
    """Return whether all ranks are seen to hold the same samples; of streams nothing is.

    Cost: as `check_alike` where ranks agree.
    """
    form, looks = _form(data, looks)
    alike = is_same_text(_describe_view(form, looks), world, label=_LABEL)
    return alike and (looks is not None or data.fingerprint is not None)


def _form(data: "Data", looks: Looks | None) -> tuple[dict[str, str], Looks | None]:
    """Return how data is batched, and its name if it has one, instead of its looks."""
    form = {f"data, {name}": str(each) for name, each in form_of(data).items()}
    form |= readers_told(data)
    if data.fingerprint is None and looks is not None:
        return form, looks
    return form | {"data, fingerprint": str(data.fingerprint)}, None


def _describe_view(form: dict[str, str], looks: Looks | None) -> str:
    """Return what this rank sees, as ranks tell one another."""
    return json.dumps([form, looks and looks.seen()])


def order_told(data: "Data", seed: int) -> dict[str, str]:
    """Return a digest of the first epoch's order, where more than the seed decides it."""
    pure = type(data.ordering) in (Sequential, Shuffled)
    if data.is_stream or (pure and isinstance(data.batch_size, int)):
        return {}
    epoch = epoch_of(data, seed=seed, number=0)
    order = epoch.order(_spread_indices(epoch.num_samples, _INDICES))
    spans = np.array(list(islice(epoch.cut.spans(0), _INDICES)))
    found = _digest(order.tobytes() + spans.tobytes()).hex()
    return {"data, order of the first epoch": found}


def _looked_at(
    source: Source, part: str
) -> Iterator[tuple[str, dict[str, list[str | None]]]]:
    """Yield what is seen of each dataset that a source is made of."""
    if isinstance(source, Joined):
        for name, each in enumerate(source.parts):
            yield from _looked_at(each, f"{part}dataset {name}, ")
        return
    found = {
        f"{_SAMPLE}{place}": _leaves(lambda place=place: sample_at(source, place))
        for place in places_of(source)
    }
    for name, read in _in_memory(source):
        found[name] = _leaves(read)
    yield part, found


def _in_memory(source: Source) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what of a source can be seen without reading samples one by one."""
    if isinstance(source, Rows):
        size = sum(t[:1].nbytes for t in tree.tensor_leaves(source.tensors))
        rows = _spread_indices(len(source), max(1, _BYTES // max(1, size)))
        yield f"{len(rows)} of its rows", lambda: source.batch(rows, skip_seeding)
    dataset: Any = source.dataset if isinstance(source, Items) else None
    while isinstance(dataset, Subset):
        indices: Any = dataset.indices
        where = _spread_indices(len(indices), _INDICES).tolist()
        picked = np.array([int(indices[i]) for i in where], np.int64)
        yield "indices of the Subset", lambda picked=picked: picked
        dataset = dataset.dataset


def _spread_indices(n: int, count: int) -> Any:
    return np.linspace(0, n - 1, min(n, count)).astype(np.int64)


def _leaves(read: Callable[[], Any]) -> list[str | None]:
    """Return a digest a leaf; of what cannot be read, the error."""
    try:
        value = read()
    except Exception as error:  # noqa: BLE001 - who trains on it is told
        return [f"{_FAILED}{type(error).__name__}"]
    return [_digest(bytes_of(leaf)).hex() for leaf in tree.tree_leaves(value)]


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _same(reads: list[list[str | None]]) -> list[str | None]:
    """Return what was the same each time; nothing where the number of leaves was not."""
    found = [each for each in reads if not _has_failed(each)] or reads
    if len({len(each) for each in found}) > 1:
        return []
    return [
        first if all(first == each for each in others) else None
        for first, *others in zip(*found, strict=True)
    ]


def _has_failed(leaves: list[str | None]) -> bool:
    return len(leaves) == 1 and (leaves[0] or "").startswith(_FAILED)


def _rows_of(tables: list[Seen]) -> list[list[str]]:
    """Return a line for everything that each rank saw, without what changes by itself.

    A leaf that changes in one sample, on one rank, is drawn: it tells nothing in any.
    """
    drawn: dict[str, set[int]] = {}
    shapeless: set[str] = set()
    for part, leaves in (row for table in tables for row in _samples(table)):
        changing = {i for i, each in enumerate(leaves) if each is None}
        drawn[part] = drawn.get(part, set()) | changing
        if not leaves:
            shapeless.add(part)

    def kept(part: str, what: str, leaves: list[str | None]) -> str:
        if not what.startswith(_SAMPLE):
            return " ".join(each or "" for each in leaves)
        if part in shapeless:
            return "drawn"
        told = [each or "" for i, each in enumerate(leaves) if i not in drawn[part]]
        return " ".join(told)

    return [
        [
            f"{part}{what}: {kept(part, what, leaves)}"
            for part, found in table.items()
            for what, leaves in found.items()
        ]
        for table in tables
    ]


def _samples(table: Seen) -> Iterator[tuple[str, list[str | None]]]:
    for part, found in table.items():
        for what, leaves in found.items():
            if what.startswith(_SAMPLE):
                yield part, leaves


# Samples that a user's collate leaves out, of which a plain mean does not know.


_FEWEST = 2
"""Samples of a batch that says whether rows are samples."""


class LeftOut:
    """Looks at batches of a user's collate, until it has told that one is short.

    What makes more rows than samples, as packed sequences are, says nothing by their number,
    nor does what makes one row of two samples each time, say, or has them along another dim.
    """

    def __init__(self) -> None:
        """Begin with the next batch."""
        self._looks, self._samples_a_row = True, cast("float | None", None)

    def look(self, value: Any, num_samples: int | None, mean: str) -> None:
        """Say if a batch has fewer rows than samples.

        Args:
            value: what was collated.
            num_samples: of which, where it is known.
            mean: what is taken for one over these samples, as "The loss".
        """
        if not self._looks or num_samples is None or num_samples < _FEWEST:
            return
        try:
            num_rows = tree.num_rows(value)
        except BatchError:
            num_rows = None
        each = num_samples / num_rows if num_rows else math.inf
        known = self._samples_a_row
        if known is None:
            self._samples_a_row = each
            fewer = num_rows is not None and each > 1
            self._looks = each == 1 or (fewer and not _has_dim(value, num_samples))
        is_short = num_rows is not None and num_rows < num_samples
        as_ever = each.is_integer() if known is None else each == known
        if self._looks and is_short and not as_ever:
            self._looks = False
            advise(
                f"collate made {num_rows} rows of {num_samples} samples. {mean} is a mean over"
                f" the rows that are left, and counts for {num_samples} samples beside other"
                " means. Return totals with what they are of, af.Loss(total, num_rows), or"
                " leave such samples out of the dataset."
            )


def _has_dim(value: Any, num_samples: int) -> bool:
    """Whether a dim behind the first is that of the samples, as where time is the first."""
    return any(num_samples in each.shape[1:] for each in tree.tensor_leaves(value))
