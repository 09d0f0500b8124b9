# SPDX-License-Identifier: Apache-2.0
"""The fake accelerator's streams: a copy that is not waited for is seen."""

from typing import Any

import pytest
import torch

from tests.accelerator import fake, streams

DEVICE = f"{fake.NAME}:0"


def test_a_copy_that_nobody_waits_for_is_not_there() -> None:
    """Until the stream that computes waits for its stream, or for an event behind it."""
    module: Any = torch.get_device_module(DEVICE)
    home, side = torch.arange(3.0), module.Stream(torch.device(DEVICE))

    def sent() -> torch.Tensor:
        target = torch.empty(3, device=DEVICE)
        side.wait_stream(module.current_stream())
        with module.stream(side):
            return target.copy_(home, non_blocking=True)

    one = sent()
    assert (one + 0).isnan().all()
    module.current_stream().wait_stream(side)
    assert torch.equal(one.cpu(), home)
    two = sent()
    event = side.record_event()
    three = sent()
    event.wait()
    assert torch.equal(two.cpu(), home)
    assert three.isnan().all()
    side.synchronize()
    assert torch.equal(three.cpu(), home)


def test_memory_that_may_be_written_by_another_stream_is_not_given_to_a_copy() -> None:
    """Or it is lost; and memory that is let go under a copy is an error."""
    module: Any = torch.get_device_module(DEVICE)
    home, side = torch.arange(3.0), module.Stream(torch.device(DEVICE))
    target = torch.empty(3, device=DEVICE)
    with module.stream(side):
        target.copy_(home, non_blocking=True)
    side.synchronize()
    assert target.isnan().all()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        target.copy_(home, non_blocking=True)
    del target
    with pytest.raises(AssertionError, match="let go"):
        module.current_stream().wait_stream(side)
    assert streams.UNDER_WAY == []
