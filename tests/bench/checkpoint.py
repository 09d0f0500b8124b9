# SPDX-License-Identifier: Apache-2.0
"""Save and load a model with 42 million parameters and AdamW's state (504 MB)."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from blake3 import blake3
from figures import Figure
from rounds import compared, timed
from torch import nn

import accelfn as af
from tests.internals import encode_fields, fields_of

LAYERS, WIDTH = 10, 2048  # 10 * 2048 * 2049 = 42 million


def network() -> nn.Module:
    """Return the model."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def trained() -> af.TrainState:
    """Return a state after one update, so that the optimizer has its moments."""
    state = af.TrainState.create(model=network, optimizer=torch.optim.AdamW)
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    return step(state, torch.randn(2, WIDTH))[0]


def accelerated(folder: Path) -> Callable[[], object]:
    """Return a function that saves the same model and optimizer with Accelerate."""
    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    accelerator.prepare(model, optimizer)
    return lambda: accelerator.save_state(str(folder / "accelerate"))


def loop(act: Callable[[], object]) -> Callable[[int], None]:
    """Return a loop that calls `act` a number of times."""

    def acts(times: int) -> None:
        for _ in range(times):
            act()

    return acts


@contextmanager
def folder() -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield a folder on the disk of the current directory, and a function that empties it."""
    there = Path.cwd() / "build"  # git ignores this folder, even if it is not removed
    there.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=there) as name:
        root = Path(name)

        def clear() -> None:
            for path in root.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

        yield root, clear


def measure_pause(rounds: int) -> list[Figure]:
    """Measure how long training waits for a save, compared with a copy of the tensors."""
    state = trained()
    tensors = dict(encode_fields(fields_of(state))[1])
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    def copy() -> None:
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)

    with folder() as (root, clear), af.CheckpointStore(root, keep=None) as store:

        def settle() -> None:
            """Wait for the save in the background, and empty the folder."""
            store.wait()
            clear()

        acts = {
            "a copy of the tensors": copy,
            "accelfn CheckpointStore": lambda: store.save(state),
            "torch.save": lambda: torch.save(tensors, root / "torch.pt"),
            "Accelerate save_state": accelerated(root),
        }
        loops = {name: loop(act) for name, act in acts.items()}
        return compared(timed(loops, rounds=rounds, steps=1, settle=settle))


def measure_save(rounds: int) -> list[Figure]:
    """Measure how long a complete save takes, compared with Accelerate."""
    state = trained()
    tensors = dict(encode_fields(fields_of(state))[1])
    with folder() as (root, clear):
        acts = {
            "Accelerate save_state": accelerated(root),
            "accelfn save": lambda: af.save(state, root / "accelfn"),
            "torch.save": lambda: torch.save(tensors, root / "torch.pt"),
            "safetensors save_file": lambda: safetensors.torch.save_file(
                tensors, root / "all.safetensors"
            ),
            "torch.distributed.checkpoint": lambda: dcp.save(
                tensors, checkpoint_id=str(root / "dcp"), no_dist=True
            ),
        }
        loops = {name: loop(act) for name, act in acts.items()}
        return compared(timed(loops, rounds=rounds, steps=1, settle=clear))


def measure_load(rounds: int) -> list[Figure]:
    """Measure how long it takes to load and verify a checkpoint."""
    state = trained()
    with folder() as (root, _):
        af.save(state, root / "accelfn")
        path = root / "accelfn" / "rank-00000.safetensors"

        def verified() -> None:
            with path.open("rb") as file:
                hashlib.file_digest(file, blake3)
            safetensors.torch.load_file(path)

        acts = {
            "safetensors load_file, and BLAKE3": verified,
            "accelfn load": lambda: af.load(state, root / "accelfn"),
            "accelfn load, verify=False": lambda: af.load(
                state, root / "accelfn", verify=False
            ),
            "safetensors load_file": lambda: safetensors.torch.load_file(path),
        }
        loops = {name: loop(act) for name, act in acts.items()}
        return compared(timed(loops, rounds=rounds, steps=1))
