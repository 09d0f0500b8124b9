# SPDX-License-Identifier: Apache-2.0
"""Bugs in what ranks exchange: trees and objects."""

from accelfn.base import tree
from accelfn.collectives import (
    agreed,
    differentiated,
    objects,
    packed,
    reductions,
    replicas,
    swapped,
    trees,
)
from accelfn.loop import control
from accelfn.transforms import check
from tests.laws import test_checked as checks
from tests.laws import test_collectives_at_limits as limits
from tests.laws import test_collectives_on_trees as laws
from tests.laws import test_replicas
from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "L49: whether any rank has something is said by a number",
        laws.test_booleans_are_counted_and_combined,
        reductions.started,
        'elif op == "sum" and dtype is torch.bool: → elif dtype is torch.bool:',
    ),
    Mutant(
        "L49: gathered trees are in another order than the ranks",
        laws.test_gathered_trees_split_into_the_ranks_own,
        packed.all_gather_rows,
        "for flat in flats) → for flat in flats[::-1])",
    ),
    Mutant(
        "L49: a mean over ranks is not divided",
        laws.test_reduced_trees_are_combined_element_by_element,
        reductions.started,
        "found / world.size → found",
    ),
    Mutant(
        "L49: two true flags sum to none",
        laws.test_booleans_are_counted_and_combined,
        reductions.started,
        'elif op == "sum" and dtype is torch.bool: → elif False:',
    ),
    Mutant(
        "L49: a broadcast gives rank 0's values, whichever was asked for",
        laws.test_broadcast_trees_are_the_root_s,
        packed.broadcast_,
        "group_src=root → group_src=0",
    ),
    Mutant(
        "L48: every rank is taken to have as many rows as rank 0",
        laws.test_ragged_trees_are_gathered_without_padding,
        trees._gathered,
        "counts = lengths.T.tolist() → counts = lengths[:1].expand_as(lengths).T.tolist()",
    ),
    Mutant(
        "L48: padding stands before the values unless it is to",
        laws.test_padding_is_as_long_as_the_longest,
        trees.pad_across,
        "if first else → if not first else",
    ),
    Mutant(
        "L49: each rank gets the next one's object",
        laws.test_objects_arrive_whole,
        objects.scatter,
        "for each in values] → for each in [*values[1:], values[0]]]",
    ),
    Mutant(
        "L49: a gathered part gets only its own rank's gradient",
        laws.test_gathering_is_differentiated,
        differentiated._SumOfMine.forward,
        '(total,) = reduced([everyone], ready, "sum", label) → total = everyone',
    ),
    Mutant(
        "L1: under DDP the gradients of other ranks' losses are left out",
        laws.test_contrastive_losses_are_those_of_one_process,
        differentiated._SumOfMine.forward,
        '(total,) = reduced([everyone], ready, "sum", label) → total = everyone',
    ),
    Mutant(
        "L49: a reduction sends nothing first, and then the tensors",
        laws.test_a_tree_of_a_dtype_is_one_collective,
        reductions._begun,
        "work = dist → dist.all_reduce(numbers[:0], group=world.group); work = dist",
    ),
    Mutant(
        "L48: a dtype that Gloo does not carry is broadcast into a copy",
        laws.test_any_dtype_travels,
        packed._carried,
        "flat.view(torch.uint8) → flat.view(torch.uint8).clone()",
    ),
    Mutant(
        "L49: numbers of 16 bits without a sign are reduced as if they had one",
        laws.test_integers_of_any_width_are_reduced,
        reductions.started,
        "flat.to(_WIDER[dtype]) → flat.to(torch.int16).to(_WIDER[dtype])",
    ),
    Mutant(
        "L49: what ranks gave one another comes in another order than the ranks",
        laws.test_all_to_all_is_a_transpose,
        swapped._got,
        "zip(shapes, parts, strict=True)"
        " → zip(shapes[::-1], list(parts)[::-1], strict=True)",
    ),
    Mutant(
        "L55: in a checked world, ranks that are about to make two kinds of calls make them",
        checks.test_different_calls_are_told_on_all_ranks,
        agreed._compared,
        "if len(found) > 1 → if len(found) > 2",
    ),
    Mutant(
        "L55: in a checked world, a sum meets a maximum",
        checks.test_what_differs_is_named,
        agreed._compared,
        '"reduction": op → "reduction": None',
        args={"one": "reduce 3", "other": "reduce the greatest", "what": "reduction"},
    ),
    Mutant(
        "L49: in a checked world each rank says another label",
        checks.test_checking_changes_nothing,
        agreed._compared,
        '"label": label, → "label": f"{label} {world.rank}",',
    ),
    Mutant(
        "L55: a simulated world adds up what ranks have under different names",
        checks.test_simulated_worlds_compare_structures,
        agreed.agreed,
        "connection.activity.structure = tree.outline(values, partial(_star, grad=grad)) → pass",
    ),
    Mutant(
        "L2: replicas are compared after the first update of each period, not the last",
        test_replicas.test_the_next_check_finds_one_element_of_one_rank,
        check.check_replicas.after_update,
        "state.step % self.every == 0 → (state.step - 1) % self.every == 0",
    ),
    Mutant(
        "L28: a check leaves something behind in the parameters",
        test_replicas.test_a_check_changes_nothing,
        check.check_replicas.after_update,
        "label = f → next(iter(state.params.values())).mul_(2); label = f",
    ),
    Mutant(
        "L2: a check takes batch statistics, which ranks count for themselves, for parameters",
        test_replicas.test_batch_statistics_may_differ,
        check.check_replicas.after_update,
        "check_values(state.params, → check_values({**state.params, **state.buffers},",
        args={"every": 1},
    ),
    Mutant(
        "L49: the greatest of complex numbers has the greatest real and imaginary parts",
        limits.test_what_cannot_travel_is_refused,
        reductions.check_reducible,
        'op not in ("sum", "mean") → op not in ("sum", "mean", "max")',
        args={"case": "complex greatest"},
    ),
    Mutant(
        "L49: the mean of two 200s of 8 bits is 72",
        limits.test_a_mean_of_integers_is_that_of_the_numbers,
        reductions._summed,
        "return dtype if dtype.is_floating_point or dtype.is_complex else torch.float64"
        " → return dtype",
    ),
    Mutant(
        "L49: the mean of two 60000s of 16 bits is infinite",
        limits.test_a_mean_of_narrow_floats_does_not_overflow,
        reductions._summed,
        "return torch.float32 → return dtype",
    ),
    Mutant(
        "L49: a NaN is compared by its sign, as if it were a number beyond infinity",
        limits.test_nan_is_the_least_and_the_greatest,
        reductions._integers,
        "ordered.masked_fill_(floats.isnan(), nan) → ordered",
    ),
    Mutant(
        "L49: a record's field that no argument sets keeps what it was",
        limits.test_records_keep_every_field,
        tree._map_record,
        "_set_fields(record)"
        " → ((k, v) for k, v in _set_fields(record) if k in type(record).__match_args__)",
        args={"kind": "dataclass", "given": "set"},
    ),
    Mutant(
        "L49: ranks that fill a dict in other orders exchange entries of different names",
        limits.test_entries_meet_by_name,
        tree._by_key,
        "sorted(items) if all(isinstance(key, str) for key in items) else items"
        " → items",
    ),
    Mutant(
        "L55: metrics of different names are added up",
        limits.test_metrics_of_other_names_are_told,
        packed._differ,
        "world.size * squares != total**2 → False",
    ),
    Mutant(
        "L49: the gradient of a gradient has this rank's part in place of all ranks'",
        limits.test_gradients_of_gradients_are_those_of_one_process,
        differentiated._SumOfMine.backward,
        "everyone = gather_with_grad(mine, counts, (ready, ctx.world), ctx.label)"
        " → everyone = torch.cat([mine.new_ones(n) * mine.sum() for n in counts])",
    ),
    Mutant(
        "L55: in a checked world, a rank gathers for a backward pass that another has not",
        checks.test_what_differs_is_named,
        agreed._compared,
        "[grad and _requires_grad(leaf) for leaf in leaves] → []",
        args={
            "one": "gather for gradients",
            "other": "gather for its gradients",
            "what": "need of gradients",
        },
    ),
    Mutant(
        "L2: a checksum is the same where two elements have changed places",
        test_replicas.test_a_checksum_tells_bits_and_places_apart,
        replicas.checksum,
        "_mixed(each * factors[: len(each)]).sum() → each.sum()",
    ),
    Mutant(
        "L2: replicas whose optimizer states differ are said to agree",
        test_replicas.test_whatever_differs_in_a_state_is_named,
        control.assert_replicas_agree,
        '"opt_state": state.opt_state, → ',
        args={"field": "opt_state['first.weight']['momentum_buffer']", "culprit": 0},
    ),
]
