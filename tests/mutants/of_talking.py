# SPDX-License-Identifier: Apache-2.0
"""Bugs in how ranks talk: whose values come, what they share, what is compared, who is blamed."""

from accelfn.collectives import (
    agreed,
    differentiated,
    missing,
    objects,
    packed,
    reductions,
    replicas,
    swapped,
    trees,
)
from tests.laws import test_checked, test_collectives_on_trees, test_replicas
from tests.laws import test_collectives_at_limits as limits
from tests.mutants.mutant import Mutant
from tests.unit import test_collectives, test_roll_call

MUTANTS = [
    Mutant(
        "L49: an object that another rank broadcasts arrives as what rank 0 has",
        test_collectives_on_trees.test_objects_arrive_whole,
        packed.broadcast_bytes,
        "broadcast_([buffer], world, label=label, root=root)"
        " → broadcast_([buffer], world, label=label)",
    ),
    Mutant(
        "L49: whoever else broadcasts an object has nothing to send",
        test_collectives_on_trees.test_objects_arrive_whole,
        objects.broadcast_object.__wrapped__,
        "if world.rank == root else None"
        " → if world.rank == 0 else _written(None, pickle=pickle)",
    ),
    Mutant(
        "in a world of one, what was gathered changes with what was given",
        test_collectives.test_what_comes_back_is_a_copy,
        packed.all_gather_rows,
        "_filled(t, n)[:n].clone(memory_format=_CONTIGUOUS) → _filled(t, n)[:n]",
        args={"call": test_collectives.COPIES["gather"]},
    ),
    Mutant(
        "in a world of one, what all_to_all gives changes with what was given",
        test_collectives.test_what_comes_back_is_a_copy,
        swapped.all_to_all.__wrapped__,
        "return [tree.clone(each) for each in values] → return list(values)",
        args={"call": test_collectives.COPIES["all to all"]},
    ),
    Mutant(
        "af.reduce of one tensor changes the tensor that it was given",
        test_collectives.test_what_comes_back_is_a_copy,
        packed.pack,
        "return torch.cat([tensors[0].reshape(-1)]) → return tensors[0].reshape(-1)",
        args={"call": test_collectives.COPIES["reduce"]},
    ),
    Mutant(
        "L49: a NaN that one rank has is not in the least of all ranks",
        limits.test_nan_is_the_least_and_the_greatest,
        reductions._integers,
        'limits.max if op == "max" else limits.min → limits.max',
    ),
    Mutant(
        "L49: of negative numbers the greatest is the least",
        limits.test_nan_is_the_least_and_the_greatest,
        reductions._integers,
        "bits ^ ((bits >> (limits.bits - 1)) & limits.max) → bits.clone()",
    ),
    Mutant(
        "L49: a rank that has had enough goes on until all have",
        test_collectives_on_trees.test_booleans_are_counted_and_combined,
        trees.any_rank.__wrapped__,
        'reduced([value], ready, "max", label) → reduced([value], ready, "min", label)',
    ),
    Mutant(
        "L49: all ranks stop as soon as one is ready",
        test_collectives_on_trees.test_booleans_are_counted_and_combined,
        trees.all_ranks.__wrapped__,
        "return not any_rank(not _truth(flag, label), world, label=label)"
        " → return any_rank(_truth(flag, label), world, label=label)",
    ),
    Mutant(
        "L48: labels that are padded with -100, to be left out of a loss, count as class 0",
        test_collectives_on_trees.test_padding_is_as_long_as_the_longest,
        trees.pad_across.__wrapped__,
        "leaf.new_full(missing, value) → leaf.new_full(missing, 0)",
    ),
    Mutant(
        "L49: 0.5 in a tensor of integers is filled up as 0, and nobody is told",
        limits.test_what_cannot_travel_is_refused,
        trees._check_holds,
        "if not holds: → if held is None:",
        args={"case": "half an integer"},
    ),
    Mutant(
        "a tree of floats and integers comes back with its entries exchanged",
        test_collectives.test_entries_of_several_dtypes_keep_their_places,
        packed.all_gather_rows,
        "return [found[i] for i in range(len(tensors))] → return list(found.values())",
        args={"call": test_collectives.COPIES["gather"]},
    ),
    Mutant(
        "af.reduce gives a tree of floats and integers with its entries exchanged",
        test_collectives.test_entries_of_several_dtypes_keep_their_places,
        trees._by_dtype,
        "[found[i] for i in range(len(leaves))] → list(found.values())",
        args={"call": test_collectives.COPIES["reduce"]},
    ),
    Mutant(
        "L49: a contrastive loss trains each rank's model on the gradient of rank 0's rows",
        test_collectives_on_trees.test_gathering_is_differentiated,
        differentiated._SumOfMine.forward,
        "total.split(list(counts))[world.rank].clone()"
        " → total.split(list(counts))[0].clone()",
    ),
    Mutant(
        "ranks of which one needs no gradient wait for ever in the backward pass",
        test_collectives.test_ranks_that_differ_in_needing_gradients_are_told,
        trees._gathered,
        "ready = agreed(world, kind, label, values, free=free, grad=grad)"
        " → ready = agreed(world, kind, label, values, free=free)",
    ),
    Mutant(
        "L55: in a checked world two ranks that send each their own get what came first",
        test_checked.test_what_differs_is_named,
        agreed._compared,
        '"root": root, → "root": None,',
        args={"one": "broadcast", "other": "broadcast from 1", "what": "root"},
    ),
    Mutant(
        "L55: in a checked world rows of different widths are put together",
        test_checked.test_what_differs_is_named,
        agreed._told,
        'sizes[free] = "any" → sizes = ["any"]',
        args={
            "one": "gather ragged",
            "other": "gather ragged 3",
            "what": "shape or dtype",
        },
    ),
    Mutant(
        "L49: in a checked world a number without a dim is no row among rows",
        test_checked.test_a_lone_number_is_a_row_among_rows,
        agreed._told,
        "elif free is not None: → elif False:",
    ),
    Mutant(
        "L55: in a checked world sums of tensors of different sizes are made",
        test_checked.test_what_differs_is_named,
        agreed._told,
        "for size in leaf.shape → for size in leaf.shape[:0]",
        args={"one": "reduce 3", "other": "reduce 2", "what": "shape or dtype"},
    ),
    Mutant(
        "ranks that train other parameters are not told when they are made",
        test_collectives.test_ranks_that_hold_other_models_are_told,
        replicas.check_replicas,
        "'' if trained is None or name in trained else ', frozen' → ''",
        args={"other": "frozen"},
    ),
    Mutant(
        "a rank with one layer more than the others passes for a replica",
        test_collectives.test_ranks_that_hold_other_models_are_told,
        replicas._first_difference,
        "range(max((len(table) for table in tables), default=0))"
        " → range(min((len(table) for table in tables), default=0))",
        args={"other": "longer"},
    ),
    Mutant(
        "L2: a third rank that differs passes for a replica",
        test_replicas.test_whatever_differs_in_a_state_is_named,
        replicas._first_difference,
        "if len(set(rows)) > 1: → if rows[0] != rows[1]:",
        args={"field": "params['first.weight']", "culprit": 2},
    ),
    Mutant(
        "replicas that differ in where two blocks of a large tensor stand pass",
        test_collectives.test_a_checksum_tells_where_parts_of_a_large_tensor_stand,
        replicas.checksum,
        "return _mixed(torch.stack(sums) * each).sum()"
        " → return _mixed(torch.stack(sums)).sum()",
    ),
    Mutant(
        "L2: replicas that differ in where two elements stand pass",
        test_replicas.test_a_checksum_tells_bits_and_places_apart,
        replicas.checksum,
        "_mixed(each * factors[: len(each)]).sum() → _mixed(each * factors[0]).sum()",
    ),
    Mutant(
        "a rank that waited like the others is said to have been elsewhere",
        test_roll_call.test_the_first_word_counts,
        missing._told,
        "if rank not in gone and str(each) != str(mine) → if rank not in gone",
    ),
    Mutant(
        "of ranks that wait in vain one that waits too is blamed",
        test_roll_call.test_who_is_silent_is_missing,
        missing._told,
        "if r != world.rank and r not in heard] → if r != world.rank]",
    ),
    Mutant(
        "ranks that wait in different collectives are not told of each other",
        test_roll_call.test_who_waited_elsewhere_is_told,
        missing._told,
        'return f"{said} Elsewhere, {_listed(astray)}." if astray else said'
        " → return said",
    ),
]
