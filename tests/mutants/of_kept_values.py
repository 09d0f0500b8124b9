# SPDX-License-Identifier: Apache-2.0
"""Bugs by which what is kept of a state, or read beside it, is something else in silence."""

from accelfn.base import read_only, shards
from accelfn.data import left_out, lockstep
from accelfn.data.orders import order
from accelfn.definition import slots, whole_draws
from accelfn.engine import counters, read_loss
from accelfn.loop import evaluate
from accelfn.state import grads, metrics, views
from accelfn.step import value_and_grad
from tests.mutants.mutant import Mutant
from tests.unit import test_kept_values as tests
from tests.unit import test_likely_mistakes as mistakes
from tests.unit import test_whole_draws

SPLIT = tests.test_what_split_parameters_say_is_not_taken_for_the_whole
LEFT_OUT = mistakes.test_samples_that_a_collate_leaves_out_are_told
COUNTED = mistakes.test_a_number_that_a_module_counts_on_is_told

MUTANTS = [
    Mutant(
        "parameters that were kept of a state follow the training, and say so to nobody",
        tests.test_values_that_were_trained_on_are_not_read,
        read_only.ReadOnly._shown,
        "self._check() → pass",
        args={"field": "params", "read": "a dict"},
    ),
    Mutant(
        "an entry that is to keep the best parameters follows the training, untold",
        tests.test_an_entry_that_follows_the_training_is_told,
        slots.say_what_follows,
        "if _follows(slot, state): → if slot is state:",
        args={"name": "parameters"},
    ),
    Mutant(
        "what is evaluated is written into the state",
        tests.test_what_is_evaluated_is_not_written_into,
        views.eval_params,
        "if before != after: → if len(before) != len(after):",
        args={"size": 1},
    ),
    Mutant(
        "a sum over parts of parameters is evaluated as one over the whole",
        SPLIT,
        evaluate._sums,
        "check_whole(value, _called(fn)) → pass",
        args={"fn": tests.beside, "act": "evaluate"},
    ),
    Mutant(
        "a measure beside a loss is evaluated of parts of parameters",
        SPLIT,
        evaluate._sums,
        "check_whole(entry, _called(fn)) → pass",
        args={"fn": tests.in_aux, "act": "evaluate"},
    ),
    Mutant(
        "a measure beside a loss is reported of parts of parameters",
        SPLIT,
        read_loss.read_loss,
        "check_whole(entry, qualname(loss_fn)) → pass",
        args={"fn": tests.in_aux, "act": "step"},
    ),
    Mutant(
        "of a total and its weight the total alone is looked at for parts",
        SPLIT,
        metrics.check_whole,
        "for each in returned if → for each in returned[:1] if",
        args={"fn": tests.as_weight, "act": "evaluate"},
    ),
    Mutant(
        "gradients that were mapped lie on the ranks as torch left them",
        tests.test_gradients_that_a_transform_made_lie_as_they_did,
        grads.Grads.map,
        "split_as(fn(grad), grad) → fn(grad)",
    ),
    Mutant(
        "gradients by name lie on the ranks as torch left them",
        tests.test_gradients_that_a_transform_made_lie_as_they_did,
        grads.Grads.with_tensors,
        "split_as(each, had.get(n)) → each",
    ),
    Mutant(
        "a sum that each rank has a part of is taken for a split one",
        tests.test_gradients_that_a_transform_made_lie_as_they_did,
        shards.split_as,
        "if tensor.placements == other.placements: → if tensor.placements != ():",
    ),
    Mutant(
        "columns of a loader's batch are taken for micro-batches in lockstep",
        tests.test_lockstep_takes_a_loaders_batch_as_it_is,
        lockstep.lockstep,
        "isinstance(iterable, DataLoader) → False",
    ),
    Mutant(
        "an order that draws is the same in each epoch",
        tests.test_an_order_that_draws_is_the_same_when_it_is_asked_again,
        order.Own._called,
        '"own order", epoch) → "own order")',
    ),
    Mutant(
        "an order that draws takes the program's own draws",
        tests.test_an_order_that_draws_is_the_same_when_it_is_asked_again,
        order.Own._called,
        'seeds.begin(draws.key(seed, "own order", epoch)) → pass',
    ),
    Mutant(
        "an order may be another each time that it is asked for",
        tests.test_an_order_of_a_generator_that_goes_on_is_refused,
        order.Own.of_epoch,
        "indices[at] != again[at] for at in looked → not looked for at in looked",
    ),
    Mutant(
        "where the first batch is short already none is told",
        LEFT_OUT,
        left_out.LeftOut.look,
        "each.is_integer() if known is None → True if known is None",
        args={"name": "the first"},
    ),
    Mutant(
        "batches whose first dim is time are told as short",
        LEFT_OUT,
        left_out.LeftOut.look,
        "(fewer and not _has_dim(value, num_samples)) → fewer",
        args={"name": "rows of another axis"},
    ),
    Mutant(
        "a batch that is short after whole ones is not told",
        LEFT_OUT,
        left_out.LeftOut.look,
        "else each == known → else each >= known",
        args={"name": "a later one"},
    ),
    Mutant(
        "a list of images counts for as many samples as they have channels, untold",
        tests.test_a_list_of_samples_is_told,
        read_loss._say_what_rows_are,
        "max(rows, _MANY): → 10 * rows:",
        args={"name": "images"},
    ),
    Mutant(
        "a class of torch's losses is taken for a function of a model and a batch",
        tests.test_a_loss_of_torchs_is_no_loss_of_a_model,
        value_and_grad._is_torchs,
        "(FunctionType, type) → FunctionType",
        args={"loss": tests.nn.CrossEntropyLoss},
    ),
    Mutant(
        "a truth counts as a weight of 1",
        tests.test_totals_and_weights_are_numbers,
        metrics.is_scalar,
        "value.dtype is not torch.bool and  → ",
        args={"weight": 2, "aux": {"size": tests.FALSE}},
    ),
    Mutant(
        "rows that one rank has get the noise of another's",
        test_whole_draws.test_what_is_split_has_the_noise_of_the_whole,
        whole_draws._is_split,
        "return bool(placements) and not → return False and not",
    ),
    Mutant(
        "each rank has the noise of the first rows",
        test_whole_draws.test_what_is_split_has_the_noise_of_the_whole,
        whole_draws._part,
        "narrow(dim, min(begin, whole.shape[dim]), length) → narrow(dim, 0, length)",
    ),
    Mutant(
        "what is drawn into a split tensor is lost",
        test_whole_draws.test_what_is_split_has_the_noise_of_the_whole,
        whole_draws.WholeDraws.__torch_dispatch__,
        "part.copy_(drawn) → pass",
    ),
    Mutant(
        "a history that a module keeps in a list is not told",
        COUNTED,
        counters._numbers,
        "len(value) → 0",
        args={"name": "a history", "num_micro_batches": 1},
    ),
    Mutant(
        "a number that a module counts on in a dict is not told",
        COUNTED,
        counters._numbers,
        'not name.startswith("_") → not name',
        args={"name": "a number in a dict", "num_micro_batches": 1},
    ),
]
