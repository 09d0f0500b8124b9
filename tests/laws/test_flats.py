# SPDX-License-Identifier: Apache-2.0
"""Values of a state, by rows, and ZeRO's flat tensors hold the same elements."""

import math
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.testing import simulate
from tests.internals import (
    Flats,
    Layout,
    Zero,
    cut_of,
    evenly,
    flat_key,
    flat_opt_state,
    flat_params,
    flats,
    flatten_opt_state,
    local,
    redistribute,
)

SHAPES = [(), (1,), (2,), (5,), (3, 2), (7, 3), (4, 1, 2), (1, 6)]


@attrs.frozen
class Case:
    """Parameters in groups, which DeepSpeed has cut."""

    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    stage: int
    ranks: int

    def values(self, seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            f"{i}.{j}": torch.randn(shape, generator=generator)
            for i, group in enumerate(self.shapes)
            for j, shape in enumerate(group)
        }

    def of_group(self, i: int, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [v.reshape(-1) for name, v in values.items() if name.startswith(f"{i}.")]

    def flat(self, i: int, rank: int, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return what a rank has of a group: a part of all together, or of each."""
        group = self.of_group(i, values)
        if self.stage == 3:
            return torch.cat([_parts(each, self.ranks, 1)[rank] for each in group])
        return _parts(torch.cat(group), self.ranks, 2)[rank]

    def where(self, world: af.World, values: dict[str, torch.Tensor]) -> Flats:
        """Return where accelfn finds them in what DeepSpeed has."""
        params = {name: nn.Parameter(value) for name, value in values.items()}
        groups = [
            [p for name, p in params.items() if name.startswith(f"{i}.")]
            for i in range(len(self.shapes))
        ]
        for param in params.values():
            param.ds_numel = param.numel()
            param.partition_numel = lambda p=param: -(-p.numel() // self.ranks)
        zero = object.__new__(Zero)
        zero.stage, zero._ranks = self.stage, world
        flats = [self.flat(i, world.rank, values) for i in range(len(groups))]
        offsets = [[0, *accumulate(p.numel() for p in each[:-1])] for each in groups]
        zero._optimizer = SimpleNamespace(
            fp16_groups=groups,
            round_robin_bit16_groups=groups,
            round_robin_bit16_offsets=offsets,
            partition_size=[flat.numel() for flat in flats],
            fp32_partitioned_groups_flat=flats,
            single_partition_of_fp32_groups=flats,
        )
        metas = {name: value.to("meta") for name, value in values.items()}
        layout = Layout.of([af.wrap_fsdp()], metas, world)
        assert layout is not None
        names = {id(param): name for name, param in params.items()}
        return zero.where(names, layout)


def _parts(flat: torch.Tensor, ranks: int, aligned: int) -> list[torch.Tensor]:
    """Return equal parts of a flat tensor, zeros behind its end."""
    size = math.ceil(flat.numel() / (ranks * aligned)) * aligned
    return list(
        torch.cat([flat, flat.new_zeros(size * ranks - flat.numel())]).split(size)
    )


groups = st.lists(
    st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4).map(tuple),
    min_size=1,
    max_size=3,
).map(tuple)
cases = st.builds(Case, groups, st.sampled_from([1, 3]), st.integers(2, 5)).filter(
    lambda case: any(shape for group in case.shapes for shape in group)
)


@example(case=Case((((7, 3), (), (5,)), ((2,),)), stage=1, ranks=3))
@example(case=Case((((7, 3), (), (5,)), ((2,),)), stage=3, ranks=3))
@given(case=cases)
def test_rows_and_flat_tensors_hold_the_same(case):
    """There and back: flat tensors are as DeepSpeed cuts them, padding is 0, rows come back."""
    values = case.values()

    def fn(world):
        where = case.where(world, values)
        rows = {n: where.layout.cut(n, value) for n, value in values.items()}
        flats = where.to_flats(rows)
        for i in range(len(case.shapes)):
            assert torch.equal(case.flat(i, world.rank, values), flats[i])
        params = flat_params(values, where, flats, {})
        assert list(params) == list(values)
        for name, value in rows.items():
            assert params[name].shape == value.shape
            assert torch.equal(local(value), local(params[name]))
        flats[0].add_(1)  # a step changes them
        params.mark_changed()
        assert torch.equal(local(rows["0.0"]) + 1, local(params["0.0"]))

    simulate(case.ranks, fn, axes={"dp_shard": case.ranks})


@given(case=cases, begun=st.booleans())
def test_what_an_optimizer_has_goes_there_and_back(case, begun):
    """Moments by element, counts by parameter, and numbers of a group."""
    values, moments = case.values(), (case.values(1), case.values(2))

    def fn(world):
        where = case.where(world, values)
        given = {
            name: {
                "exp_avg": where.layout.cut(name, moments[0][name]),
                "exp_avg_sq": where.layout.cut(name, moments[1][name]),
                "step": torch.tensor(3.0),
            }
            for name in (values if begun else ())
        }
        given["<group 0>"] = {"k": 2}
        held = flatten_opt_state(where, given)
        assert held.get("<group 0>") == {"k": 2}
        for i in range(len(case.shapes) if begun else 0):
            for key, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                want = case.flat(i, world.rank, moment)
                assert torch.equal(want, held[flat_key(i)][key])
            assert float(held[flat_key(i)]["step"]) == 3
        shown = flat_opt_state(where, held)
        assert {*shown} == {*given}
        assert len(shown) == len(given)
        counts = [shown[name]["step"] for name in (values if begun else ())]
        assert len({id(count) for count in counts}) == len(counts)  # each its own
        for name, entry in given.items():
            assert shown[name].keys() == entry.keys()
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(local(value), local(shown[name][key]))

    simulate(case.ranks, fn, axes={"dp_shard": case.ranks})


@pytest.mark.parametrize(
    ("other", "match"),
    [({}, "fewer updates"), ({"step": torch.tensor(2.0)}, "another number of")],
)
def test_parameters_of_a_group_count_alike(other, match):
    """Others are refused by name: DeepSpeed has one count for all."""
    case = Case((((2,), (3, 2)),), 1, 2)
    values = case.values()

    def fn(world):
        where = case.where(world, values)
        given = {"0.0": {"step": torch.tensor(1.0)}}
        if other:
            given["0.1"] = other
        with pytest.raises(af.errors.OptimizerError, match=match) as caught:
            flatten_opt_state(where, given)
        assert "'0.1'" in str(caught.value)

    simulate(2, fn, axes={"dp_shard": 2})


@st.composite
def cut(draw: st.DrawFn, count: int, ranks: int) -> list[tuple[int, int]]:
    """Draw which elements each rank has: some, all of them or none."""
    if draw(st.booleans()):
        return [(0, count)] * ranks
    ends = sorted(draw(st.integers(0, count)) for _ in range(ranks - 1))
    return list(zip([0, *ends], [*ends, count], strict=True))


@st.composite
def moves(draw: st.DrawFn) -> tuple[int, list[int], list[Any], list[Any]]:
    """Draw how elements of some tensors lie, and are to lie."""
    ranks, counts = (
        draw(st.integers(1, 4)),
        draw(st.lists(st.integers(0, 9), max_size=4)),
    )
    have, want = ([draw(cut(count, ranks)) for count in counts] for _ in range(2))
    return ranks, counts, have, want


@given(case=moves(), at_once=st.sampled_from([flats._AT_ONCE, 4, 40]))
def test_each_rank_gets_the_elements_that_it_wants(case, at_once):
    """However they lie, whether several have them, and in however many calls they go."""
    ranks, counts, have, want = case
    whole = {str(i): torch.arange(n) * 1.0 + 100 * i for i, n in enumerate(counts)}

    def fn(world):
        def mine(runs):
            cuts = {str(i): each[world.rank] for i, each in enumerate(runs)}
            return {name: whole[name][begin:end] for name, (begin, end) in cuts.items()}

        named = [{str(i): r for i, r in enumerate(runs)} for runs in (have, want)]
        found = redistribute(mine(have), *named, world, label="move")
        assert sorted(found) == sorted(whole)
        for name, piece in mine(want).items():
            assert torch.equal(piece, found[name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flats, "_AT_ONCE", at_once)
        simulate(ranks, fn)


@given(count=st.integers(0, 20), part=st.integers(1, 6), ranks=st.integers(1, 5))
def test_equal_parts_cover_each_element_once(count, part, ranks):
    """As many as there is room for, in order; nothing lies beyond the end."""
    seen = [e for begin, end in evenly(count, part, ranks) for e in range(begin, end)]
    assert seen == list(range(min(count, part * ranks)))
    begin, end = cut_of((part, part + ranks), (0, count))
    assert [*range(begin, end)] == [e for e in range(part, part + ranks) if e < count]
