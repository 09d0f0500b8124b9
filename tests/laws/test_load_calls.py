# SPDX-License-Identifier: Apache-2.0
"""A partial load, all its options and any two models drawn together, beside dicts."""

import math
from typing import Any

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import simulate
from tests.laws.disks import lent

NAMES = ("a", "b", "c")
NUMBERS = ("step", "seed", "num_skipped")
ONLY = ("params", "buffers", *NUMBERS, "slots", "slots.x", "slots.y")


@attrs.frozen
class Holder:
    """A state: what it holds by name, each with its width and whether it is in 64 bits.

    Attributes:
        params: one at least.
        buffers: whose names may be those of parameters.
        slots: by name, tensors.
        numbers: step, seed and skips.
        value: with which all tensors are filled.
    """

    params: dict[str, tuple[int, bool]]
    buffers: dict[str, tuple[int, bool]]
    slots: frozenset[str]
    numbers: tuple[int, int, int]
    value: float

    def model(self) -> torch.nn.Module:
        module = torch.nn.Module()
        for name, (width, wide) in self.params.items():
            param = torch.nn.Parameter(self.tensor(width, wide=wide))
            module.register_parameter(name, param)
        for name, (width, wide) in self.buffers.items():
            module.register_buffer(f"{name}_", self.tensor(width, wide=wide))
        return module

    def tensor(self, width: int, *, wide: bool) -> torch.Tensor:
        dtype = torch.float64 if wide else torch.float32
        return torch.full((width,), self.value, dtype=dtype)

    def state(self, world: af.World) -> af.TrainState:
        state = af.TrainState.create(
            model=self.model,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            world=world,
        )
        for name in sorted(self.slots):
            state = state.with_slot(name, self.tensor(1, wide=False))
        step, seed, skipped = self.numbers
        return attrs.evolve(state, step=step, seed=seed, num_skipped=skipped)

    def field(self, name: str) -> dict[str, Any]:
        """Return a field's entries: widths and widenesses."""
        if name == "slots":
            return dict.fromkeys(self.slots, (1, False))
        found = self.params if name == "params" else self.buffers
        return {f"{n}_" if name == "buffers" else n: kind for n, kind in found.items()}


@attrs.frozen
class Ask:
    """How it is loaded."""

    only: tuple[str, ...]
    missing: str
    extra: str
    cast: bool
    verify: bool

    def of(self, field: str, entries: dict[str, Any]) -> dict[str, Any]:
        whole = field in self.only
        return {
            n: v for n, v in entries.items() if whole or f"{field}.{n}" in self.only
        }


KIND = st.tuples(st.sampled_from([2, 2, 2, 3]), st.sampled_from([False, False, True]))
ENTRIES = st.dictionaries(st.sampled_from(NAMES), KIND, max_size=3)
HOLDERS = st.builds(
    Holder,
    params=ENTRIES.filter(bool),
    buffers=ENTRIES,
    slots=st.frozensets(st.sampled_from(["x", "y", "z"])),
    numbers=st.tuples(*[st.integers(0, 5)] * 3),
    value=st.sampled_from([1.0, 2.0, math.inf]),
)
ASKS = st.builds(
    Ask,
    only=st.lists(st.sampled_from(ONLY), min_size=1, max_size=4, unique=True).map(
        tuple
    ),
    missing=st.sampled_from(["error", "init", "init"]),
    extra=st.sampled_from(["error", "ignore", "ignore"]),
    cast=st.booleans(),
    verify=st.booleans(),
)


@st.composite
def alike(draw: st.DrawFn) -> tuple[Holder, Holder]:
    """Draw two states, the second often with what the first has."""
    first, second = draw(HOLDERS), draw(HOLDERS)
    for field in ("params", "buffers", "slots"):
        if draw(st.booleans()):
            second = attrs.evolve(second, **{field: getattr(first, field)})
    return first, attrs.evolve(second, value=7.0)


def told(holder: Holder, saved: Holder, ask: Ask) -> dict[str, Any] | None:
    """Return what a load says and gives, or None where it is refused."""
    found: dict[str, Any] = {"loaded": [], "missing": [], "unexpected": [], "cast": []}
    values: dict[str, float] = {}
    for field in ("params", "buffers", "slots"):
        have, has = (
            ask.of(field, saved.field(field)),
            ask.of(field, holder.field(field)),
        )
        if field == "slots":
            asked = {n.removeprefix("slots.") for n in ask.only if "." in n}
            has |= dict.fromkeys(asked - have.keys(), (1, False))
        missing, unexpected = has.keys() - have.keys(), have.keys() - has.keys()
        both = have.keys() & has.keys()
        if any(have[name][0] != has[name][0] for name in both):
            return None
        cast = {name for name in both if have[name][1] != has[name][1]}
        is_refused = (
            (cast and not ask.cast)
            or (missing and ask.missing == "error")
            or (unexpected and ask.extra == "error")
        )
        if is_refused:
            return None
        names = {"loaded": both, "missing": missing, "unexpected": unexpected}
        for what, which in {**names, "cast": cast}.items():
            found[what] += [f"{field}.{name}" for name in which]
        for name in holder.field(field):
            values[f"{field}.{name}"] = saved.value if name in both else holder.value
    for name in NUMBERS:
        if name in ask.only:
            found["loaded"].append(name)
    source = {n: saved if n in ask.only else holder for n in NUMBERS}
    numbers = tuple(source[n].numbers[i] for i, n in enumerate(NUMBERS))
    return {n: sorted(v) for n, v in found.items()} | {"values": values, "n": numbers}


@given(two=alike(), ask=ASKS, size=st.integers(1, 2))
def test_a_partial_load_is_what_was_asked_for(two, ask, size):
    """Values, report and refusals are those of dicts; all else stays, and keeps its dtype."""
    saved, holder = two
    expected = told(holder, saved, ask)

    def rank(world: af.World) -> None:
        af.save(saved.state(world), root / "saved")
        state = holder.state(world)
        try:
            found = af.load_part(state, root / "saved", **attrs.asdict(ask))
        except af.errors.CheckpointError:
            assert expected is None
            return
        assert expected is not None
        for what in ("loaded", "missing", "unexpected", "cast"):
            assert sorted(getattr(found, what)) == expected[what], what
        new = found.state
        assert (new.step, new.seed, new.num_skipped) == expected["n"]
        for field in ("params", "buffers", "slots"):
            now, before = getattr(new, field), getattr(state, field)
            assert now.keys() == before.keys()
            for name, tensor in before.items():
                value = expected["values"][f"{field}.{name}"]
                assert torch.equal(now[name], torch.full_like(tensor, value))
                assert now[name].dtype == tensor.dtype
        state = holder.state(world)  # the given one is not changed
        assert all(bool((p == holder.value).all()) for p in state.params.values())

    with lent() as root:
        simulate(size, rank)
