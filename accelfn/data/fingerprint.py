# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: whether data is what a run was trained on, or another rank trains on."""

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from accelfn.base import draws, tree
from accelfn.data.sources import Source
from accelfn.errors import DataError

if TYPE_CHECKING:
    from accelfn.data.dataset import Data

_PROBES = 8
"""How many samples are read: the first, the last, and between."""


def form_of(data: "Data") -> dict[str, Any]:
    """Return how data is batched and ordered, as plain data; no sample is read."""
    size = data.batch_size
    form: dict[str, Any] = {
        "batch_size": size if isinstance(size, int) else repr(size or "sampler"),
        "remainder": data.remainder,
    }
    if data.is_stream:
        return form
    sampler = data.batch_sampler
    order = data.ordering.name if sampler is None else type(sampler).__name__
    return form | {"samples": len(data), "order": order}


def fingerprint_of(source: Source) -> str:
    """Return a hash of a few samples, read twice; those that differ are left out.

    Cost: eight samples are read twice, once for each `Data` that is saved.

    Raises:
        DataError: one cannot be read; without it, these would be other data.
    """
    digest = hashlib.sha256()
    for place in places_of(source):
        try:
            first, again = (_hash_of(sample_at(source, place)) for _ in range(2))
        except Exception as error:
            raise _unread(place, error) from error
        if first == again:
            digest.update(first)
    return digest.hexdigest()[:16]


def _unread(place: int, error: Exception) -> DataError:
    """Return an error that says which sample cannot be read, and what to do."""
    return DataError(
        f"sample {place} of the dataset cannot be read, and a run that is resumed knows"
        f" its data by a hash of some samples, of which this is one:"
        f" {type(error).__name__}: {error}. Try again if it can be read now."
        ' Or give af.Data(fingerprint="a name of the data"), and none is read.'
    )


def places_of(source: Source) -> list[int]:
    """Return the indices of the few samples that are read."""
    n = len(source)
    return np.unique(np.linspace(0, n - 1, min(_PROBES, n)).astype(np.int64)).tolist()


def sample_at(source: Source, place: int) -> Any:
    """Return a sample; what it draws from default generators is the same each time."""
    with draws.seeded() as drawing:

        def begin(_place: int) -> None:
            drawing.begin(0)

        begin(0)
        return source.samples(np.array([place]), begin)[0]


def _hash_of(sample: Any) -> bytes:
    digest = hashlib.sha256()
    for leaf in tree.tree_leaves(sample):
        digest.update(bytes_of(leaf))
    return digest.digest()


def bytes_of(leaf: Any) -> bytes:
    """Return what tells a leaf from others; of an unknown object, its class."""
    if isinstance(leaf, torch.Tensor):
        with suppress(RuntimeError):  # a sparse one, say, which has no such bytes
            # a copy, of which no element waits to be conjugated, and no stride but 1 is left
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
    """Return what tells the objects of an array from others; its own bytes are addresses."""
    names = array.dtype.names
    parts = [array[n] for n in names] if names else array.ravel().tolist()
    told = f"{array.dtype}{array.shape}".encode()
    for part in parts:
        leaves = (_digest(bytes_of(leaf)) for leaf in tree.tree_leaves(part))
        told += _digest(b"".join(leaves))
    return told


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
