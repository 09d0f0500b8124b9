# SPDX-License-Identifier: Apache-2.0
"""Manifests with any change of structure and right digests: an error, or the saved state."""

import copy
import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.checkpoints import MANIFEST, STEP, node_at, nodes
from tests.internals import gather_text
from tests.states import values

VALUES = {"step", "cursor", "seed", "num_skipped"}
NUMBERS = (
    *(-1, 0, 1, 2, 3, 7, 63, 64, 65, 2**31, 2**32, 2**53, 2**62, 2**63, 10**12, 2**70),
    *(-(2**63), 10**30, 10**400, 0.0, -0.0, 0.5, 1e308, 1e-320, math.inf, math.nan),
)
LEAVES = (
    *NUMBERS,
    *(None, True, False, "", "x", "nan", "F64", "params.0.weight", "\ud800"),
)
KINDS = (
    *("tensor", "float", "dict", "pairs", "object", "pending", "list", "tuple", "set"),
)


def fresh(case: str, world: af.World) -> af.TrainState:
    """Return the state that a checkpoint is loaded into."""
    adam = partial(torch.optim.AdamW, lr=0.1, amsgrad=True)
    setup = {
        "alone": af.chain(af.ema(0.5), af.clip_grad_norm(1.0)),
        "apart": af.chain(af.local_sgd(sync_every=4), af.ema(0.5)),
        "split": af.chain(af.wrap_fsdp(), af.ema(0.5)),
    }[case]
    return af.TrainState.create(
        model=lambda: nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        ),
        optimizer=adam,
        data=af.Data(torch.linspace(-1, 1, 32).reshape(8, 4), global_batch_size=4),
        setup=af.chain(af.shard_data(), setup),
        world=world,
    )


def saved(case: str, folder: Path, world: af.World) -> dict[str, Any]:
    """Save a state two updates old; return its values."""
    state = fresh(case, world).with_slot("own", {"a": torch.ones(2), 3: [0.5, (None,)]})
    for batch in af.batches(state, until_epoch=1):
        state, _ = STEP(state, batch)
    af.save(state, folder)
    return values(state)


@cache
def original(case: str) -> tuple[Path, list[dict[str, Any]]]:
    """Return a checkpoint, and the values of the state on each rank."""
    folder = Path(tempfile.mkdtemp(prefix="accelfn-forged-")) / case
    size = 1 if case == "alone" else 2
    return folder, list(simulate(size, partial(saved, case, folder)))


def nested(value: Any, depth: int) -> Any:
    """Return a value in lists as trees code them."""
    for _ in range(depth):
        value = {"list": [value]}
    return value


def changed(draw: random.Random, plain: Any) -> tuple[Any, ...]:
    """Change any node of a manifest, and return its path."""
    places = list(nodes(plain))
    top = draw.choice(list(plain))
    path = draw.choice([p for p in places if p[0] == top])
    parent, key = node_at(plain, path[:-1]), path[-1]
    old, other = parent[key], copy.deepcopy(node_at(plain, draw.choice(places)))
    act = draw.randrange(8)
    if act == 0:
        del parent[key]
    elif act == 1 and isinstance(parent, dict):
        parent[draw.choice(("x", "params", "<group 7>", "0.weight"))] = parent.pop(key)
    else:
        several = draw.choice((0, 1, 2, 1000))
        parent[key] = draw.choice(
            (
                *(draw.choice(LEAVES), draw.choice(LEAVES), other),
                *({draw.choice(KINDS): old}, {draw.choice(KINDS): [old] * several}),
                *([old] * several, nested(old, draw.choice((2, 99, 101, 400)))),
                old + draw.choice(NUMBERS) if type(old) is int else str(old),
                {**old, "x": 1} if isinstance(old, dict) else [old, old],
            )
        )
    return path


def changed_in_trees(draw: random.Random, plain: Any) -> tuple[Any, ...]:
    """Change a tree so that it is still one: other tensors, kinds, numbers, entries."""
    of_trees = (path for path in nodes(plain) if path[0] == "trees")
    inside = [path for path in of_trees if isinstance(node_at(plain, path), dict)]
    path = draw.choice([p for p in inside if len(p) > 2 or node_at(plain, p)])
    parent, key = node_at(plain, path[:-1]), path[-1]
    ((kind, value), *_) = parent[key].items() or [("", None)]
    names = [p[3] for p in nodes(plain) if p[0] == "files" and len(p) == 4]
    choices = [
        {"tensor": draw.choice(names or ["x"])},
        draw.choice((0, 1, 0.5, 10**30, -1, "x", None, True)),
        {"dict": {}},
        {"list": []},
        {"pending": parent[key]},
        {"object": parent[key]},
    ]
    if kind == "dict" and value:
        less = dict(value)
        less.pop(draw.choice(list(value)))
        choices += [
            {"dict": less},
            {"pairs": [[n, v] for n, v in value.items()]},
            {"dict": {**value, "x": draw.choice(list(value.values()))}},
            {"list": list(value.values())},
        ]
    if kind in ("list", "tuple"):
        choices += [{"list": value[:-1]}, {"tuple": value}, {"list": [*value, *value]}]
    if kind in KINDS or isinstance(parent, list):
        parent[key] = draw.choice(choices)
    return path


def changed_in_files(draw: random.Random, plain: Any) -> tuple[Any, ...]:
    """Change what a manifest says of a tensor, in all places that say it."""
    file = draw.choice(list(plain["files"]))
    tensors = plain["files"][file]["tensors"]
    if not tensors:
        return ("files",)
    name, other = draw.choice(list(tensors)), draw.choice(list(tensors))
    entries = [
        f["tensors"][name] for f in plain["files"].values() if name in f["tensors"]
    ]
    entries += [plain["sharded"][name]] if name in plain.get("sharded", ()) else []
    shape = entries[0]["shape"]
    act = draw.randrange(5)
    if act == 0:
        for each in entries:
            each["dtype"] = draw.choice(("I32", "U32", "F32", "F64", "BF16", "I64"))
    elif act == 1:
        for each in entries:
            size = math.prod(each["shape"])
            each["shape"] = draw.choice(
                ([size], [1, size], [size, 1], [*reversed(each["shape"])], [*shape, 1])
            )
    elif act == 2:
        order = list(tensors)
        swap = {name: other, other: name}
        plain["files"][file]["tensors"] = {swap.get(n, n): tensors[n] for n in order}
    elif act == 3:
        key = draw.choice(("begin", "end"))
        entries[0][key] = draw.choice((0, 8, 64, 2**40, entries[0].get("begin", 0) + 4))
    else:
        entries[-1]["shape"] = draw.choice(([2**40], [2**62, 2], [0], [], [0, 2**62]))
    return ("files",)


def forged(draw: random.Random, plain: Any) -> tuple[bytes, set[str]]:
    """Return a changed manifest with its digest, and the fields that may have other values."""
    acts = (changed, changed_in_trees, changed_in_trees, changed_in_files)
    paths = [draw.choice(acts)(draw, plain) for _ in range(draw.choice((1, 1, 1, 2)))]
    units = {str(p[i]) for p in paths for i in (1, 2) if len(p) > i}
    free = {"slots" if each.startswith("slots.") else each for each in units}
    if any(len(p) < 2 + (p[0] == "trees_by_rank") for p in paths):
        free |= {*VALUES, "params", "buffers", "opt_state", "slots"}
    if {"per_rank", "copies", "sharded", "files"} & {p[0] for p in paths}:
        free |= {"params", "buffers", "opt_state", "slots"}
    said = json.dumps(plain, indent=draw.choice((1, None))).encode()[1:].lstrip()
    if draw.randrange(30) == 0 and b"," in said:  # a name twice
        first = said.index(b",")
        said = said[: first + 1] + said[: first + 1] + said[first + 1 :]
    return b'{\n "blake3": "%s",\n' % blake3(said).hexdigest().encode() + said, free


def fits(mine: Any, found: Any) -> bool:
    """Whether values have the kinds, shapes and dtypes of mine; more names are harmless."""
    if isinstance(mine, torch.Tensor):
        return (mine.shape, mine.dtype) == (found.shape, found.dtype)
    if isinstance(mine, Mapping):
        return all(name in found and fits(v, found[name]) for name, v in mine.items())
    if isinstance(mine, (list, tuple)):
        return all(fits(*pair) for pair in zip(mine, found, strict=True))
    numbers = (int, float)
    return isinstance(found, numbers if isinstance(mine, numbers) else type(mine))


def check(case: str, seed: int) -> str:
    """Load a forged manifest: an error of accelfn's, or the saved state, which trains."""
    folder, expected = original(case)
    draw = random.Random(seed)  # noqa: S311 - the same each time
    plain = json.loads((folder / MANIFEST).read_text())
    del plain["blake3"]
    data, free = forged(draw, plain)
    with tempfile.TemporaryDirectory() as into:
        copied = Path(into) / "saved"
        shutil.copytree(folder, copied, copy_function=os.link)
        (copied / MANIFEST).unlink()
        (copied / MANIFEST).write_bytes(data)

        def load(world: af.World) -> str:
            state = fresh(case, world)
            error = ""
            try:
                loaded = af.load(state, copied, allow=("trainable", "options", "name"))
            except af.errors.Error as raised:
                error = str(raised)
                assert len(error) < 5000
            if any(gather_text(error, world, label="errors")):
                return "error"
            mine = expected[world.rank]
            found = values(loaded)
            for field in found.keys() - free:
                assert mine[field] == found[field], field
            batch = torch.ones(4 // world.size, 4)
            state, _ = STEP(state, batch)
            loaded, _ = STEP(loaded, batch)
            assert fits(state.opt_state, loaded.opt_state)
            assert fits(state.slots, loaded.slots)
            return "loaded"

        outcomes = list(simulate(len(expected), load))
    assert len({*outcomes}) == 1
    return outcomes[0]


@pytest.mark.filterwarnings("ignore:step.state, batch. got a value that is no batch")
@example("alone", 6)  # a tensor of another shape
@example("apart", 7)  # values on their way
@example("split", 8)  # a count that is a table
@example("split", 26)  # a slot of numbers
@example("apart", 31)  # integers
@example("alone", 977054583)  # a slot that lacks a parameter
@example("split", 215)  # a buffer that is split
@given(case=st.sampled_from(["alone", "apart", "split"]), seed=st.integers(0, 2**32))
def test_a_forged_manifest_is_an_error_or_the_saved_state(case: str, seed: int) -> None:
    """Whatever a manifest says, `load` raises accelfn's error or gives a state that trains."""
    check(case, seed)
