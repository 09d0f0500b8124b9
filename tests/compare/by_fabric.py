# SPDX-License-Identifier: Apache-2.0
"""The same with Lightning Fabric."""

import os

import torch
from lightning_fabric import Fabric
from task import BATCH, EPOCHS, RATE, Record, datasets, make_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

# begin
size = int(os.environ.get("WORLD_SIZE", "1"))
fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto")
fabric.launch()
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), RATE)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(datasets()[0], BATCH // size))
record = Record()
for _epoch in range(EPOCHS):
    for inputs, targets in loader:
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        record.update(loss.item(), len(targets))
# end
record.write(model.module)
