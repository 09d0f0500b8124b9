# SPDX-License-Identifier: Apache-2.0
"""The same with accelfn."""

from functools import partial

import torch
from task import BATCH, EPOCHS, RATE, Record, datasets, make_model
from torch.nn.functional import cross_entropy

import accelfn as af


# begin
def loss_fn(model, batch):
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


with af.World.from_env() as world:
    state = af.TrainState.create(
        model=make_model(),
        optimizer=partial(torch.optim.SGD, lr=RATE),
        data=af.Data(datasets()[0].tensors, global_batch_size=BATCH, shuffle=False),
        setup=af.chain(af.shard_data(), af.wrap_ddp()),
        world=world,
        seed=0,
    )
    step = af.make_step(loss_fn)
    record = Record()
    for batch in af.batches(state, until_epoch=EPOCHS):
        state, metrics = step(state, batch)
        record.update(metrics["loss"].item(), len(batch.value[1]))
    # end
    record.write(af.snapshot_model(state, at="eval"))
