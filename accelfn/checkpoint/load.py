# SPDX-License-Identifier: Apache-2.0
"""`load`: the state that was saved, or what of it fits."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from accelfn.base.calling import called
from accelfn.checkpoint import compare
from accelfn.checkpoint.elastic import source_of
from accelfn.checkpoint.fields import with_fields
from accelfn.checkpoint.keep import check_no_store
from accelfn.checkpoint.manifest import read_manifest
from accelfn.checkpoint.options import check_path
from accelfn.checkpoint.partial import Loaded, Wanted, load_part, with_kept
from accelfn.errors import ArgumentError, CheckpointError
from accelfn.state.state import TrainState, check_state


@overload
def load(
    state: TrainState,
    directory: str | os.PathLike[str],
    *,
    allow: Sequence[str] = (),
    verify: bool = True,
) -> TrainState: ...


@overload
def load(
    state: TrainState,
    directory: str | os.PathLike[str],
    *,
    allow: Sequence[str] = (),
    verify: bool = True,
    only: Sequence[str],
    missing: str = "error",
    extra: str = "error",
    cast: bool = False,
) -> Loaded: ...


@called
def load(
    state: TrainState,
    directory: str | os.PathLike[str],
    *,
    allow: Sequence[str] = (),
    verify: bool = True,
    only: Sequence[str] | None = None,
    missing: str = "error",
    extra: str = "error",
    cast: bool = False,
) -> TrainState | Loaded:
    """Return the saved state, with the definition of the given one; call it on all ranks.

    Any number of ranks goes on at the very same sample. What was a rank's own, as between
    two averages of `local_sgd`, each rank gets back on as many ranks; on another number all
    get the average. Other data are refused: their length, batch size, order and fingerprint
    (a hash of some samples) must be those of the save.

    Args:
        state: says model, optimizer, setup, data and world; it is not changed.
        directory: that `save` wrote.
        allow: what may differ in the data, of "samples", "batch_size", "remainder",
            "order" and "fingerprint".
        verify: whether to compare every byte with its digest.
        only: load these fields alone, of "params", "buffers", "opt_state", "step", "cursor",
            "seed", "num_skipped" and "slots", or a slot by name ("slots.ema"), and return a
            report. All else stays the given state's.
        missing: with `only`: "init" leaves what the checkpoint lacks as the given state has it.
        extra: with `only`: "ignore" leaves out what the state has no place for.
        cast: with `only`: convert parameters and buffers to the state's dtypes; not floats to
            integers, complex to real, or what is finite to what is not.

    Returns: the state; with `only`, a `Loaded`, whose `state` it is.

    Cost: one reading of the files that this rank needs, and SHA-256 of them.

    Raises:
        CheckpointCorruptError: a file is missing, or has changed; it and the first tensor in
            it that differs are named.
        CheckpointError: model, transforms, optimizer, data or world differ from what was
            saved; the differences are listed, with the nearest names.
        ArgumentError: an option is none of these words.
    """
    check_state("af.load(state, directory)", state)
    state.lease.check()
    check_path("af.load", directory, "state, ")
    allow = (allow,) if isinstance(allow, str) else tuple(allow)
    if only is None and (missing, extra, cast) != ("error", "error", False):
        msg = "af.load(missing=, extra=, cast=): these are for a partial load; give only=."
        raise ArgumentError(msg)
    folder = Path(directory)
    check_no_store(folder)
    manifest = read_manifest(folder)
    source = source_of(state, manifest, folder, verify=verify)
    if only is not None:
        names = (only,) if isinstance(only, str) else tuple(only)
        wanted = Wanted(names, missing=missing, extra=extra, cast=cast)
        return load_part(state, source, wanted, allow)
    compare.check_transforms(state, manifest, folder)
    compare.check_optimizer(state, manifest, folder)
    compare.check_data(state, manifest, folder, allow)
    saved = with_kept(source, source.fields(), state)
    for field, current in (("params", state.params), ("buffers", state.buffers)):
        found = compare.differences(saved[field], current)
        if found:
            raise CheckpointError(found.told(f"{folder}: {field}"))
    return with_fields(state, saved)
