# SPDX-License-Identifier: Apache-2.0
"""What `Data` says of itself, for those who check, compare and read it."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

from accelfn.data.orders.order import Order
from accelfn.data.sources import Source


class Described(Protocol):
    """A dataset, and how updates take its samples; `Data` is one."""

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        ...

    @property
    def dataset(self) -> Any:
        """What samples are read from, as it was given."""
        ...

    @property
    def batch_size(self) -> Any:
        """Samples an update, or a budget of them."""
        ...

    @property
    def shuffle(self) -> bool:
        """Whether each epoch has an order of its own."""
        ...

    @property
    def remainder(self) -> str:
        """What becomes of a short last batch."""
        ...

    @property
    def collate(self) -> Callable[[list[Any]], Any] | None:
        """What makes a batch of samples."""
        ...

    @property
    def num_workers(self) -> int:
        """Processes that read ahead."""
        ...

    @property
    def order(self) -> Any:
        """The order that was asked for."""
        ...

    @property
    def batch_sampler(self) -> Any:
        """What says which samples are an update."""
        ...

    @property
    def timeout(self) -> float:
        """Seconds that a worker may take over a batch."""
        ...

    @property
    def fingerprint(self) -> str | None:
        """The name of the data."""
        ...

    @property
    def sharded(self) -> bool:
        """Whether each rank has a stream of its own."""
        ...

    @property
    def dispatch(self) -> bool:
        """Whether rank 0 reads a stream for all."""
        ...

    @property
    def replay(self) -> bool:
        """Whether a stream may be read again to come to its place."""
        ...

    @property
    def first(self) -> Any:
        """The state of a stream with which each epoch begins."""
        ...

    @property
    def is_stream(self) -> bool:
        """Whether it is read from front to back."""
        ...

    source: cached_property[Source]
    """How samples are read, by index."""

    ordering: cached_property[Order]
    """In which order samples come."""

    @property
    def updates_per_epoch(self) -> int:
        """How many updates a pass makes."""
        ...
