# SPDX-License-Identifier: Apache-2.0
"""`load`: the state that was saved; `load_part`: what of it is asked for."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import ref

from accelfn.base.calling import called
from accelfn.checkpoint import compare
from accelfn.checkpoint.elastic import Source, source_of
from accelfn.checkpoint.fields import with_fields
from accelfn.checkpoint.keep import check_no_store, explain_removal
from accelfn.checkpoint.manifest import check_not_joint, read_manifest
from accelfn.checkpoint.options import States, check_path, states_of
from accelfn.checkpoint.partial import Loaded, Wanted, kept_of, taken
from accelfn.checkpoint.together import together
from accelfn.state.argument import check_state
from accelfn.state.state import TrainState


@called
def load(
    state: States,
    directory: str | os.PathLike[str],
    *,
    allow: Sequence[str] = (),
    verify: bool = True,
) -> States:
    """Return the saved state, with the definition of the given one; call it on all ranks.

    Any number of ranks goes on at the very same sample. What was a rank's own, as between
    two averages of `local_sgd`, each rank gets back on as many ranks; on another number all
    get the average. Other data are refused: their length, batch size, order and fingerprint
    (a hash of some samples) must be those of the save. If other parameters are trained, or
    transforms have other options, an `af.Warning` lists the differences.

    Args:
        state: says model, optimizer, setup, data and world; it is not changed. Of states that
            were saved together, all of them by name; then a dict of states is returned.
        directory: that `save` wrote.
        allow: what may differ: in the data "samples", "batch_size", "remainder", "order"
            and "fingerprint"; also "trainable", "options" (of transforms), and the kinds and
            shapes of "opt_state" and "slots".
        verify: whether to compare every byte with its digest.

    Where each rank has a part of the model, all ranks load or none does: a file that one
    cannot read is an error on all, which names it.

    Cost: one reading of the files that this rank needs, and BLAKE3 of them; of a model in
    parts two small gathers, and one of its frozen parameters that were saved by hash.

    Raises:
        CheckpointCorruptError: a file is missing, or has changed; it and the first tensor in
            it that differs are named.
        CheckpointError: model, transforms, optimizer, data or world differ from what was
            saved; the differences are listed, with the nearest names.
        ArgumentError: an option is none of these words.
    """
    _, states = states_of("af.load(state, directory)", state)
    check_path("af.load", directory, "state, ")
    folder = Path(directory)

    def opened(name: str) -> Source:
        check_no_store(folder)
        check_not_joint(folder)
        manifest = read_manifest(folder, name, names=states)
        return source_of(states[name], manifest, folder / name, verify=verify)

    words = _several(allow)
    with explain_removal(folder):
        made = {
            name: restored(each, folder / name, partial(opened, name), words)
            for name, each in states.items()
        }
    return cast("States", made.get("", made))


def restored(
    state: TrainState,
    where: Path | str,
    opened: Callable[[], Source],
    allow: Sequence[str] = (),
) -> TrainState:
    """Return the state that a source has, with the definition of the given one.

    Args:
        state: says model, optimizer, setup, data and world.
        where: what errors call the source.
        opened: gives it.
        allow: as `load`'s.
    """

    def read() -> tuple[Source, dict[str, Any]]:
        source = opened()
        compare.check_transforms(state, source.manifest, where)
        compare.check_optimizer(state, source.manifest, where)
        compare.check_allowed(state, source.manifest, allow)
        compare.check_data(state, source.manifest, where, allow)
        compare.check_values(state, source.outline(), source.manifest, where, allow)
        return source, source.fields()

    source, saved = together(state, read)
    saved["params"] = {**saved["params"], **kept_of(source, state)}
    compare.warn_of_changes(state, source.manifest, where, allow)
    made = with_fields(state, saved)
    state.definition.cache.loaded = ref(state.lease), ref(made.lease)
    return made


@called
def load_part(
    state: TrainState,
    directory: str | os.PathLike[str],
    only: Sequence[str],
    *,
    missing: str = "error",
    extra: str = "error",
    cast: bool = False,
    allow: Sequence[str] = (),
    verify: bool = True,
) -> Loaded:
    """Return what of a saved state is asked for, in the given one; call it on all ranks.

    Where parameters are, slots that are not, and that are as they began, begin with these
    parameters, as an average does; of others, which go on, an `af.Warning` says so. Ranks
    compare what they hold at the next update.

    Args:
        state: all else stays as it has it; it is not changed.
        directory: that `save` wrote; of states that were saved together, that of one of them,
            `directory/generator`.
        only: fields, of "params", "buffers", "opt_state", "step", "cursor", "seed",
            "num_skipped" and "slots", or a slot by name ("slots.ema").
        missing: "init" leaves what the checkpoint lacks as the given state has it.
        extra: "ignore" leaves out what the state has no place for.
        cast: convert parameters and buffers to the state's dtypes; not floats to integers,
            complex to real, or what is finite to what is not.
        allow: as `load`'s, where the cursor is asked for.
        verify: as `load`'s.

    Returns: a report, whose `state` it is.

    Law: values, names and what is refused are those of dicts.

    Cost: as `load`.

    Raises: as `load`, for what is asked for.
    """
    check_state("af.load_part(state, directory, only)", state)
    state.lease.check()
    check_path("af.load_part", directory, "state, ")
    folder = Path(directory)

    def read() -> tuple[Source, Wanted, dict[str, Any]]:
        check_no_store(folder)
        source = source_of(state, read_manifest(folder), folder, verify=verify)
        wanted = Wanted(_several(only), missing=missing, extra=extra, cast=cast)
        if "opt_state" in wanted.only:
            compare.check_optimizer(state, source.manifest, folder)
        if "cursor" in wanted.only:
            compare.check_allowed(state, source.manifest, _several(allow))
            compare.check_data(state, source.manifest, folder, _several(allow))
        return source, wanted, source.fields()

    source, wanted, saved = together(state, read)
    return taken(state, source, wanted, saved)


def _several(words: Sequence[str]) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else tuple(words)
