# SPDX-License-Identifier: Apache-2.0
# pyright: strict
# ruff: noqa: B018, F401
"""Typos: both type checkers find an error in each line that ends with `# typo`."""

import torch

import accelfn as af
from accelfn import plug
from accelfn.track import tensorbord  # typo
from accelfn.typing import Curser  # typo
from tests.typed.program import loss_fn, net, scale_grads


def names(state: af.TrainState, batch: af.Batch, metrics: af.Metrics) -> None:
    """Misspell modules' and records' names."""
    af.mkae_step(loss_fn)  # typo
    af.all_redcue(torch.ones(1), state.world)  # typo
    af.schedules.warmup_cosin(1, 2)  # typo
    af.orders.bucketd([1])  # typo
    af.errors.DataEror()  # typo
    af.track.wnadb("project")  # typo
    af.typing.Plann()  # typo
    plug.Layot()  # typo
    state.parms  # typo
    state.wrld.rank  # typo
    batch.end_epoch  # typo
    metrics.loss  # typo
    state.world.num_rank  # typo
    af.World.from_evn()  # typo
    state.step = 3  # typo


def options(world: af.World, state: af.TrainState) -> None:
    """Misspell options and their words."""
    scale_grads(faktor=2.0)  # typo
    af.ema(0.9, nam="ema")  # typo
    af.wrap_ddp(bucket_cap=5)  # typo
    af.wrap_fsdp(keep_grads="shards")  # typo
    af.wrap_deepspeed(4)  # typo
    af.autocast("bf61")  # typo
    af.compress_grads("powersdg")  # typo
    af.diloco(sync_every=2, bits=12)  # typo
    af.reduce_lr_on_plateau(0.5, mode="minimum")  # typo
    af.Data([1], global_batch_size=1, remainder="droop")  # typo
    af.Data([1], batch_size=1)  # typo
    af.all_reduce(torch.ones(1), world, "avg")  # typo
    af.start_all_reduce(torch.ones(1), world, "prod")  # typo
    af.join_uneven([1], world, ends="frist")  # typo
    af.borrow_model(state, at="evla")  # typo
    af.export_model(state, "model", at="test")  # typo
    af.TrainState.create(model=net, optimizer=torch.optim.SGD, init="shared")  # typo
    af.CheckpointStore("runs", best_is="least")  # typo
    af.CheckpointStore("runs", frozen="skip")  # typo
    af.load_part(state, "runs", ["params"], missing="ignore")  # typo
    af.schedules.one_cycle(10, peak=0.3)  # typo
    af.launch(2, print, nprocs=2)  # typo
    af.on_devices(net(), plan={}, wieghts=None)  # typo
    world.split(by="nodes")  # typo
    af.make_step(loss_fn, cuont=None)  # typo
