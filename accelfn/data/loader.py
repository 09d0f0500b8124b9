# SPDX-License-Identifier: Apache-2.0
"""Convert a torch DataLoader into arguments of `Data`."""

from functools import partial
from math import prod
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, default_collate

from accelfn.base.arguments import advise, check_integer
from accelfn.data.order import (
    Sequential,
    Shuffled,
    is_plain,
    order_of_sampler,
    refuse_distributed,
)
from accelfn.data.sources import is_stream
from accelfn.errors import DataError

_DEFAULTS = {
    "worker_init_fn": "workers draw from streams of their own; seed in the dataset",
    "generator": "the order comes from the state's seed",
    "multiprocessing_context": "workers start as multiprocessing is told to, or by a fork",
}


_ITERATION = ("__iter__", "__len__", "_get_iterator", "_index_sampler")
"""Methods of a subclass that change its batches, and that accelfn does not call."""


def options_of(loader: Any, num_ranks: int, num_micro_batches: int) -> dict[str, Any]:
    """Return the arguments of `Data` for a loader.

    Raises:
        DataError: it is not a DataLoader, does not batch, or gives each rank a part already.
    """
    if not isinstance(loader, DataLoader):
        msg = f"from_loader: expected a torch DataLoader, got {type(loader).__name__}."
        raise DataError(msg)
    _refuse_own_iteration(loader)
    counts = {"num_ranks": num_ranks, "num_micro_batches": num_micro_batches}
    for name, count in counts.items():
        check_integer(
            "from_loader", name, count, 1, name.replace("num_", "a number of ")
        )
    _advise_of_lost_options(loader)
    collate = loader.collate_fn
    options = {
        "dataset": loader.dataset,
        "collate": None if collate is default_collate else collate,
        "num_workers": loader.num_workers,
        **({"timeout": loader.timeout} if loader.timeout else {}),
    }
    return options | _batching(loader, counts)


def _batching(loader: "DataLoader[Any]", counts: dict[str, int]) -> dict[str, Any]:
    size, parts = loader.batch_size, prod(counts.values())
    remainder = "drop" if loader.drop_last else "short"
    if is_stream(loader.dataset):
        if size is None:
            return {
                "global_batch_size": parts,
                "collate": partial(_convert_lone, loader.collate_fn),
            }
        return {"global_batch_size": size * parts, "remainder": remainder}
    refuse_distributed(loader.sampler)
    batches = loader.batch_sampler
    if is_plain(batches, BatchSampler) and size is not None:
        order = order_of_sampler(loader.sampler, len(cast("Any", loader.dataset)))
        is_plain_order = isinstance(order, (Shuffled, Sequential))
        return {
            "global_batch_size": size * parts,
            "shuffle": isinstance(order, Shuffled),
            "order": None if is_plain_order else order,
            "remainder": remainder,
        }
    if batches is None:
        msg = (
            "from_loader: this DataLoader does not batch (batch_size=None). Give"
            " af.Data(dataset, global_batch_size=...)."
        )
        raise DataError(msg)
    if parts != 1:
        name = next(name for name, count in counts.items() if count != 1)
        msg = (
            f"from_loader({name}={counts[name]}): a batch of {type(batches).__name__} is an"
            f" update's, over all ranks and micro-batches; leave {name} out."
        )
        raise DataError(msg)
    return {"batch_sampler": batches}


def _refuse_own_iteration(loader: Any) -> None:
    """Raise if a subclass changes the batches of its dataset, sampler and collate."""
    for cls in type(loader).__mro__:
        if cls is DataLoader or cls.__module__.startswith("torchdata."):
            return
        methods = [name for name in _ITERATION if name in vars(cls)]
        if methods:
            msg = (
                f"from_loader: {cls.__name__} has its own {methods[0]}, which would not be called:"
                " accelfn reads a loader's dataset in the order of its sampler. Let the"
                " dataset, the sampler or collate_fn do what it does, and give a plain"
                " DataLoader; or step over its batches as they are: `for batch in"
                " af.join_uneven(loader, world):`, of a loader of each rank's own samples."
            )
            raise DataError(msg)


def _convert_lone(convert: Any, samples: list[Any]) -> Any:
    """Convert the single batch from a stream of batches, as the loader would."""
    (sample,) = samples
    return convert(sample)


def _advise_of_lost_options(loader: "DataLoader[Any]") -> None:
    for name, instead in _DEFAULTS.items():
        if getattr(loader, name, None) is not None:
            advise(f"from_loader: {name} is not kept: {instead}.")
