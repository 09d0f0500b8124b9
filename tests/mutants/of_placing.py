# SPDX-License-Identifier: Apache-2.0
"""Bugs in where the parts of a model go, and in how they come for a forward."""

from accelfn.placing.guests import Guest
from accelfn.placing.hooks import let_in
from accelfn.placing.placed import (
    _fill_buffers,
    _follow,
    _given,
    _read_back,
    _settle,
)
from accelfn.placing.plan import DeviceMap, _at_once, _fits, _is_within
from accelfn.placing.units import _own, calls_of, units_of
from tests.accelerator import test_placed
from tests.laws import test_placing
from tests.mutants.mutant import Mutant

LAW = test_placing.test_a_placed_model_computes_the_same
HOWEVER = test_placed.test_parts_are_there_however_they_are_called
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
        "L41: what is noted on a parameter is not there while it is placed",
        LAW,
        _given,
        "vars(new).update(vars(param)) → vars(new).update(dict.fromkeys(vars(param)))",
    ),
    Mutant(
        "L41: a buffer that modules share is looked for under its last name alone",
        LAW,
        _fill_buffers,
        "next((each for each in names if each in found), names[0]) → names[-1]",
    ),
    Mutant(
        "L41: a buffer that modules share is looked for under its first name alone",
        LAW,
        _fill_buffers,
        "next((each for each in names if each in found), names[0]) → names[0]",
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
        "L41: what is offloaded needs no room",
        LAW,
        DeviceMap.needed,
        "_visiting(self._offloaded()) if device == self.computes else 0 → 0",
    ),
    Mutant(
        "L41: what modules around a unit have themselves needs no room",
        LAW,
        _is_within,
        'module in ("", name) or name.startswith(f"{module}.") → module == name',
    ),
    Mutant(
        "L41: all that is offloaded is thought to come at a time",
        LAW,
        _at_once,
        "any(_is_within(name, each) for each in unit.names) → True",
    ),
    Mutant(
        "L41: a device is filled without room for what comes",
        test_placing.test_the_order_of_units_is_filled,
        _fits,
        "return here + _visiting(rest) → return here",
    ),
    Mutant(
        "what is called in a container, or by a method, does not come",
        HOWEVER,
        calls_of,
        "inside = [each for each in part.module.modules() if each is not part.module]"
        " → inside = []",
    ),
    Mutant(
        "inputs do not follow to what is called in a container",
        HOWEVER,
        _follow,
        "[call.module for part in unit for call in calls_of(part)] → [p.module for p in unit]",
    ),
    Mutant(
        "lists of parameters stay where they are",
        HOWEVER,
        _own,
        "if not _has_forward(each): → if False:",
    ),
]
