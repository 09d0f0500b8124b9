# SPDX-License-Identifier: Apache-2.0
"""Compare the samples of ranks that share data.

If each rank draws its own split, or lists a folder's files in another order, ranks have different
samples at the same index. Some samples are then seen twice and others never, and nothing else
shows it. So ranks exchange digests of the samples at a few indices.

Samples that a dataset draws with its own generator differ each time that they are read. If ranks
differ, each reads its samples again, and leaves out the values that change.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from torch.utils.data import Subset

from accelfn.base import tree
from accelfn.base.arguments import advise
from accelfn.collectives.packed import gather_text, is_same_text
from accelfn.collectives.replicas import check_rows, refuse_difference
from accelfn.data.loaders import skip_seeding
from accelfn.data.order import Sequential, Shuffled
from accelfn.data.plan import (
    bytes_of,
    epoch_of,
    form_of,
    places_of,
    sample_at,
)
from accelfn.data.sources import Items, Joined, Rows, Source
from accelfn.errors import BatchError
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.data.dataset import Data

_BYTES = 1 << 22
"""How many bytes of a dataset made of tensors are compared."""
_INDICES = 1 << 16
"""How many indices of a Subset are compared."""
_AGAIN = 4
"""How often samples are read again if ranks differ."""

_SAMPLE, _FAILED = "sample ", "cannot be read: "

_LABEL = "compare data"

_DIFFERENT = (
    "They would see some samples twice and others never. Make the dataset the same on all"
    " ranks: give random_split a generator with a seed, and sort the files of a folder. If"
    ' samples differ on purpose, give the data a name: af.Data(..., fingerprint="...").'
)

Digests: TypeAlias = list[str | None]
"""A digest of each leaf; None if the leaf changes from one reading to the next."""
View: TypeAlias = list[tuple[str, str, Digests]]
"""The dataset of a mix, the name of a part of it, such as a sample, and its digests."""


class Looks:
    """Digests of a dataset at a few indices in this process, read when they are needed."""

    def __init__(self, source: Source) -> None:
        """Take the source of samples."""
        self._source = source
        self._reads: list[View] = []

    def digests(self) -> View:
        """Return the digests that were the same each time."""
        self._read_until(1)
        return [
            (dataset, part, _same([read[i][2] for read in self._reads]))
            for i, (dataset, part, _) in enumerate(self._reads[0])
        ]

    def look_again(self) -> None:
        """Read samples some more times, to find values that change."""
        self._read_until(1 + _AGAIN)

    def _read_until(self, times: int) -> None:
        while len(self._reads) < times:
            self._reads.append(list(_digests_of(self._source, "")))


def check_readers(data: "Data", world: World) -> None:
    """Raise unless all ranks read in the same way, if ranks communicate to read.

    A rank that reads in another way compares definitions before its first update. Both
    comparisons are the same call, and this part comes first.

    Cost: if ranks communicate to read, a small all-reduce as reading begins; else none.

    Raises:
        ReplicaMismatchError: ranks differ; the error names the option, and has a row per rank.
    """
    if data.sharded or data.dispatch:
        check_definition_rows(reader_rows(data), world)


def check_definition_rows(rows: dict[str, str], world: World) -> None:
    """Raise unless all ranks train with the same definition, and read in the same way.

    Raises:
        ReplicaMismatchError: ranks differ; the error has a row per rank.
    """
    check_rows(
        rows,
        world,
        label="compare definitions",
        advice=(
            "Such ranks would silently drift apart. Give TrainState.create the same setup,"
            " optimizer, schedule, seed and data on all of them."
        ),
    )


def reader_rows(data: "Data | None") -> dict[str, str]:
    """Return who reads for whom, as rows to compare over ranks."""
    return {
        "data, sharded": str(data is not None and data.sharded),
        "data, dispatch": str(data is not None and data.dispatch),
    }


def check_same_data(data: "Data", looks: Looks | None, world: World) -> None:
    """Raise unless all ranks have the same samples in the same order and batches.

    Ranks compare data with a `fingerprint=` by this name, and streams by their batching.

    Args:
        data: the data that ranks share.
        looks: digests of its samples; None for a stream.
        world: the ranks that share them.

    Cost: one small all-reduce, and eight samples are read once for each `Data`. Of a
    dataset made of tensors up to 4 MiB are read, and of a Subset up to 65,536 indices. If
    ranks differ, samples are read four times more.

    Raises:
        ReplicaMismatchError: ranks differ; the error has the first difference, a row per rank.
    """
    if world.size == 1:
        return
    form, looks = _form(data, looks)
    if is_same_text(_describe_view(form, looks), world, label=_LABEL):
        return
    if looks is not None:
        looks.look_again()
    texts = gather_text(_describe_view(form, looks), world, label=_LABEL)
    forms, views = zip(*map(json.loads, texts), strict=True)
    rows = _rows_of([view or [] for view in views])
    form_rows = [[f"{k}: {v}" for k, v in form.items()] for form in forms]
    tables = [a + b for a, b in zip(form_rows, rows, strict=True)]
    refuse_difference(dict(enumerate(tables)), "data that differ", _DIFFERENT)


def have_same_data(data: "Data", looks: Looks | None, world: World) -> bool:
    """Return whether all ranks have the same samples; False for streams, which have no digests.

    Cost: as `check_same_data` if ranks agree.
    """
    form, looks = _form(data, looks)
    is_same = is_same_text(_describe_view(form, looks), world, label=_LABEL)
    return is_same and (looks is not None or data.fingerprint is not None)


def _form(data: "Data", looks: Looks | None) -> tuple[dict[str, str], Looks | None]:
    """Return how data is batched; and its digests, or else its name."""
    form = {f"data, {name}": str(value) for name, value in form_of(data).items()}
    form |= reader_rows(data)
    if data.fingerprint is None and looks is not None:
        return form, looks
    return form | {"data, fingerprint": str(data.fingerprint)}, None


def _describe_view(form: dict[str, str], looks: Looks | None) -> str:
    """Return this rank's view of the data as text to compare."""
    return json.dumps([form, looks and looks.digests()])


def order_rows(data: "Data", seed: int) -> dict[str, str]:
    """Return a digest of the first epoch's order, if it depends on more than the seed."""
    pure = type(data.ordering) in (Sequential, Shuffled)
    if data.is_stream or (pure and isinstance(data.global_batch_size, int)):
        return {}
    epoch = epoch_of(data, seed=seed, number=0)
    order = epoch.order(_spread_indices(epoch.num_samples, _INDICES))
    spans = np.array(list(islice(epoch.cut.spans(0), _INDICES)))
    digest = _digest(order.tobytes() + spans.tobytes())
    return {"data, order of the first epoch": digest}


def _digests_of(source: Source, dataset: str) -> Iterator[tuple[str, str, Digests]]:
    """Yield digests of samples, and of tensors and indices in memory."""
    if isinstance(source, Joined):
        for number, part in enumerate(source.parts):
            yield from _digests_of(part, f"{dataset}dataset {number}, ")
        return
    for place in places_of(source):
        leaves = _leaves(lambda place=place: sample_at(source, place))
        yield dataset, f"{_SAMPLE}{place}", leaves
    for name, read in _in_memory(source):
        yield dataset, name, _leaves(read)


def _in_memory(source: Source) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the parts of a source that can be read without its samples."""
    if isinstance(source, Rows):
        size = sum(t[:1].nbytes for t in tree.tensor_leaves(source.tensors))
        rows = _spread_indices(len(source), max(1, _BYTES // max(1, size)))
        yield f"{len(rows)} of its rows", lambda: source.batch(rows, skip_seeding)
    dataset: Any = source.dataset if isinstance(source, Items) else None
    while isinstance(dataset, Subset):
        indices: Any = dataset.indices
        places = _spread_indices(len(indices), _INDICES).tolist()
        values = np.array([int(indices[i]) for i in places], np.int64)
        yield "indices of the Subset", lambda values=values: values
        dataset = dataset.dataset


def _spread_indices(n: int, count: int) -> Any:
    return np.linspace(0, n - 1, min(n, count)).astype(np.int64)


def _leaves(read: Callable[[], Any]) -> Digests:
    """Return a digest of each leaf, or the error if reading fails."""
    try:
        value = read()
    except Exception as error:  # noqa: BLE001 - training on it raises the error
        return [f"{_FAILED}{type(error).__name__}"]
    return [_digest(bytes_of(leaf)) for leaf in tree.tree_leaves(value)]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _same(reads: list[Digests]) -> Digests:
    """Return the digests that are the same each time; none if their number changes."""
    complete = [read for read in reads if not _has_failed(read)] or reads
    if len({len(read) for read in complete}) > 1:
        return []
    return [
        first if all(first == other for other in rest) else None
        for first, *rest in zip(*complete, strict=True)
    ]


def _has_failed(leaves: Digests) -> bool:
    return len(leaves) == 1 and (leaves[0] or "").startswith(_FAILED)


def _rows_of(views: list[View]) -> list[list[str]]:
    """Return a line for each part that each rank saw, without values that change.

    A leaf that changes in one sample, on one rank, is random, and is left out in all samples.
    """
    random: dict[str, set[int]] = {}
    shapeless: set[str] = set()
    for dataset, part, leaves in chain(*views):
        if part.startswith(_SAMPLE):
            changing = {i for i, leaf in enumerate(leaves) if leaf is None}
            random[dataset] = random.get(dataset, set()) | changing
            if not leaves:
                shapeless.add(dataset)

    def format_leaves(dataset: str, part: str, leaves: Digests) -> str:
        if not part.startswith(_SAMPLE):
            return " ".join(leaf or "" for leaf in leaves)
        if dataset in shapeless:
            return "drawn"
        return " ".join(
            leaf or "" for i, leaf in enumerate(leaves) if i not in random[dataset]
        )

    return [
        [f"{row[0]}{row[1]}: {format_leaves(*row)}" for row in view] for view in views
    ]


# Samples that a user's collate leaves out, although a plain mean counts them.


_FEWEST = 2
"""Samples of a batch that shows whether rows are samples."""


class LeftOut:
    """Look at batches of a user's collate, until it has warned of a short batch.

    The number of rows says nothing if collate makes more rows than samples, as packed sequences
    are, or always one row of two samples, or has samples along another dim.
    """

    def __init__(self) -> None:
        """Begin with the next batch."""
        self._looks, self._usual_ratio = True, cast("float | None", None)

    def look(self, value: Any, num_samples: int | None, mean: str) -> None:
        """Warn if a batch has fewer rows than samples.

        Args:
            value: the collated batch.
            num_samples: its number of samples, if it is known.
            mean: the name of the mean over these samples, as "The loss".
        """
        if not self._looks or num_samples is None or num_samples < _FEWEST:
            return
        try:
            num_rows = tree.num_rows(value)
        except BatchError:
            num_rows = None
        ratio = num_samples / num_rows if num_rows else math.inf
        usual = self._usual_ratio
        if usual is None:
            self._usual_ratio = ratio
            has_fewer = num_rows is not None and ratio > 1
            self._looks = ratio == 1 or (has_fewer and not _has_dim(value, num_samples))
        is_short = num_rows is not None and num_rows < num_samples
        is_usual = ratio.is_integer() if usual is None else ratio == usual
        if self._looks and is_short and not is_usual:
            self._looks = False
            advise(
                f"collate made {num_rows} rows of {num_samples} samples. {mean} is a mean over"
                f" the rows that are left, and counts for {num_samples} samples next to"
                " other means. Return totals with what they are of, af.Loss(total, num_rows), or"
                " leave such samples out of the dataset."
            )


def _has_dim(value: Any, num_samples: int) -> bool:
    """Return whether samples are along a later dim, for example if time is the first."""
    return any(num_samples in t.shape[1:] for t in tree.tensor_leaves(value))
