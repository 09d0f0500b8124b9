# SPDX-License-Identifier: Apache-2.0
"""Convert a torch DataLoader to arguments of `af.Data`."""

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
    "worker_init_fn": "accelfn seeds the generators for each sample; seed in the dataset",
    "generator": "the order comes from the state's seed",
    "multiprocessing_context": "multiprocessing.set_start_method decides how workers start",
}


_ITERATION = ("__iter__", "__len__", "_get_iterator", "_index_sampler")
"""Methods by which a subclass can change its batches. accelfn does not call them."""


def options_of(loader: Any, num_ranks: int, num_micro_batches: int) -> dict[str, Any]:
    """Return the arguments of `af.Data` for a DataLoader.

    Raises:
        DataError: the loader is not a DataLoader, makes no batches, or splits the samples among
            ranks.
    """
    if not isinstance(loader, DataLoader):
        msg = f"af.Data.from_loader: expected a torch DataLoader, got {type(loader).__name__}."
        raise DataError(msg)
    _refuse_own_iteration(loader)
    counts = {"num_ranks": num_ranks, "num_micro_batches": num_micro_batches}
    for name, count in counts.items():
        check_integer(
            "af.Data.from_loader", name, count, 1, name.replace("num_", "a number of ")
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
            "af.Data.from_loader: this DataLoader makes no batches (batch_size=None). Write"
            " af.Data(dataset, global_batch_size=...) instead."
        )
        raise DataError(msg)
    if parts != 1:
        name = next(name for name, count in counts.items() if count != 1)
        msg = (
            f"af.Data.from_loader({name}={counts[name]}): a batch of the batch sampler"
            f" {type(batches).__name__} is the batch of a whole update, over all ranks and"
            f" micro-batches. Leave out {name}=."
        )
        raise DataError(msg)
    return {"batch_sampler": batches}


def _refuse_own_iteration(loader: Any) -> None:
    """Raise an error if a subclass of DataLoader has its own methods for making batches."""
    for cls in type(loader).__mro__:
        if cls is DataLoader or cls.__module__.startswith("torchdata."):
            return
        methods = [name for name in _ITERATION if name in vars(cls)]
        if methods:
            msg = (
                f"af.Data.from_loader: {cls.__name__} has its own {methods[0]}, but accelfn does"
                " not call it: it reads the dataset in the order of the loader's sampler. Move"
                " that code to the dataset, the sampler or collate_fn, and pass a plain"
                " DataLoader. Or write `for batch in af.join_uneven(loader, world):`, with a"
                " loader of different samples on each rank."
            )
            raise DataError(msg)


def _convert_lone(convert: Any, samples: list[Any]) -> Any:
    """Return the only item of a list, converted by the loader's `collate_fn`."""
    (sample,) = samples
    return convert(sample)


def _advise_of_lost_options(loader: "DataLoader[Any]") -> None:
    for name, instead in _DEFAULTS.items():
        if getattr(loader, name, None) is not None:
            advise(
                f"af.Data.from_loader: accelfn ignores the loader's {name}: {instead}."
            )
