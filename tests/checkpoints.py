# SPDX-License-Identifier: Apache-2.0
"""States to be saved in a moment, and checkpoints whose files or manifests are changed."""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from torch import nn

import accelfn as af
from accelfn.errors import CheckpointError

FILE, MANIFEST = "rank-00000.safetensors", "manifest.json"
X = torch.linspace(-1, 1, 24).reshape(8, 3)
STEP = af.make_step(lambda model, batch: model(batch).square().mean())


def net(width: int = 4, *, head: bool = True) -> nn.Sequential:
    """Return a model with running statistics."""
    layers = [nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1)]
    return nn.Sequential(*layers[: 2 + head])


def fresh(**options: Any) -> af.TrainState:
    """Return a state before its first update; options are those of `TrainState.create`."""
    adam = partial(torch.optim.Adam, lr=0.1)
    data = af.Data(X, global_batch_size=3)
    defaults = {"model": net, "optimizer": adam, "setup": af.ema(0.9), "data": data}
    return af.TrainState.create(**{**defaults, **options})


def made(**options: Any) -> af.TrainState:
    """Return a state two updates old."""
    state = fresh(**options)
    for _, batch in zip(range(2), af.batches(state), strict=False):
        state, _ = STEP(state, batch)
    return state


def refused(
    words: str, kind: type[Exception] = CheckpointError
) -> "pytest.RaisesExc[Exception]":
    """Expect, as a context, an error that a pattern describes."""
    return pytest.raises(kind, match=words)


class Bomb:
    """An object whose unpickling makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def damage(path: Path, at: int = -1, bit: int = 0) -> None:
    """Change a bit of a file, by default one of its last byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def plain_of(folder: Path) -> dict[str, Any]:
    """Return what a manifest says."""
    return json.loads((folder / MANIFEST).read_text())


def sealed(plain: dict[str, Any] | str) -> bytes:
    """Return the bytes of a manifest, or of its text, with a digest that is right."""
    if not isinstance(plain, str):
        plain = json.dumps({n: v for n, v in plain.items() if n != "blake3"}, indent=1)
    said = plain.encode()[1:].lstrip()
    return b'{\n "blake3": "%s",\n' % blake3(said).hexdigest().encode() + said


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a manifest says, and seal it again."""
    plain = plain_of(folder)
    change(plain)
    (folder / MANIFEST).write_bytes(sealed(plain))


def nodes(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every node below the root of plain data."""
    for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from nodes(value, (*path, key))


def node_at(plain: Any, path: tuple[Any, ...]) -> Any:
    """Return the node at a path."""
    for key in path:
        plain = plain[key]
    return plain
