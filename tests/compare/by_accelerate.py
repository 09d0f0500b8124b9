# SPDX-License-Identifier: Apache-2.0
"""The same with Hugging Face Accelerate."""

import torch
from accelerate import Accelerator
from task import BATCH, EPOCHS, RATE, Record, datasets, make_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

# begin
accelerator = Accelerator(cpu=True)
model = make_model()
loader = DataLoader(datasets()[0], BATCH // accelerator.num_processes)
optimizer = torch.optim.SGD(model.parameters(), RATE)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
record = Record()
for _epoch in range(EPOCHS):
    for inputs, targets in loader:
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        record.update(loss.item(), len(targets))
accelerator.end_training()
# end
record.write(accelerator.unwrap_model(model))
