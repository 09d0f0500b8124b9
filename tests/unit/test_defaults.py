# SPDX-License-Identifier: Apache-2.0
"""Defaults are those of a table, and of their docstrings; counts begin where they say."""

import ast
import inspect
import re
import tempfile
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn import testing
from tests.catalog import public_transforms
from tests.golden.defaults import (
    FILE,
    STANDS_FOR,
    callables,
    commands,
    defaults,
    lines,
)
from tests.internals import OPTIONS, parser
from tests.states import linear_state

NUMBER = r"-?\d[\d,_]*(?:\.\d+)?(?:e-?\d+)?"
STATED = re.compile(
    rf"(?:; |default (?:is )?)({NUMBER}|\"\w+\"|True|False|None)(?:[.;)]|$)"
)


def test_every_default_is_as_it_was() -> None:
    """A default that changes, or an option that comes or goes, changes the table too.

    `python -m tests.golden.defaults` writes it.
    """
    assert FILE.read_text().splitlines() == lines()


def entries() -> list[tuple[str, str, Any, str]]:
    """Return what the docstrings say of options with a default: call, option, default, text."""
    called, found = dict(callables()), []
    for name, options in defaults().items():
        doc = inspect.getdoc(called.get(name)) or ""
        for option, default in options.items():
            stands = STANDS_FOR.get(name, {}).get(option, default)
            entry = re.search(
                rf"^ +{option}: (.*?)(?=^ +\w+: |^\w|^$|\Z)",
                doc,
                re.MULTILINE | re.DOTALL,
            )
            if entry:
                text = " ".join(entry[1].split())
                found.append((name, option, stands, text))
    return found


def test_docstrings_state_the_defaults() -> None:
    """Where an option's entry ends in a value, or says what it is by default, it is that."""
    said = [
        (name, option, default, stated)
        for name, option, default, text in entries()
        for stated in STATED.findall(text)
        if default is not None  # what it stands for depends on other things
    ]
    assert len(said) >= 7
    for name, option, default, stated in said:
        value = stated.strip('"') if stated[0] == '"' else eval(stated)  # noqa: S307
        assert value == default, f"{name}({option}=): {stated}, but it is {default!r}"


def test_help_states_the_defaults() -> None:
    """Where a command's help says a default, it is that."""
    said = [
        (f"{name} {action.option_strings[-1]}", action.help, action.default)
        for name, command in commands(parser())
        for action in command._actions
        if action.option_strings and action.default not in (None, False)
    ]
    said += [(name, each.help, each.default) for name, each in OPTIONS.items()]
    stated = [
        (name, found[1], default)
        for name, text, default in said
        if default is not None
        and (found := re.search(r"\(default (\S+)\)", text or ""))
    ]
    assert stated
    for name, value, default in stated:
        assert value == str(default), name


# Where counts begin


def state() -> af.TrainState:
    return linear_state(2, data=af.Data(torch.ones(40, 2), global_batch_size=2))


def opened(**options: Any) -> None:
    """Begin to look at steps, and leave before the first."""
    with (
        suppress(KeyError),
        af.profile(tempfile.gettempdir(), af.World.single(), **options),
    ):
        raise KeyError


def stored(**options: Any) -> None:
    """Open a store, and close it."""
    with tempfile.TemporaryDirectory() as folder:
        af.CheckpointStore(folder, **options).close()


loader = torch.utils.data.DataLoader(range(8))
COUNTS = {  # calls in which `n` counts, and the least that it may be
    "af.Data(range(8), global_batch_size=n)": 1,
    "af.Data(range(8), global_batch_size=2, num_workers=n)": 0,
    "af.Data(range(8), global_batch_size=2).num_updates(n)": 0,
    "af.Data.from_loader(loader, num_ranks=n)": 1,
    "af.Data.from_loader(loader, num_micro_batches=n)": 1,
    "af.CheckpointStore(keep=n)": 1,
    "af.CheckpointStore(every=n)": 1,
    "af.typing.Cursor(epoch=n, samples=0)": 0,
    "af.typing.Cursor(epoch=0, samples=n)": 0,
    "af.typing.Plan(world_rank=n)": 0,
    "af.typing.Plan(world_size=n)": 1,
    "af.typing.Plan(rank=n, num_shares=9)": 0,
    "af.typing.Plan(num_shares=n)": 1,
    "af.typing.Plan(num_micro_batches=n)": 1,
    "af.typing.Plan(micro_batch_size=n)": 1,
    "af.World(local_rank=n)": 0,
    "af.World(local_size=n)": 1,
    "af.World(node_rank=n)": 0,
    "af.seek(state(), n)": 0,
    "af.seek(state(), 0, epoch=n)": 0,
    "af.accumulate(num_micro_batches=n)": 1,
    "af.accumulate(micro_batch_size=n)": 1,
    "af.autocast('fp16', growth_interval=n)": 1,
    "af.batches(state(), until_epoch=n)": 1,
    "af.token_budget([1, 1], limit=n)": 1,
    "af.check_replicas(every=n)": 1,
    "af.compress_grads('powersgd', matrix_approximation_rank=n)": 1,
    "af.compress_grads('powersgd', start_powerSGD_iter=n)": 0,
    "af.context_parallel(seq_dim=n)": 1,
    "af.diloco(sync_every=n)": 1,
    "af.diloco(sync_every=99, fragments=n)": 1,
    "af.diloco(sync_every=99, delay=n)": 0,
    "af.find_batch_size(lambda *_: None, n, af.World())": 1,
    "af.local_sgd(sync_every=n)": 1,
    "af.micro_batches(torch.ones(9, 1), n)": 1,
    "af.orders.bucketed([1] * 8, window=n)": 1,
    "af.orders.weighted(np.ones(8), num_samples=n)": 1,
    "af.reduce_lr_on_plateau(patience=n)": 0,
    "af.reduce_lr_on_plateau(cooldown=n)": 0,
    "af.profile(wait=n)": 0,
    "af.profile(warmup=n)": 1,
    "af.profile(active=n)": 1,
    "schedules.linear(n)": 1,
    "schedules.one_cycle(n)": 2,
    "schedules.warmup_cosine(n, 100)": 0,
    "schedules.warmup_cosine(0, n)": 1,
    "af.skip_nonfinite(max_consecutive=n)": 0,
    "testing.simulate(n, lambda _: None)": 1,
    "testing.Crash(n)": 0,
    "testing.Crash(0, step=n)": 0,
    "testing.Corrupt(0, element=n)": 0,
}
USED = {**globals(), "np": np, "schedules": af.schedules, "testing": testing}
IN_A_BLOCK = {"af.CheckpointStore": "stored", "af.profile": "opened"}
"""Calls whose value is used in a block, which these functions do."""


def option_of(call: str) -> str:
    """Return a call with the name of the option that counts, as the table of defaults has it."""
    found: Any = ast.parse(call, mode="eval").body
    names = [each.arg for each in found.keywords if ast.unparse(each.value) == "n"]
    return f"{ast.unparse(found.func)}({names[0]}=)" if names else call


OTHERS = {
    "af.World(rank=)": "below its size",
    "af.World(size=)": "more than one has a group",
    "af.broadcast(root=)": "below the world's size",
    "af.broadcast_object(root=)": "below the world's size",
    "af.scatter(root=)": "below the world's size",
    "af.on_rank(rank=)": "may count from the end",
    "af.pad_across(dim=)": "may count from the end",
    "af.pad_across(value=)": "any number",
    "af.diloco(bits=)": "32, 16, 8 or 4",
    "af.Data.num_updates(seed=)": "any integer",
    "af.TrainState.create(seed=)": "any integer",
    "testing.simulate(seed=)": "any integer",
    "testing.Problem(seed=)": "any integer",
    "testing.assert_equivalent(updates=)": "trains",
    "testing.check_step(updates=)": "trains",
    "af.Data.epoch(number=)": "is the reader's",
    "af.Data.num_updates_of(start=)": "is the reader's",
    "af.TrainState(num_skipped=)": "made by an update",
    "af.Batch(part=)": "made by the reader",
    "testing.Run(updates=)": "made by a run",
    "af.typing.WeightedSum(unit=)": "any weight",
    "accelfn launch, and its files(num_machines=)": "test_cli",
    "accelfn launch, and its files(max_restarts=)": "test_cli",
}
"""Options whose default is an integer, and why they do not count from some number on."""


def checked() -> set[str]:
    """Return the options of transforms that `integer` checks, in each transform alike."""
    return {
        f"af.{kind.__name__}({field.name}=)"
        for kind in public_transforms()
        for field in attrs.fields(kind)
        if getattr(field.validator, "__qualname__", "").startswith("integer.")
    }


def test_every_integer_counts_or_says_why_not() -> None:
    """An option whose default is an integer has the check `integer`, a row or a reason."""
    found = set()
    for name, options in defaults().items():
        for option, default in options.items():
            value = STANDS_FOR.get(name, {}).get(option, default)
            if type(value) is int and option != "at":  # at: or a label
                found.add(f"{name.removeprefix('accelfn.')}({option}=)")
    assert found - set(map(option_of, COUNTS)) - checked() == OTHERS.keys()


around = st.one_of(st.integers(-3, 4), st.booleans(), st.sampled_from([1.0, 2.5, "2"]))


@pytest.mark.parametrize("call", COUNTS)
@given(value=around)
@example(-1)
@example(0)
@example(1)
@example(2)
def test_a_count_begins_at_its_least(call: str, value: object) -> None:
    """It takes its least and what is above; below it, and what is no integer, it names."""
    name, options = call.split("(", 1)
    run = f"{IN_A_BLOCK.get(name, name)}({options}"
    is_one = isinstance(value, int) and not isinstance(value, bool)
    if is_one and value >= COUNTS[call]:
        eval(run, {**USED, "n": value})  # noqa: S307 - the table's own text
        return
    with pytest.raises((af.errors.Error, TypeError)) as caught:
        eval(run, {**USED, "n": value})  # noqa: S307
    assert isinstance(caught.value, af.errors.Error)
    assert repr(value) in str(caught.value)
