# SPDX-License-Identifier: Apache-2.0
"""The scheduler lines of Accelerate's example scripts, as they stand there and as ported.

Run as a program, it prints what Accelerate's own loop sets in the groups at each update. It
is a process of its own, for Accelerate keeps singletons.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import (
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_scheduler,
)

BATCHES, EPOCHS, LR = 10, 3, 2e-5
STEPS = BATCHES * EPOCHS
ADAMW = partial(torch.optim.AdamW, lr=LR)

Line = tuple[Callable[..., Any], Callable[[Any], Any], int]


def no_decay(params: Any) -> torch.optim.Optimizer:
    """Return AdamW in the two groups of the scripts that are for language models."""
    weight, bias = (each[1] if isinstance(each, tuple) else each for each in params)
    groups = [
        {"params": [weight], "weight_decay": 0.01},
        {"params": [bias], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=5e-5)


SCRIPTS: dict[str, Line] = {
    "nlp_example, complete_nlp_example, by_feature/*": (
        ADAMW,
        partial(
            get_linear_schedule_with_warmup,
            num_warmup_steps=100,
            num_training_steps=STEPS,
        ),
        1,
    ),
    "cv_example, complete_cv_example": (
        partial(torch.optim.Adam, lr=3e-2 / 25),
        partial(
            torch.optim.lr_scheduler.OneCycleLR,
            max_lr=3e-2,
            epochs=EPOCHS,
            steps_per_epoch=BATCHES,
        ),
        1,
    ),
    "by_feature/gradient_accumulation, automatic_gradient_accumulation": (
        ADAMW,
        partial(
            get_linear_schedule_with_warmup,
            num_warmup_steps=4,
            num_training_steps=STEPS // 2,
        ),
        2,
    ),
    "by_feature/fsdp_with_peak_mem_tracking": (
        ADAMW,
        partial(
            get_linear_schedule_with_warmup,
            num_warmup_steps=10,
            num_training_steps=STEPS,
        ),
        1,
    ),
    **{
        f"by_feature/deepspeed_with_config_support --lr_scheduler_type {name}": (
            no_decay,
            partial(get_scheduler, name, num_warmup_steps=3, num_training_steps=STEPS),
            1,
        )
        for name in (
            "linear",
            "cosine",
            "cosine_with_restarts",
            "polynomial",
            "constant",
            "constant_with_warmup",
        )
    },
    "by_feature/megatron_lm_gpt_pretraining": (
        no_decay,
        partial(
            get_cosine_schedule_with_warmup,
            num_warmup_steps=3,
            num_training_steps=STEPS,
        ),
        1,
    ),
}
"""By script: the optimizer, the scheduler, and the micro-batches of an update."""


def stepped(name: str) -> list[list[Any]]:
    """Return what Accelerate's loop has in its groups at each update."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    make, schedule, accumulated = SCRIPTS[name]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    model = torch.nn.Linear(2, 1)
    optimizer = make(list(model.parameters()))
    rows = torch.utils.data.TensorDataset(torch.ones(4 * BATCHES, 2))
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, schedule(optimizer)
    )
    found: list[list[Any]] = []
    for _ in range(EPOCHS):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                if accelerator.sync_gradients:
                    found.append(
                        [[g["lr"], g["betas"]] for g in optimizer.param_groups]
                    )
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return found


if __name__ == "__main__":
    print(json.dumps({name: stepped(name) for name in SCRIPTS}))  # noqa: T201 - it is read
