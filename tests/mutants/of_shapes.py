# SPDX-License-Identifier: Apache-2.0
"""Bugs in programs that run on shapes alone, and send what they send with values."""

from accelfn.base import valueless as shapes
from accelfn.definition import checks
from accelfn.engine import ddp, fsdp, shard_home
from accelfn.engine.module import looks
from accelfn.state import beginning
from accelfn.structure import skeleton
from accelfn.testing.simulation import device_module, valueless
from accelfn.testing.traffic import traffic
from accelfn.transforms import context_parallel
from tests.laws import test_shapes
from tests.mutants.mutant import Mutant

_ALIKE = test_shapes.test_shapes_alone_send_what_values_send
_IN_PARTS = test_shapes.test_parts_of_layers_are_foreseen_from_shapes
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
        'facts.keys() & _NEED_VALUES.keys() → facts.keys() & {"offloads"}',
        args={"named": "af.compile()"},
    ),
    Mutant(
        "L49: what would be sent in 16 bits is foreseen in the model's own",
        test_shapes.test_what_would_be_sent_in_another_dtype_is_refused,
        checks.check_device,
        '"computes_in" in facts and sends → "computes_in" in facts and not sends',
        args={"lying": test_shapes.BY_SEQUENCE[0]},
    ),
    Mutant(
        "L49: numbers without a value are compared, and found apart",
        _IN_PARTS,
        shapes.on_host,
        "torch.zeros(tensor.shape → torch.ones(tensor.shape",
    ),
    Mutant(
        "L49: features without values are compared with those of the whole",
        _IN_PARTS,
        looks.Looks._fit,
        "if part.is_meta: → if part.is_cpu:",
    ),
    Mutant(
        "L49: a weight without a value is taken for 0, and a loss is looked at each time",
        _IN_PARTS,
        context_parallel._Sequence.check,
        "is_positive(row[1]) → (row[1].is_cpu and is_positive(row[1]))",
    ),
    Mutant(
        "L49: a parameter that no rank used is looked for where nothing has a value",
        _ALIKE,
        fsdp.FSDPRunner._reduced,
        "if may_miss and not sums.is_meta: → if may_miss:",
        args={"way": "fsdp, unused"},
    ),
    Mutant(
        "L49: torch asks for values of what it splits",
        _ALIKE,
        shard_home.ShardHome.split,
        'device.type == "meta" → device.type == "nowhere"',
        args={"way": "fsdp"},
    ),
    Mutant(
        "L49: torch goes on to know of a module of the meta device",
        _ALIKE,
        device_module.known_to_torch,
        "delattr(torch, name) → pass",
        args={"way": "fsdp"},
    ),
    Mutant(
        "L49: a stream of the meta device has no events, and copies of parts cannot be summed",
        _IN_PARTS,
        device_module._Stream.record_event,
        "return torch.cpu.Event() → return None",
    ),
    Mutant(
        "L49: the line that asks is that of a mode which passes calls on",
        test_shapes.test_a_loss_that_reads_a_value_is_told_where,
        valueless._line_of,
        'code.co_name == "__torch_function__" → False',
        args={"lying": test_shapes.BY_SEQUENCE[0]},
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
        "L49: a model that is split is drawn whole on the host, where nobody needs it",
        test_shapes.test_a_model_without_values_is_taken_as_it_is,
        beginning.begin,
        'if device.type != "meta" and world.size > 1 → if world.size > 1',
    ),
    Mutant(
        "L49: a factory draws values which nobody needs",
        test_shapes.test_a_model_without_values_is_taken_as_it_is,
        skeleton._born_on,
        'device.type == "meta" → device.type == "nowhere"',
    ),
]
