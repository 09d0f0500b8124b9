# SPDX-License-Identifier: Apache-2.0
"""Bugs in programs that run on shapes alone, and send what they send with values."""

from accelfn.base import valueless as shapes
from accelfn.definition import checks
from accelfn.engine import ddp
from accelfn.structure import skeleton
from accelfn.testing.simulation import valueless
from accelfn.testing.traffic import traffic
from tests.laws import test_shapes
from tests.mutants.mutant import Mutant

_ALIKE = test_shapes.test_shapes_alone_send_what_values_send
_REFUSED = test_shapes.test_what_needs_values_is_refused_by_name

MUTANTS = [
    Mutant(
        "L49: a weight without a value is taken for 0, and ranks are asked again",
        _ALIKE,
        shapes.is_positive,
        "total.is_meta or bool → not total.is_meta and bool",
        args={"way": "local"},
    ),
    Mutant(
        "L49: of what decides how often ranks are asked, a weight without a value is no weight",
        test_shapes.test_traffic_is_foreseen_from_shapes,
        shapes.is_positive,
        "total.is_meta or bool(total > 0) → not total.is_meta",
    ),
    Mutant(
        "L49: what ranks tell each other lies on meta, too, where nobody can read it",
        _ALIKE,
        shapes.readable,
        'device.type == "meta" → device.type == "nowhere"',
        args={"way": "8 bits"},
    ),
    Mutant(
        "L49: without values buckets are laid out after the first update, and sent anew",
        _ALIKE,
        ddp.LeanDDP.lay_out,
        "self.reducer._push_all_rebuilt_params() → if self.device.type == 'meta': return",
        args={"way": "ddp"},
    ),
    Mutant(
        "L49: a transform that compiles is let through without values",
        _REFUSED,
        checks.check_device,
        "told = _NEED_VALUES & → told = set() &",
        args={"named": "af.compile()"},
    ),
    Mutant(
        "L49: a transform that splits a model is let through without values",
        _REFUSED,
        checks.check_device,
        "if (splits and world.size > 1) or told: → if told:",
        args={"named": "af.wrap_fsdp()"},
    ),
    Mutant(
        "L49: an error names the line that began, and not the one that asked for a value",
        _REFUSED,
        valueless._line_of,
        'found = f"{path → found = found or f"{path',
        args={"named": "transforms/skip.py"},
    ),
    Mutant(
        "L49: shapes are asked for, and values are taken",
        _REFUSED,
        traffic.communication,
        "axes=axes, device=device) → axes=axes)",
        args={"named": "transforms/skip.py"},
    ),
    Mutant(
        "L49: who asks for a value is told what torch says alone",
        test_shapes.test_a_program_that_reads_a_value_is_told_where,
        valueless.explained,
        '"meta" not in str(first).lower() → True',
    ),
    Mutant(
        "L49: a model without values is refused where none are needed",
        test_shapes.test_a_model_without_values_is_taken_as_it_is,
        skeleton.materialize,
        'if device.type != "meta": → if True:',
    ),
    Mutant(
        "L49: a factory draws values which nobody needs",
        test_shapes.test_a_model_without_values_is_taken_as_it_is,
        skeleton._born_on,
        'device.type == "meta" → device.type == "nowhere"',
    ),
]
