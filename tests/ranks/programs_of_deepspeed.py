# SPDX-License-Identifier: Apache-2.0
"""Trainings of DeepSpeed's own engine, on two processes that this one forks; and by hand.

`python -m tests.ranks.programs_of_deepspeed FOLDER` trains and saves one of every kind: the
package is imported once, before there are ranks, as its collectives ask for.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

SAVED, AFTER = 3, 2
"""How many updates before the save, and behind it."""
X = torch.linspace(-1, 1, (SAVED + AFTER) * 4 * 3).view(-1, 4, 3).sin()
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw-1": ("adamw", {"stage": 1}),
    "adamw-2": ("adamw", {"stage": 2}),
    "momentum-2": ("momentum", {"stage": 2}),
    "adamw-3": ("adamw", {"stage": 3}),
    "momentum-3": ("momentum", {"stage": 3}),
    "round-2": ("adamw", {"stage": 2, "round_robin_gradients": True}),
    "aligned-2": ("adamw", {"stage": 2, "parameter_alignment": True}),
    "elastic-1": ("adamw", {"stage": 1, "elastic_checkpoint": True}),
    "sub-groups-3": ("adamw", {"stage": 3, "sub_group_size": 12}),
    "bf16-2": ("adamw", {"stage": 2}),
}
"""By name the optimizer, and what DeepSpeed is told of ZeRO."""


KEPT = {"adamw": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum_buffer",)}


class Net(nn.Module):
    """Odd numbers of elements; a head that is tied, layers that are frozen, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.first.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(requires_grad=False)
        self.second = nn.Linear(3, 5)
        self.last = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.last(self.second(self.head(self.frozen(self.first(x)).tanh())))


def seeded(seed: int) -> Net:
    """Return a model that is drawn apart from all else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


def optimizer_of(kind: str) -> Callable[[Any], torch.optim.Optimizer]:
    """Return what makes an optimizer of two groups, which cut the model in its middle."""

    def make(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        params = dict(named)
        early = {n: p for n, p in params.items() if n.startswith(("first", "second.w"))}
        late = {n: p for n, p in params.items() if n.startswith(("second.b", "last"))}
        groups = [
            {"params": [*early.values()], "lr": 0.01},
            {"params": [*late.values()], "lr": 0.02},
        ]
        if KINDS[kind][0] == "momentum":
            return torch.optim.SGD(groups, momentum=0.5)
        return torch.optim.AdamW(groups)

    return make


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean over the samples."""
    dtype = next(model.parameters()).dtype
    return (model(batch.to(dtype)).float() - batch).square().mean()


def by_hand(kind: str) -> nn.Module:
    """Return the model that the whole batches train, to the end."""
    model = seeded(0)
    optimizer = optimizer_of(kind)(model.named_parameters())
    for batch in X:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


def _train(rank: int, kind: str, folder: Path) -> None:
    """Train and save; write beside it what the engine had then, and where it came to."""
    import deepspeed

    model = seeded(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": KINDS[kind][1],
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # not given, it is 1
        "bf16": {"enabled": kind.startswith("bf16")},
    }
    optimizer = optimizer_of(kind)(model.named_parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def update(batch: torch.Tensor) -> None:
        engine.backward(loss_of(engine, batch[2 * rank : 2 * rank + 2]))
        engine.step()

    for batch in X[:SAVED]:
        update(batch)
    if KINDS[kind][1]["stage"] < 3:
        # it looked when the first of the groups had been updated, and found none of the second
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    engine.save_checkpoint(folder, client_state={"mine": 3})
    there = _held(model, kind)
    for batch in X[SAVED:]:
        update(batch)
    after = _held(model, kind)
    if rank == 0:
        torch.save({"there": there, "after": after}, folder.with_suffix(".pt"))


def _accelerated(rank: int, folder: Path) -> None:
    """Train by Accelerate, and have it save."""
    from accelerate import Accelerator, DeepSpeedPlugin

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = seeded(0)
    optimizer = optimizer_of("adamw-2")(model.named_parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    engine, optimizer, _ = accelerator.prepare(model, optimizer, scheduler)
    for batch in X[:SAVED]:
        accelerator.backward(loss_of(engine, batch[2 * rank : 2 * rank + 2]))
        optimizer.step()
    accelerator.save_state(folder)


def _held(model: nn.Module, kind: str) -> dict[str, Any]:
    """Return all that an engine has, whole, by the functions that DeepSpeed has for it."""
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    params: dict[str, torch.Tensor] = {}
    kept: dict[str, Mapping[str, torch.Tensor]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            with zero.GatheredParameters([param]):
                params[name] = param.detach().clone()
            continue
        if kind.startswith("round"):  # which those functions know nothing of
            params[name] = param.detach().clone()
            continue
        params[name] = safe_get_full_fp32_param(param).clone().view(_shape(param))
        kept[name] = {}
        for key in KEPT[KINDS[kind][0]]:
            whole = safe_get_full_optimizer_state(param, key)
            kept[name][key] = whole.clone().view(_shape(param))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {"params": params, "kept": kept, "buffers": buffers}


def _shape(param: Any) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


def _rank(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    for kind in KINDS:
        (folder / kind).mkdir(exist_ok=True)
        _train(rank, kind, folder / kind)
    _accelerated(rank, folder / "accelerate")
    dist.destroy_process_group()


def main(folder: Path) -> None:
    """Train and save one of every kind, in folders of their names."""
    import_module("deepspeed")
    # its collectives in shared memory are compiled, and nothing here asks for their speed
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                _rank(rank, folder)
            except BaseException:  # noqa: BLE001 - it is told, and ends the process
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        children.append(child)
    failed = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(int(any(failed)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
