# SPDX-License-Identifier: Apache-2.0
"""Bugs in what is sent ahead to a device, on which other parts of a model compute."""

from accelfn.placing.ahead import Ahead
from tests.accelerator import test_placed_ahead
from tests.mutants.mutant import Mutant

LAW = test_placed_ahead.test_what_is_sent_ahead_computes_the_same_in_its_budget
MUTANTS = [
    Mutant(
        "what was sent ahead is used before it is there",
        LAW,
        Ahead._wait,
        "module.current_stream(self.device).wait_stream(self.side) → pass",
    ),
    Mutant(
        "what is sent ahead goes where the stream that computes may still write",
        LAW,
        Ahead.send,
        "self.side.wait_stream(module.current_stream(self.device)) → pass",
    ),
    Mutant(
        "memory is let go before what was sent to it is there",
        LAW,
        Ahead.receive,
        "self._wait(guests)"
        " → [setattr(g, 'ahead', None) for g in self._sent if g not in guests],"
        " self._wait(guests)",
    ),
    Mutant(
        "what is sent ahead needs no room",
        LAW,
        Ahead.send,
        "> self.room → > self.room * 1000",
    ),
    Mutant(
        "what was sent ahead in vain stays on the device",
        LAW,
        Ahead._wait,
        "guest.ahead = None → pass",
    ),
    Mutant(
        "nothing is sent ahead",
        test_placed_ahead.test_a_device_waits_for_the_first_alone,
        Ahead.send,
        "if not some or → if True or",
        args={"extra": 25, "waits": 2},
    ),
]
