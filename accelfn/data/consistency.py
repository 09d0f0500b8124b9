# SPDX-License-Identifier: Apache-2.0
"""Check that ranks that share data have the same samples.

Ranks may have different samples at the same index, for example if each makes its own random
split, or lists the files of a folder in another order. Then some samples are used twice and
others never, without an error. So ranks compare digests of the samples at a few indices.

If a dataset uses its own random generator, a sample differs each time it is read. So if digests
differ between ranks, each rank reads the samples again, and leaves out the values that change.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from torch.utils.data import Subset

from accelfn.base import draws, tree
from accelfn.base.arguments import advise
from accelfn.collectives.packed import gather_text, is_same_text
from accelfn.collectives.replicas import check_rows, refuse_difference
from accelfn.data.loaders import skip_seeding
from accelfn.data.order import Sequential, Shuffled
from accelfn.data.sources import Items, Joined, Rows, Source
from accelfn.errors import BatchError, DataError
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.data.dataset import Data

_BYTES = 1 << 22
"""How many bytes are compared of a dataset that is made of tensors."""
_INDICES = 1 << 16
"""How many indices of a Subset are compared."""
_READS = 5
"""How many times samples are read if digests differ between ranks."""
_PROBES = 8
"""How many samples are hashed: the first, the last, and some in between."""

_SAMPLE, _FAILED = "sample ", "cannot be read: "

_LABEL = "compare data"

_DIFFERENT = (
    "Ranks would train on some samples twice and on others never. Make the dataset the same on"
    " all ranks: pass a seeded generator to random_split, and sort the files of a folder. If"
    ' samples differ on purpose, name the dataset: af.Data(..., fingerprint="a name").'
)

Digests: TypeAlias = list[str | None]
"""A digest of each value in a sample; None for a value that changes when it is read again."""
View: TypeAlias = list[tuple[str, str, Digests]]
"""Rows of: the dataset (in a mix), the name of what was read (such as a sample), its digests."""


class Looks:
    """Digests of a dataset's samples at a few indices, which are read when they are needed."""

    def __init__(self, source: Source) -> None:
        """Initialize with the source of samples."""
        self._source = source
        self._reads: list[View] = []

    def digests(self, times: int) -> View:
        """Read the samples at least so many times, and return the digests.

        None replaces the digest of a value that has changed.
        """
        while len(self._reads) < times:
            self._reads.append(list(_digests_of(self._source, "")))
        return [
            (dataset, part, _same([read[i][2] for read in self._reads]))
            for i, (dataset, part, _) in enumerate(self._reads[0])
        ]


def check_readers(data: "Data", world: World) -> None:
    """Check that all ranks have the same `sharded=` and `dispatch=`, if this rank uses one.

    A rank without these options compares definitions before its first update instead. Both
    comparisons are the same collective, so ranks that differ find the difference.

    Cost: with `sharded=True` or `dispatch=True`, a small all-reduce at the start of reading.

    Raises:
        ReplicaMismatchError: ranks differ. The message names the option, and has a row for each
            rank.
    """
    if data.sharded or data.dispatch:
        check_definition_rows(reader_rows(data), world)


def check_definition_rows(rows: dict[str, str], world: World) -> None:
    """Check that all ranks have the same definition, and the same options for reading.

    Raises:
        ReplicaMismatchError: ranks differ. The message has a row for each rank.
    """
    check_rows(
        rows,
        world,
        label="compare definitions",
        advice=(
            "The parameters of these ranks would silently become different. Pass the same setup,"
            " optimizer, schedule, seed and data to TrainState.create on all ranks."
        ),
    )


def reader_rows(data: "Data | None") -> dict[str, str]:
    """Return the options `sharded` and `dispatch` as rows that ranks compare."""
    return {
        "data, sharded": str(data is not None and data.sharded),
        "data, dispatch": str(data is not None and data.dispatch),
    }


def check_same_data(data: "Data", looks: Looks | None, world: World) -> None:
    """Check that all ranks have the same samples in the same order and batches.

    If data have a `fingerprint=`, only this name is compared instead of samples. For a stream,
    only its batch size and remainder are compared.

    Args:
        data: the data that ranks share.
        looks: digests of the samples; None for a stream.
        world: the ranks that share the data.

    Cost: a small all-reduce. For each `Data` record, eight samples are read once; also up to 4
    MiB of a dataset made of tensors, and up to 65,536 indices of a Subset. If ranks differ, all
    these values are read four more times.

    Raises:
        ReplicaMismatchError: ranks differ. The message has the first difference, with a row for
            each rank.
    """
    if world.size == 1:
        return
    form, looks = _form(data, looks)
    if is_same_text(_describe_view(form, looks), world, label=_LABEL):
        return
    texts = gather_text(_describe_view(form, looks, _READS), world, label=_LABEL)
    forms, views = zip(*map(json.loads, texts), strict=True)
    rows = _rows_of([view or [] for view in views])
    form_rows = [[f"{k}: {v}" for k, v in form.items()] for form in forms]
    tables = [a + b for a, b in zip(form_rows, rows, strict=True)]
    refuse_difference(dict(enumerate(tables)), "data that differ", _DIFFERENT)


def have_same_data(data: "Data", looks: Looks | None, world: World) -> bool:
    """Return whether all ranks have the same samples; False for a stream without a fingerprint.

    Cost: the same as a call of `check_same_data` that finds no difference.
    """
    form, looks = _form(data, looks)
    is_same = is_same_text(_describe_view(form, looks), world, label=_LABEL)
    return is_same and (looks is not None or data.fingerprint is not None)


def _form(data: "Data", looks: Looks | None) -> tuple[dict[str, str], Looks | None]:
    """Return the rows that ranks compare, and the digests to compare with them.

    If the data have a fingerprint, it is one of the rows, and the digests are None.
    """
    form = {f"data, {name}": str(value) for name, value in data.form.items()}
    form |= reader_rows(data)
    if data.fingerprint is None and looks is not None:
        return form, looks
    return form | {"data, fingerprint": str(data.fingerprint)}, None


def _describe_view(form: dict[str, str], looks: Looks | None, reads: int = 1) -> str:
    """Return the rows and digests of this rank as a text that ranks compare."""
    return json.dumps([form, looks and looks.digests(reads)])


def order_rows(data: "Data", seed: int) -> dict[str, str]:
    """Return a row with a digest of the first epoch's order.

    Return {} for a stream, or if the order depends only on the seed.
    """
    pure = type(data.ordering) in (Sequential, Shuffled)
    if data.is_stream or (pure and isinstance(data.global_batch_size, int)):
        return {}
    epoch = data.epoch(seed=seed)
    order = epoch.order(_spread_indices(epoch.num_samples, _INDICES))
    spans = np.array(list(islice(epoch.cut.spans(0), _INDICES)))
    digest = _digest(order.tobytes() + spans.tobytes())
    return {"data, order of the first epoch": digest}


def _digests_of(source: Source, dataset: str) -> Iterator[tuple[str, str, Digests]]:
    """Yield digests of a few samples, and of tensors and indices that are in memory."""
    if isinstance(source, Joined):
        for number, part in enumerate(source.parts):
            yield from _digests_of(part, f"{dataset}dataset {number}, ")
        return
    for place in _spread_indices(len(source), _PROBES).tolist():
        leaves = _leaves(lambda place=place: _sample_at(source, place))
        yield dataset, f"{_SAMPLE}{place}", leaves
    for name, read in _in_memory(source):
        yield dataset, name, _leaves(read)


def _in_memory(source: Source) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what can be read without reading samples: rows of tensors, indices of a Subset.

    Each item has a name, and a function that reads the values.
    """
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
    """Return a digest of each value that a function reads; one text if reading fails."""
    try:
        value = read()
    except Exception as error:  # noqa: BLE001 - raised when the sample is used
        return [f"{_FAILED}{type(error).__name__}"]
    return [_digest(bytes_of(leaf)) for leaf in tree.tree_leaves(value)]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _same(reads: list[Digests]) -> Digests:
    """Return each value's digest, or None for a value that differed between several reads.

    If the number of values has changed, the list is empty.
    """
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
    """Return the lines that ranks compare, for each rank, without values that change.

    If a value has changed in one sample on one rank, it is left out of all samples.
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


# A hash of a few samples, which a resumed run compares with the saved hash.


def fingerprint_of(source: Source) -> str:
    """Return a hash of a few samples; leave out samples that differ when they are read twice.

    Cost: eight samples are read twice, at the first save with a `Data` record.

    Raises:
        DataError: a sample cannot be read. Without the sample, the hash would be different.
    """
    digest = hashlib.sha256()
    for place in _spread_indices(len(source), _PROBES).tolist():
        try:
            first, again = (_hash_of(_sample_at(source, place)) for _ in range(2))
        except Exception as error:
            msg = (
                f"sample {place} of the dataset could not be read for the fingerprint that"
                f" checkpoints contain: {type(error).__name__}: {error}. Try again if the sample"
                ' can be read now, or write af.Data(..., fingerprint="a name of the dataset").'
            )
            raise DataError(msg) from error
        if first == again:
            digest.update(first)
    return digest.hexdigest()[:16]


def _sample_at(source: Source, place: int) -> Any:
    """Read a sample; the default random generators are seeded equally each time."""
    with draws.seeded() as drawing:
        drawing.begin(0)
        return source.samples(np.array([place]), lambda _place: drawing.begin(0))[0]


def _hash_of(sample: Any) -> bytes:
    return _sha256(b"".join(map(bytes_of, tree.tree_leaves(sample))))


def bytes_of(leaf: Any) -> bytes:
    """Return bytes that identify a value; for an object of an unknown class, only the class."""
    if isinstance(leaf, torch.Tensor):
        with suppress(RuntimeError):  # a sparse tensor cannot be read as bytes
            # clone, because a view may have a lazy conjugation
            array = leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
            head = f"{array.dtype}{tuple(array.shape)}".encode()
            return head + array.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, (np.ndarray, np.void)) and leaf.dtype.hasobject:
        return _bytes_of_objects(np.asarray(leaf))
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes()
    if isinstance(leaf, (str, int, float, bool, bytes, type(None), np.generic)):
        return f"{leaf!r};".encode()
    return f"<{type(leaf).__qualname__}>".encode()


def _bytes_of_objects(array: np.ndarray[Any, Any]) -> bytes:
    """Return bytes that identify an array of objects, because its memory has only addresses."""
    names = array.dtype.names
    parts = [array[n] for n in names] if names else array.ravel().tolist()
    result = f"{array.dtype}{array.shape}".encode()
    for part in parts:
        leaves = (_sha256(bytes_of(leaf)) for leaf in tree.tree_leaves(part))
        result += _sha256(b"".join(leaves))
    return result


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


# Warn if a user's collate function leaves out samples, although a plain mean counts them.


_FEWEST = 2
"""A batch with fewer samples does not show whether its rows are samples."""


class LeftOut:
    """Looks at batches of a user's collate function, until it has warned of a short batch.

    It stops looking if the number of rows is not the number of samples for another reason:
    collate packs sequences, makes one row of several samples, or puts samples along another dim.
    """

    def __init__(self) -> None:
        """Initialize, to look at the next batch."""
        self._looks, self._usual_ratio = True, cast("float | None", None)

    def look(self, value: Any, num_samples: int | None, mean: str) -> None:
        """Warn if a batch has fewer rows than samples.

        Args:
            value: the collated batch.
            num_samples: the number of samples in the batch; None if it is unknown.
            mean: the name of the mean over these samples in the warning, such as "The loss".
        """
        if not self._looks or num_samples is None or num_samples < _FEWEST:
            return
        try:
            num_rows = tree.num_rows(value)
        except BatchError:
            num_rows = None
        ratio = num_samples / num_rows if num_rows else math.inf
        is_short = num_rows is not None and num_rows < num_samples
        usual = self._usual_ratio
        if usual is None:
            self._usual_ratio = ratio
            self._looks = ratio == 1 or (is_short and not _has_dim(value, num_samples))
        is_usual = ratio.is_integer() if usual is None else ratio == usual
        if self._looks and is_short and not is_usual:
            self._looks = False
            advise(
                f"collate returned {num_rows} rows for {num_samples} samples. {mean} is a mean"
                f" over {num_rows} rows, but gets the weight of {num_samples} samples when means"
                " are averaged. Return a total with its number of rows, such as"
                " af.Loss(total, num_rows), or remove these samples from the dataset."
            )


def _has_dim(value: Any, num_samples: int) -> bool:
    """Return whether samples may be along another dim than the first, such as after time."""
    return any(num_samples in t.shape[1:] for t in tree.tensor_leaves(value))
