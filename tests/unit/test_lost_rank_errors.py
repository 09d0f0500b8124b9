# SPDX-License-Identifier: Apache-2.0
"""What a backend says of a lost rank becomes an error that says who waited, where, for whom."""

import pytest

from accelfn.errors import PeerFailedError
from accelfn.testing import simulate
from tests.internals import naming

SIGNS = {
    "Timed out waiting 1000ms for recv operation to complete": "Timed out waiting 1000ms",
    "Application timeout caused pair closure": "Application timeout caused",
    "[../pair.cc:525] Connection closed by peer [127.0.0.1]:2222": "(Connection closed by",
    "[a/b/pair.cc:5] Connection closed by peer [::1]:2. This is typically. GLHF!": (
        "(Connection closed by peer [::1]:2)"
    ),
    "Read error: Connection reset by peer": "(Read error: Connection reset by peer)",
    "writev: Broken pipe": "(writev: Broken pipe)",
    "NCCL error: remote process exited": "(NCCL error: remote process exited)",
}


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize(("size", "other"), [(2, "rank 1"), (3, "another rank")])
def test_a_lost_rank_is_told(sign, size, other):
    """D: whatever the backend's words, and with them, but for its chatter, as the reason."""

    def wait(world):
        with naming("sum", world):
            raise RuntimeError(sign + "\nand more")

    says = (
        rf"Rank 0 of {size} waited in 'sum', but {other} failed, left or did not arrive"
    )
    with pytest.raises(PeerFailedError, match=says) as caught:
        simulate(size, wait)
    said = str(caught.value)
    assert SIGNS[sign] in said
    assert not any(word in said for word in ("pair.cc", "GLHF", "and more"))
    assert caught.value.__suppress_context__  # its traceback would say nothing more
    assert sign in str(caught.value.__context__)


def test_other_failures_stay_what_they_are():
    """An error that says nothing of a connection is not laid at another rank's door."""

    def fail(world):
        with naming("sum", world):
            raise RuntimeError("of another kind")

    with pytest.raises(RuntimeError, match="of another kind") as caught:
        simulate(2, fail)
    assert not isinstance(caught.value, PeerFailedError)


def test_blocks_lie_in_one_another():
    """What is done inside another thing is that one again afterwards, also when it failed."""

    def run(world):
        connection = world.connection
        seen = [connection.activity.label]
        with naming("outer", world):
            with naming("inner", world):
                seen.append(connection.activity.label)
            seen.append(connection.activity.label)
            with pytest.raises(KeyError), naming("failing", world):
                raise KeyError
            seen.append(connection.activity.label)
        return [*seen, connection.activity.label]

    for seen in simulate(2, run):
        assert seen == [None, "inner", "outer", "outer", None]
