# SPDX-License-Identifier: Apache-2.0
"""Bugs in where the parts of a model go, and in how they come for a forward."""

from accelfn.placing.guests import Guest
from accelfn.placing.hooks import let_in
from accelfn.placing.placed import (
    _fill_buffers,
    _given,
    _read_back,
    _settle,
)
from accelfn.placing.plan import DeviceMap, _fits
from accelfn.placing.units import units_of
from tests.laws import test_placing
from tests.mutants.mutant import Mutant

LAW = test_placing.test_a_placed_model_computes_the_same
MUTANTS = [
    Mutant(
        "L41: a hook stays on a model after it was placed",
        LAW,
        let_in,
        "stack.callback(module.register_forward_hook(after, always_call=True).remove)"
        " → module.register_forward_hook(after, always_call=True)",
    ),
    Mutant(
        "L41: a parameter stays in the file after its model was placed",
        LAW,
        _read_back,
        "held.clone().to(device) → held[:0].to(device)",
    ),
    Mutant(
        "L41: parameters without values get others in their places for good",
        LAW,
        _given,
        "setattr(module, name, param) → None",
    ),
    Mutant(
        "L41: statistics that belong to the weights are not read with them",
        LAW,
        _fill_buffers,
        "buffer.copy_(found[name].tensor) → pass",
    ),
    Mutant(
        "L41: what was offloaded does not go back to its home",
        LAW,
        Guest.go,
        "self.param.data = self.home → self.param.data = self.home.clone()",
    ),
    Mutant(
        "L41: what is offloaded stays in memory",
        LAW,
        _settle,
        "if place not in away: → if True:",
    ),
    Mutant(
        "L41: units with a tensor in common are placed apart",
        LAW,
        units_of,
        "if met: → if False:",
    ),
    Mutant(
        "L41: the largest unit that is offloaded needs no room",
        LAW,
        DeviceMap.needed,
        "return here + coming + → return here +",
    ),
    Mutant(
        "L41: a device is filled without room for what comes",
        test_placing.test_the_order_of_units_is_filled,
        _fits,
        "return here + coming + → return here +",
    ),
]
