# SPDX-License-Identifier: Apache-2.0
"""`save`: a state as a directory that anyone can read."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from accelfn.base.calling import called
from accelfn.checkpoint import commit, files
from accelfn.checkpoint.commit import Contents, Save
from accelfn.checkpoint.fields import encoded, fields_of
from accelfn.checkpoint.options import Given, check_frozen, check_path, states_of
from accelfn.checkpoint.slices import is_sharded
from accelfn.collectives import by_calls, gather_text
from accelfn.definition.fields import has_field
from accelfn.state.state import TrainState
from accelfn.structure.prototype import kind_of

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SHOWN = 1000
"""Characters of a transform's options that a manifest has."""


@called
def save(
    state: Given, directory: str | os.PathLike[str], *, frozen: str = "write"
) -> None:
    """Write every field of a state to a new directory; call it on all ranks.

    The directory has `manifest.json` and a safetensors file for each rank, and appears by one
    rename when all of it is on the disk. What all ranks hold alike is divided among them and
    can be loaded on any number of ranks; what is a rank's own, as under `local_sgd`, each
    writes for itself.

    Args:
        state: not donated; it stays as it is. Its slots may hold objects with `state_dict()`
            and `load_state_dict()`. Or several states of one world by name, as
            `{"generator": g, "critic": c}`: they are saved as one checkpoint, or none of them
            is, and are loaded together.
        directory: does not exist yet.
        frozen: "write" parameters that are not trained like all others, or keep their "hash"
            only: then the state that this is loaded into must have them. Those that
            `with_trainable` froze were trained before, and are written.

    Law: `load(save(s))` is `s`, bitwise, and a step from either is the same. Saving twice
    writes the same bytes.

    Cost: one reading of all tensors, to the disk and through BLAKE3; nothing is copied but
    from a GPU, a tensor at a time. On several ranks each hashes all that it has, and writes
    its part. With "hash", frozen parameters of which each rank has a part are gathered, 32 MiB
    at a time.

    Raises:
        CheckpointWriteError: on every rank, if any rank could not write; the reason is named
            and nothing is left under the directory's name.
    """
    first, states = states_of("af.save(state, directory)", state)
    check_frozen(frozen)
    check_path("af.save", directory, "state, ")
    job, exchange = save_of(first, Path(directory)), exchange_of(first, "save")
    contents: dict[str, Contents] = {}

    def begin() -> None:
        for name, each in states.items():
            contents[name] = contents_of(each, frozen)
        commit.begin(job)

    job.agreed(exchange, "begin", begin)
    commit.write(job, contents, exchange)


def exchange_of(state: TrainState, doing: str) -> commit.Exchange:
    """Return how ranks tell one another what came of each part of a save; a collective."""

    def exchange(what: str, text: str) -> list[str]:
        return gather_text(text, state.world, label=f"{doing}: {what}")

    return exchange


def save_of(state: TrainState, directory: Path) -> Save:
    """Return where a state is to be saved, with those that are saved with it."""
    world = state.world
    return Save(
        final=directory.absolute(), step=state.step, rank=world.rank, size=world.size
    )


def contents_of(
    state: TrainState, frozen: str, *, metrics: Mapping[str, float] | None = None
) -> Contents:
    """Return what is saved of a state; its tensors are the state's own."""
    # a run that ends here continues from what was saved, and owes nothing
    state.world.connection.activity.on_close.pop(state.name, None)
    fields, kept = fields_of(state), dict[str, str]()
    if frozen == "hash":
        trained = state.definition.skeleton.once_trained
        held = {n: p for n, p in fields["params"].items() if n not in trained}
        kept = files.digests({n: p for n, p in held.items() if not is_sharded(p)})
        for some in by_calls(held, state.world, label="hash frozen parameters"):
            kept |= files.digests(some)
        fields["params"] = {n: p for n, p in fields["params"].items() if n not in kept}
    units, tensors = encoded(fields)
    copies = state.definition.copy_of_each
    return Contents(
        units=units,
        tensors=tensors,
        slices=tensors.slices,
        copy=copies[state.world.rank] if copies else None,
        facts={
            "optimizer": optimizer_name(state),
            "transforms": tuple(each.name for each in state.setup),
            "data": None if state.data is None else state.data.facts,
            "kept": kept,
            "persistent": tuple(sorted(state.definition.skeleton.persistent)),
            "metrics": dict(metrics or {}),
            "definition": definition_of(state),
        },
    )


def definition_of(state: TrainState) -> dict[str, str]:
    """Return the facts of a definition that change what the next update computes."""
    frozen = state.params.keys() - {*state.trainable}
    acting = ("grads", "hyper", "after_update", "merge")
    options = {
        f"setup.{each.name}": _ADDRESS.sub("", repr(each))[:_SHOWN]
        for each in state.setup
        if any(has_field(each, field) for field in acting)
        and not has_field(each, "layout")
    }
    return {**{f"params.{name}": "frozen" for name in sorted(frozen)}, **options}


def optimizer_name(state: TrainState) -> str:
    """Return the class of a state's optimizer; of a partition, those of its parts."""
    metas = state.definition.skeleton.module.named_parameters()
    names = {id(param): name for name, param in metas}
    return kind_of(state.definition.optimizer, names)
