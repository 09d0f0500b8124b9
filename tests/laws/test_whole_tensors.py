# SPDX-License-Identifier: Apache-2.0
"""Tensors of which ranks have parts are gathered many at once, and are what was cut."""

from math import prod
from typing import Any

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]

import accelfn as af
from accelfn.testing import simulate
from tests.internals import collectives, fold_axes, replicas

AXES = [
    *({"dp_shard": size} for size in (2, 3, 4)),
    *({"dp_replicate": 2, "dp_shard": size} for size in (2, 3)),
    *({"tp": 2}, {"dp_shard": 3, "tp": 2}, {"dp_shard": 2, "tp": 3}),
    *({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.complex64]
Cuts = dict[str, int]


@attrs.frozen
class Piece:
    """A tensor, and at which dim it is cut along each axis; None where all ranks have it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: tuple[int | None, int | None]

    def cuts(self, axes: dict[str, int]) -> Cuts:
        """Return the dim that is cut along each axis, of a length that can be cut twice."""
        named = zip(("dp_shard", "tp"), self.dims, strict=True)
        found = {axis: d % len(self.shape) for axis, d in named if d is not None}
        found = {axis: dim for axis, dim in found.items() if axes.get(axis, 1) > 1}
        if len(found) == 2 and len({*found.values()}) == 1:
            dim = found["tp"]
            if self.shape[dim] % axes["tp"]:
                del found["tp"]
        return found

    def whole(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        count = prod(self.shape) * self.dtype.itemsize
        drawn = torch.randint(0, 256, (count,), generator=generator).to(torch.uint8)
        return drawn.view(self.dtype).view(self.shape)


def cut(whole: torch.Tensor, cuts: Cuts, world: af.World) -> torch.Tensor:
    """Return this rank's part: layers are cut first, their parts further."""
    part, mesh = whole, world.mesh
    placements: dict[str, Any] = dict.fromkeys(mesh.mesh_dim_names or (), Replicate())
    for axis in ("tp", "dp_shard"):
        if axis in cuts:
            ranks, dim = world.along(axis), cuts[axis]
            chunks = part.chunk(ranks.size, dim)
            none = part.narrow(dim, 0, 0)
            part = chunks[ranks.rank] if ranks.rank < len(chunks) else none
            placements[axis] = Shard(dim)
    if len(cuts) == 2 and len({*cuts.values()}) == 1:
        tp = world.along("tp").size
        placements["dp_shard"] = _StridedShard(cuts["tp"], split_factor=tp)
    lying, like = list(placements.values()), (whole.shape, whole.stride())
    return DTensor.from_local(
        part.clone(), mesh, lying, run_check=False, shape=like[0], stride=like[1]
    )


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors are the same bits in the same shape."""
    same = one.dtype == two.dtype and one.shape == two.shape
    left, right = (t.contiguous().view(-1).view(torch.uint8) for t in (one, two))
    return same and torch.equal(left, right)


pieces = st.builds(
    Piece,
    st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    st.sampled_from(DTYPES),
    st.tuples(st.none() | st.integers(0, 2), st.none() | st.integers(0, 2)),
)


def num_filled(sizes: list[int], most: int) -> int:
    """Return how many calls there are where each takes what it may before the next begins."""
    held: list[int] = []
    for size in sizes:
        if held and held[-1] + size <= most:
            held[-1] += size
        else:
            held.append(size)
    return len(held)


@example(
    given=[Piece((2, 2), torch.float32, (0, None))] * 7,
    axes={"dp_shard": 2, "tp": 2},
    most=64,
)
@example(
    given=[Piece((6, 2), torch.float32, (0, 0)), Piece((5, 4), torch.float32, (0, 1))],
    axes={"dp_shard": 2, "tp": 3},
    most=1,
)
@given(
    given=st.lists(pieces, max_size=6),
    axes=st.sampled_from(AXES),
    most=st.sampled_from([1, 64, 256, 32 << 20]),
)
def test_parts_are_gathered_to_what_was_cut(given, axes, most):
    """The same bits on every rank, and those of torch's own `full_tensor`, by name and in order,
    what is plain as it is. Along each axis it takes a labelled call for so many bytes of one
    dtype, or for a larger tensor, and twice as many at most.
    """
    sizes = dict(axes)
    sizes["dp_shard"] = axes.get("dp_shard", 1) * sizes.pop("cp", 1)
    wholes = {f"{i}": each.whole(i) for i, each in enumerate(given)}
    cuts = {f"{i}": each.cuts(sizes) for i, each in enumerate(given)}

    def fn(world):
        lying = fold_axes(world)
        parts = {n: cut(t, cuts[n], lying) if cuts[n] else t for n, t in wholes.items()}
        found = collectives.gather_full(parts, world, label="whole")
        assert list(wholes) == list(found)
        for name, whole in wholes.items():
            assert same_bits(whole, found[name])
            assert cuts[name] or found[name] is parts[name]
            assert not cuts[name] or same_bits(found[name], parts[name].full_tensor())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_MOST", most)
        log = simulate(prod(axes.values()), fn, axes=axes).log
    mine = [each for each in log if 0 in each.ranks and each.label == "whole"]
    groups: dict[Any, list[int]] = {}
    for name, along in cuts.items():
        if along:
            alike = wholes[name].dtype, tuple(sorted(along))
            groups.setdefault(alike, []).append(wholes[name].nbytes)
    least = sum(
        len(axes) * max(1, -(-sum(each) // max(most, *each)))
        for (_, axes), each in groups.items()
    )
    greatest = sum(
        len(axes) * min(len(each), 1 + 2 * sum(each) // most)
        for (_, axes), each in groups.items()
    )
    assert least <= len(mine) <= greatest
    filled = sum(
        len(axes) * num_filled(each, most) for (_, axes), each in groups.items()
    )
    assert len(mine) == filled


@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    dim=st.integers(0, 2),
    dtype=st.sampled_from(DTYPES),
    axes=st.sampled_from([each for each in AXES if len(each) > 1 and "tp" in each]),
)
@example(shape=(5,), dim=0, dtype=torch.float32, axes={"dp_shard": 3, "tp": 2})
def test_parts_of_unlike_parts_are_gathered_too(shape, dim, dtype, axes):
    """A dim of any length that a user has cut twice, as torch's FSDP cuts a layer's parts."""
    whole = Piece(shape, dtype, (None, None)).whole(0)
    cuts = dict.fromkeys(("dp_shard", "tp"), dim % len(shape))

    def fn(world):
        parts = {"mine": cut(whole, cuts, world)}
        assert same_bits(
            collectives.gather_full(parts, world, label="it")["mine"], whole
        )

    simulate(prod(axes.values()), fn, axes=axes)
