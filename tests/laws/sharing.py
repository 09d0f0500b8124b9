# SPDX-License-Identifier: Apache-2.0
"""What the laws of sharing look at: a state of every sort of tensor, and where tensors lie."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import attrs
import torch
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import local
from tests.states import values

SETUPS = {
    "none": af.chain(),
    "micro-batches, averaged": af.chain(
        af.accumulate(num_micro_batches=2), af.clip_grad_norm(0.5), af.ema(0.5)
    ),
    "fp16": af.chain(af.autocast("fp16", growth_interval=1), af.skip_nonfinite()),
    "apart": af.chain(af.local_sgd(sync_every=2, opt_state=True, buffers=True)),
    "in flight": af.chain(af.diloco(sync_every=2, delay=1, fragments=2, bits=8)),
}


class Net(nn.Module):
    """A parameter of one number, one that is frozen, and buffers that a pass writes, or assigns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.scale = nn.Parameter(torch.ones(()))
        self.still = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes = self.passes + 1
        return self.norm(self.inner(x)) * self.scale + self.still


class Counted:
    """A loss that reports what moves: a parameter, a buffer, and counters of its own."""

    def __init__(self) -> None:
        self.calls, self.weight = torch.zeros(()), torch.ones(())

    def __call__(self, model: Any, batch: Any, *extras: Any) -> af.Loss:
        x, y = batch
        y = y * (1 + extras.count("others"))
        self.calls.add_(1)
        self.weight.fill_(float(len(x)))
        return af.Loss(
            (model(x) - y).square().mean(1).sum(),
            self.weight,
            scale=(model.scale, 1),
            mean=model.norm.running_mean[0],
            calls=(self.calls, self.weight),
        )


@attrs.frozen(eq=False)
class Scene:
    """A state in mid-run, and what takes its updates.

    Attributes:
        state: after some updates.
        loss: what it trains by.
        world: where.
    """

    state: af.TrainState
    loss: Any
    world: af.World

    @classmethod
    def of(cls, world: af.World, setup: str, *, updates: int) -> "Scene":
        """Return the same one each time."""
        at = torch.Generator().manual_seed(0)
        rows = torch.randn(24, 3, generator=at), torch.randn(24, 2, generator=at)
        reduced = [] if setup in ("apart", "in flight") else [af.wrap_ddp()]
        state = af.TrainState.create(
            model=Net,
            optimizer=partial(torch.optim.SGD, lr=0.25, momentum=0.5),
            data=af.Data(rows, global_batch_size=8, shuffle=True),
            setup=af.chain(af.shard_data(), *reduced, SETUPS[setup]),
            world=world,
        ).with_slot("mine", {"best": torch.ones(2), "notes": [1, {"a": 2}]})
        made = cls(state, Counted(), world)
        return attrs.evolve(made, state=made.trained(updates))

    @property
    def batch(self) -> af.Batch:
        """The next batch."""
        return next(iter(af.batches(self.state)))

    def step(
        self, state: af.TrainState, **options: Any
    ) -> tuple[af.TrainState, af.Metrics]:
        """Take an update."""
        batch = next(iter(af.batches(state)))
        return af.make_step(self.loss)(state, batch, **options)

    def trained(self, updates: int) -> af.TrainState:
        """Return the state after some updates more; it is given away, unless it is none."""
        state = self.state
        for _ in range(updates):
            state, _ = self.step(state)
        return state


def fields(state: af.TrainState) -> dict[str, Any]:
    """Return all containers and tensors of a state."""
    names = "params", "buffers", "opt_state", "slots"
    return {name: getattr(state, name) for name in names}


def module_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's tensors."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a tree; of what is split, this rank's part."""
    if isinstance(tree, torch.Tensor):
        yield local(tree).detach()
    elif isinstance(tree, af.Pending):
        yield from tensors_in(tree.wait())
    elif isinstance(tree, af.Metrics):
        yield from (tree[name] for name in tree)
    elif isinstance(tree, Mapping):
        for each in tree.values():
            yield from tensors_in(each)
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from tensors_in(each)


def containers_in(tree: Any) -> Iterator[Any]:
    """Yield the dicts and lists in a tree that whoever has it can change."""
    if isinstance(tree, (dict, list)):
        yield tree
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for each in tree:
            yield from containers_in(each)


def same_containers(one: Any, two: Any) -> bool:
    """Whether a dict or list of a tree stands in another."""
    first = [*containers_in(one)]
    return bool(
        {id(each) for each in first} & {id(each) for each in containers_in(two)}
    )


def ruin(tree: Any) -> None:
    """Overwrite whatever can be in a tree: tensors, then the dicts and lists they were in."""
    changed = [*containers_in(tree)]
    for tensor in tensors_in(tree):
        if not any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape)):  # noqa: B905
            tensor.fill_(3)
    for each in changed:
        each.clear()


def spans(tree: Any) -> dict[tuple[int, int], torch.Tensor]:
    """Return the bytes that tensors lie in."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    for each in tensors_in(tree):
        if each.numel():
            pairs = zip(each.shape, each.stride(), strict=True)
            last = sum((n - 1) * stride for n, stride in pairs)
            begin = each.data_ptr()
            found[begin, begin + (last + 1) * each.element_size()] = each
    return found


def in_common(one: Any, two: Any) -> int:
    """Return how many tensors of a tree lie in the memory of another's."""
    others = spans(two)
    return sum(
        any(begin < end and start < stop for start, end in others)
        for begin, stop in spans(one)
    )


@cache
def undisturbed(size: int, setup: str, updates: int) -> tuple[Any, ...]:
    """Return each rank's state of two updates later, where nobody looks."""
    return simulate(
        size, lambda world: values(Scene.of(world, setup, updates=updates).trained(2))
    ).results


def stored(scene: Scene, read: Callable[[str], Any], save: Callable[..., Any]) -> Any:
    """Return what is read of what is saved in a directory that all ranks see."""
    made = tempfile.mkdtemp() if scene.world.is_main else None
    parent = af.broadcast_object(made, scene.world)
    save(scene.state, f"{parent}/saved")
    found = read(f"{parent}/saved")
    af.barrier(scene.world)
    return found
