# SPDX-License-Identifier: Apache-2.0
"""A loop by hand, with torch's DistributedDataParallel where there are two processes."""

import os

import torch
from task import BATCH, EPOCHS, RATE, Record, datasets, make_model
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

# begin
size = int(os.environ.get("WORLD_SIZE", "1"))
model, sampler = make_model(), None
train_set, _ = datasets()
trained = model
if size > 1:
    dist.init_process_group("gloo")
    trained = DistributedDataParallel(model)
    sampler = DistributedSampler(train_set, shuffle=False)
loader = DataLoader(train_set, BATCH // size, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), RATE)
record = Record()
for _epoch in range(EPOCHS):
    for inputs, targets in loader:
        loss = cross_entropy(trained(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record.update(loss.item(), len(targets))
if size > 1:
    dist.destroy_process_group()
# end
record.write(model)
