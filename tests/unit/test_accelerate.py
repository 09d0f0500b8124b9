# SPDX-License-Identifier: Apache-2.0
"""Pages that port Accelerate's tutorials name what there is; ported scripts take its rates.

Run as a program, it prints what Accelerate's own loop sets in the groups at each update. That
is a process of its own, for Accelerate keeps singletons.
"""

import inspect
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import attrs
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.optim.lr_scheduler import OneCycleLR
from transformers import (
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_scheduler,
)

import accelfn as af
from accelfn.testing import quantities
from tests.states import linear_state
from tests.waiting import HANGS

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/how-to").glob("accelerate-*.md"))
CLASS = PAGES[0].with_name("accelerate-class.md").read_text()
ROW = re.compile(r"^\| (.*?) \| .* \|$", re.MULTILINE)
HAVE = {"af": af, "world": af.World, "state": af.TrainState}
ARGUMENTS, MEMBERS = CLASS.split("## Processes and devices")


def first_column(text):
    """Return the names in the first columns of the tables of a page's part."""
    return set(re.findall(r"`(\w+)`", " ".join(ROW.findall(text))))


def test_every_name_of_the_class_has_a_row():
    """Each member and constructor argument of Accelerate's class, as installed, and no other."""
    names = {name for name in dir(Accelerator) if not name.startswith("_")}
    assert first_column(MEMBERS) == names
    assert first_column(ARGUMENTS) == set(inspect.signature(Accelerator).parameters)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_port_names_what_there_is(page):
    """Each `af.name`, `world.name` and `state.name` of a page is one of accelfn's."""
    found = set(re.findall(r"\b(af|world|state)\.(?!md\b)(\w+)", page.read_text()))
    assert len(found) >= 5
    assert [name for name in found if not hasattr(HAVE[name[0]], name[1])] == []


# The scheduler lines of the example scripts

BATCHES, EPOCHS, LR = 10, 3, 2e-5
STEPS = BATCHES * EPOCHS
ADAMW = partial(torch.optim.AdamW, lr=LR)


def no_decay(params):
    """Return AdamW in the two groups of the scripts that are for language models."""
    weight, bias = (each[1] if isinstance(each, tuple) else each for each in params)
    groups = [
        {"params": [weight], "weight_decay": 0.01},
        {"params": [bias], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=5e-5)


def warmed(make, warmup, total=STEPS):
    return partial(make, num_warmup_steps=warmup, num_training_steps=total)


LINEAR = get_linear_schedule_with_warmup
ONE_CYCLE = partial(OneCycleLR, max_lr=3e-2, epochs=EPOCHS, steps_per_epoch=BATCHES)
DEEPSPEED = "by_feature/deepspeed_with_config_support --lr_scheduler_type"
SCRIPTS = {
    "nlp_example, complete_nlp_example": (ADAMW, warmed(LINEAR, 100), 1),
    "cv_example": (partial(torch.optim.Adam, lr=3e-2 / 25), ONE_CYCLE, 1),
    "gradient_accumulation": (ADAMW, warmed(LINEAR, 4, STEPS // 2), 2),
    "fsdp_with_peak_mem_tracking": (ADAMW, warmed(LINEAR, 10), 1),
    f"{DEEPSPEED} linear": (no_decay, warmed(partial(get_scheduler, "linear"), 3), 1),
    f"{DEEPSPEED} polynomial": (
        no_decay,
        warmed(partial(get_scheduler, "polynomial"), 3),
        1,
    ),
    "megatron_lm_gpt": (no_decay, warmed(get_cosine_schedule_with_warmup, 3), 1),
}
"""By script: the optimizer, the scheduler, and the micro-batches of an update."""


def stepped(name):
    """Return what Accelerate's loop has in its groups at each update."""
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
    found = []
    for (batch,) in (batch for _ in range(EPOCHS) for batch in loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            if accelerator.sync_gradients:
                found.append([[g["lr"], g["betas"]] for g in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return found


@pytest.fixture(scope="module")
def accelerates():
    """Return what Accelerate itself sets at each update, by script."""
    command = [sys.executable, "-m", "tests.unit.test_accelerate"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, timeout=HANGS, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.slow(together=True)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_ported_script_takes_the_same_rates(script, accelerates):
    """A1, A2: on one process its scheduler is ported as it is: rates and betas, bitwise."""
    optimizer, scheduler, _ = SCRIPTS[script]
    schedule = af.schedules.from_torch(scheduler)
    state = linear_state(2, optimizer=optimizer, schedule=schedule)
    step = af.make_step(lambda model, batch: model(batch).square().mean())
    for groups in accelerates[script]:
        shown = quantities(state)
        betas = [list(each) for each in shown["hyper"]["betas"]]
        assert groups == [list(each) for each in zip(shown["lr"], betas, strict=True)]
        state, _ = step(state, torch.ones(4, 2))


def test_several_processes_divide_their_steps():
    """On W processes Accelerate steps W times an update; steps divided by W are that line."""
    _, whole, _ = SCRIPTS["fsdp_with_peak_mem_tracking"]
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=LR)
    scheduler, expected = whole(optimizer), []
    for _ in range(15):
        expected.append(optimizer.param_groups[0]["lr"])
        for _ in range(2):
            optimizer.step()
            scheduler.step()
    divided = {name: number // 2 for name, number in whole.keywords.items()}
    schedule = af.schedules.from_torch(partial(whole.func, **divided))
    state = linear_state(2, optimizer=ADAMW, schedule=schedule)
    ported = [attrs.evolve(state, step=update).lrs[0] for update in range(15)]
    assert expected == pytest.approx(ported, rel=1e-12)


if __name__ == "__main__":
    print(json.dumps({name: stepped(name) for name in SCRIPTS}))  # noqa: T201 - it is read
