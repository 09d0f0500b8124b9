# SPDX-License-Identifier: Apache-2.0
"""Public calls, each with a state, a model and a folder of its own, which may be broken off."""

import functools
import gc
import io
import random
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset

import accelfn as af
from accelfn.testing import simulate
from tests.laws.broken_off import inside
from tests.states import bits, values

X = torch.linspace(-1, 1, 24 * 3).reshape(24, 3)


class Net(nn.Module):
    """Has what a state can hold: parameters, buffers, and draws in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.first(x)).relu()))


def mean_loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (net(batch)[:, 0] - batch[:, 1]).square().mean()


def weighted_loss(net: nn.Module, batch: torch.Tensor) -> af.Loss:
    """Return a total whose weight is a tensor, as that of tokens."""
    weights = batch[:, 0].abs()
    errors = (net(batch)[:, 0] - batch[:, 1]).square()
    return af.Loss((errors * weights).sum(), weights.sum())


STEPS = {each: af.make_step(each) for each in (mean_loss, weighted_loss)}
COMPUTES = {each: af.value_and_grad(each) for each in STEPS}


def measure(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return net(batch).mean()


@af.transform
class Everywhere:
    """Has a say in all that happens, draws, and counts."""

    tells: ClassVar[Mapping[str, Any]] = {"sees_skips": True}

    def init(self, state):
        return {"seen": torch.zeros(()), "drawn": torch.rand(2)}

    def loss(self, loss_fn, slot, update):
        return functools.partial(loss_fn), slot

    def hyper(self, hyper, slot, update):
        return {"lr": 0.05}, slot

    def grads(self, grads, slot, update):
        seen = slot["seen"] + 1
        return grads, {**slot, "seen": seen, "drawn": torch.rand(2)}

    def after_update(self, state, slot, update):
        return state, {**slot, "seen": slot["seen"] + 2}

    def eval_params(self, params, slot, update):
        return {name: param * 2 for name, param in params.items()}, slot

    def finalize(self, state, slot, update):
        for param in state.params.values():
            param.mul_(0.5)
        return state, slot


SETUPS = {
    "plain": af.chain(),
    "users": Everywhere(),
    "many": af.chain(
        af.accumulate(num_micro_batches=2),
        af.clip_grad_norm(0.5),
        af.skip_nonfinite(),
        af.ema(0.5),
    ),
    "in backward": af.optimizer_in_backward(),
    "in halves": af.chain(af.autocast("bf16"), af.reduce_lr_on_plateau(patience=0)),
}
OVER_RANKS = {
    "ddp": af.chain(af.shard_data(), af.wrap_ddp(), af.ema(0.5)),
    "apart": af.chain(af.shard_data(), af.local_sgd(sync_every=2)),
    "parts": af.chain(af.shard_data(), af.wrap_fsdp(nn.Linear), af.ema(0.5)),
}
OPTIMIZERS = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.05),
}


def a_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


@attrs.define
class Scene:
    """What one call is given: a state and a model of its own, and an empty folder."""

    state: af.TrainState
    loss: Any
    folder: Path
    net: nn.Module = attrs.field(factory=a_net)
    optimizer: str = "momentum"

    @property
    def batch(self) -> Any:
        return next(iter(af.batches(self.state)))

    def gradients(self, **options: Any) -> af.Grads:
        return COMPUTES[self.loss](self.state, self.batch, **options)[1]


class Rows(Dataset[torch.Tensor]):
    """Samples that are read one by one, and augmented."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> torch.Tensor:
        return X[index] + 0.1 * random.random() * torch.rand(3)  # noqa: S311 - as theirs


def created(setup, optimizer, world=None, *, by_one=False):
    return af.TrainState.create(
        model=Net,
        optimizer=OPTIMIZERS[optimizer],
        data=af.Data(Rows() if by_one else X, global_batch_size=6),
        setup=(SETUPS | OVER_RANKS)[setup],
        world=world,
    )


def follow(state: af.TrainState, loss: Any) -> list[Any]:
    """Return all of a state after each of two updates more."""
    found = []
    for batch, _ in zip(af.batches(state), range(2), strict=False):
        state, metrics = STEPS[loss](state, batch)
        found.append((values(state), repr(metrics)))
    return found


def told(value: Any) -> Any:
    """Return what a call gave, to be compared bitwise."""
    if isinstance(value, af.TrainState):
        return values(value)
    if isinstance(value, nn.Module):
        return bits(value.state_dict())
    if isinstance(value, af.Grads):
        value = dict(value.tensors), dict(value.buffers)
    if isinstance(value, af.typing.Loaded):
        return told(value.state), repr(attrs.evolve(value, state=None))
    if isinstance(value, af.Batch):
        return bits(list(value.micro_batches))
    is_several = isinstance(value, (list, tuple))
    return [told(each) for each in value] if is_several else bits(value)


# The calls


def older_gradients(scene: Scene) -> Any:
    first, second = scene.gradients(), scene.gradients()
    return scene.gradients(into=first), second


def finalize(scene: Scene) -> Any:
    return af.finalize(scene.state)


def build(scene: Scene) -> Any:
    af.release_engine(scene.state)
    return af.prepare_engine(scene.state)


def with_params(scene: Scene) -> Any:
    doubled = {n: 2 * p for n, p in scene.state.params.items()}
    return scene.state.with_params(doubled)


def bind(scene: Scene) -> Any:
    with af.borrow_model(scene.state, at="train") as net:
        return inside(measure(net.eval(), X[:2]).detach())


def rng(scene: Scene) -> Any:
    with af.fork_rng(scene.state, "a word"):
        return inside(torch.rand(3))


def predict(scene: Scene) -> Any:
    data = af.Data(X, global_batch_size=8)
    return list(af.predict(scene.state, data, lambda net, batch: net(batch)))


def kept(scene: Scene) -> Path:
    """Return a folder in which the state was saved in all ways."""
    folder = scene.folder.parent / "kept"
    if not folder.exists():
        folder.mkdir()
        for write in (save, export, stored):
            write(attrs.evolve(scene, folder=folder))
    return folder


def save(scene: Scene) -> Any:
    af.save(scene.state, scene.folder / "saved")
    return tree(scene.folder)


def load(scene: Scene) -> Any:
    return af.load(scene.state, kept(scene) / "saved")


def export(scene: Scene) -> Any:
    af.export_model(scene.state, scene.folder / "exported", at="eval")
    return tree(scene.folder)


def stored(scene: Scene) -> Any:
    with af.CheckpointStore(scene.folder / "run", async_=False) as store:
        store.save(scene.state)
    return tree(scene.folder)


def restored(scene: Scene) -> Any:
    with af.CheckpointStore(kept(scene) / "run") as store:
        return store.restore(scene.state)


def stored_behind(scene: Scene) -> Any:
    with af.CheckpointStore(scene.folder / "run", async_=True) as store:
        store.save(scene.state)
        inside(store).wait()
    return tree(scene.folder)


def import_state(scene: Scene) -> Any:
    """Take what another library saved of a model and its optimizer."""
    folder = scene.folder.parent / "theirs"
    if not folder.exists():
        folder.mkdir()
        net = a_net()
        optimizer = OPTIMIZERS[scene.optimizer](net.parameters())
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        save_file(net.state_dict(), folder / "model.safetensors")
        torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    return af.import_state(scene.state, folder)


def with_world(scene: Scene) -> Any:
    world = scene.state.world
    other = world if world.size > 1 else af.World.single(device="cpu")
    return af.with_world(scene.state, other)


def read_ahead(scene: Scene) -> Any:
    """Read in a process of its own, whose pipes lie in a cycle of torch's."""
    data = af.Data(Rows(), global_batch_size=8, num_workers=1)
    found = list(af.predict(scene.state, data, lambda net, batch: net(batch)))
    gc.collect()
    return found


def profile(scene: Scene) -> Any:
    world = scene.state.world
    with af.profile(scene.folder, world, wait=0, warmup=1, active=1) as profiler:
        for _ in range(2):
            inside(measure(scene.net.eval(), X[:2]))
            profiler.step()
    return [each.name for each in scene.folder.iterdir()]


def explain(scene: Scene) -> Any:
    with redirect_stdout(io.StringIO()) as said:
        scene.state.setup.explain()
    return said.getvalue()


def run(scene: Scene) -> Any:
    done: list[Any] = []

    def act(state, _):
        return af.evaluate(state, af.Data(X, global_batch_size=12), measure)

    def track(numbers, update):
        done.append((numbers, update))

    state = af.run(
        scene.state,
        STEPS[scene.loss],
        until=scene.state.step + 3,
        actions={2: act},
        track=track,
        store=af.CheckpointStore(scene.folder / "run", every=2, async_=False),
    )
    return state, done


def stopping(scene: Scene) -> Any:
    with af.stopping(scene.state.world) as stop:
        return inside(stop.requested())


def find_batch_size(scene: Scene) -> Any:
    def fn(batch_size, _):
        if batch_size > 3:
            raise torch.OutOfMemoryError
        return batch_size

    return af.find_batch_size(fn, 8, scene.state.world)


def placed(scene: Scene) -> Any:
    net = scene.net.eval()
    plan = af.plan_devices(net, {"cpu": "1GiB", "disk": str(scene.folder)})
    plan = plan.moved("first", "disk").moved("head", "disk")
    with torch.no_grad(), af.on_devices(net, plan) as model:
        return inside(model(X[:2]))


def jsonl(scene: Scene) -> Any:
    path = scene.folder / "log.jsonl"
    with af.track.jsonl(path, world=scene.state.world) as track:
        inside(track)({"loss": 1.0}, 1)
        track({"loss": torch.tensor(2.0)}, 2)
    return len(path.read_text().splitlines())


def empty_weights(_: Scene) -> Any:
    with af.empty_weights():
        return [str(each.device) for each in inside(a_net()).parameters()]


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(each.relative_to(folder)): each.read_bytes()
        for each in sorted(folder.rglob("*"))
        if each.is_file()
    }


CALLS = {
    "step": lambda scene: STEPS[scene.loss](scene.state, scene.batch)[0],
    "step_on_a_copy": lambda scene: STEPS[scene.loss](
        scene.state, scene.batch, donate=False
    )[0],
    "gradients": lambda scene: scene.gradients(),
    "more_gradients": lambda scene: scene.gradients(into=scene.gradients()),
    "older_gradients": older_gradients,
    "apply": lambda scene: af.apply_grads(scene.state, scene.gradients()),
    "finalize": finalize,
    "build": build,
    "copy": lambda scene: scene.state.copy(),
    "eval_params": lambda scene: dict(af.eval_params(scene.state)),
    "full_params": lambda scene: af.full_params(scene.state, at="eval"),
    "with_setup": lambda scene: scene.state.with_setup(
        af.chain(SETUPS["many"], Everywhere(name="new"))
    ),
    "with_params": with_params,
    "with_trainable": lambda scene: scene.state.with_trainable(
        lambda name, _: name.startswith("head")
    ),
    "bind": bind,
    "frozen": lambda scene: af.snapshot_model(scene.state, at="eval"),
    "rng": rng,
    "evaluate": lambda scene: af.evaluate(
        scene.state, af.Data(X, global_batch_size=8), measure
    ),
    "predict": predict,
    "batches": lambda scene: [
        batch for batch, _ in zip(af.batches(scene.state), range(5), strict=False)
    ],
    "seek": lambda scene: af.seek(scene.state, 6),
    "save": save,
    "load": load,
    "load_part": lambda scene: af.load_part(
        scene.state, kept(scene) / "saved", ["params", "buffers"]
    ),
    "export": export,
    "import_model": lambda scene: af.import_model(Net, kept(scene) / "exported"),
    "import_onto": lambda scene: af.import_model(scene.net, kept(scene) / "exported"),
    "stored": stored,
    "restored": restored,
    "memory": lambda scene: str(af.memory(scene.state)),
    "memory_estimate": lambda scene: str(
        af.memory_estimate(Net, scene.state.setup, optimizer=OPTIMIZERS["adamw"])
    ),
    "explain": explain,
    "create": lambda _: created("users", "adamw"),
    "create_in_parts": lambda _: af.TrainState.create(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)),
        optimizer=OPTIMIZERS["adamw"],
        init="shard",
    ),
    "run": run,
    "stopping": stopping,
    "find_batch_size": find_batch_size,
    "placed": placed,
    "jsonl": jsonl,
    "simulated": lambda _: (
        simulate(2, lambda world: af.all_reduce(torch.ones(2), world, "sum")).results
    ),
    "observe": lambda scene: af.report_metric(scene.state, 0.5),
    "empty_weights": empty_weights,
    "stored_behind": stored_behind,
    "import_state": import_state,
    "with_world": with_world,
    "split": lambda scene: af.split_over_ranks({"x": X}, scene.state.world),
    "lockstep": lambda scene: list(
        af.join_uneven([X[:2], [X[2:4], X[4:6]]], scene.state.world)
    ),
    "read_ahead": read_ahead,
    "profile": profile,
}
TOGETHER = [
    CALLS[name]
    for name in (
        *("step", "evaluate", "predict", "finalize", "eval_params", "full_params"),
        *("save", "load", "with_world", "split", "lockstep"),
    )
]
"""Those that ranks make together."""
