# SPDX-License-Identifier: Apache-2.0
"""Bugs in what crosses by all-to-all, where Gloo joins the ranks."""

from accelfn.collectives import by_gloo
from accelfn.engine.unit_crossing import gather_by_gloo, reduce_scatter_by_gloo
from accelfn.engine.zero import reducing
from tests.laws import test_by_gloo as laws
from tests.mutants.mutant import Mutant

GATHERED = laws.test_a_unit_is_gathered
REDUCED = laws.test_gradients_are_reduced
HELD = laws.test_gradients_come_to_who_holds_them

MUTANTS = [
    Mutant(
        "L49: a rank gives the others what it has of the whole",
        GATHERED,
        by_gloo.gather_,
        "part.repeat(group.size()) → whole.clone()",
    ),
    Mutant(
        "L49: who asks for a unit early has no work to wait for",
        GATHERED,
        gather_by_gloo,
        'if how.get("async_op"): → if False:',
    ),
    Mutant(
        "L49: a rank keeps its own gradients of its part",
        REDUCED,
        by_gloo.reduce_scatter_,
        "torch.sum(rows, 0, → torch.sum(rows[:1], 0,",
    ),
    Mutant(
        "L49: a mean over ranks is their sum",
        REDUCED,
        reduce_scatter_by_gloo,
        "output_tensor.div_(group.size()) → pass",
    ),
    Mutant(
        "L49: the largest of all ranks is their sum",
        REDUCED,
        reduce_scatter_by_gloo,
        "op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) → False",
    ),
    Mutant(
        "L49: a holder has the gradients of others alone",
        HELD,
        by_gloo.reduce_to_holders_,
        "got[rank] = mine → got[rank] = [torch.zeros_like(each) for each in mine]",
    ),
    Mutant(
        "L49: a holder but the first keeps what it had",
        HELD,
        by_gloo.reduce_to_holders_,
        "if rank: → if rank > 1:",
    ),
    Mutant(
        "L49: gradients meet the messages of a user's loop",
        HELD,
        by_gloo.reduce_to_holders_,
        '{"group": group, "tag": _TAG} → {"group": group}',
    ),
    Mutant(
        "L49: what two ranks keep of a bucket goes to one",
        HELD,
        reducing.reduce_by_gloo,
        "if several or summed_apart → if summed_apart",
    ),
]
