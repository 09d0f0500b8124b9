# SPDX-License-Identifier: Apache-2.0
"""Bugs by which likely mistakes pass in silence."""

import math

import torch
from torch import nn

from accelfn.base import arguments, question, read_only
from accelfn.checkpoint import commit, options
from accelfn.data import checks, left_out
from accelfn.definition import checks as checks_of_definitions
from accelfn.engine import counters, engine, read_loss, strangers
from accelfn.engine.module import units
from accelfn.engine.optimizer import live_optimizer
from accelfn.loop import evaluate
from accelfn.schedules import rates
from accelfn.state import metrics, views
from accelfn.structure import prototype
from accelfn.transforms.sync_batchnorm import sync_batchnorm
from tests.mutants.mutant import Mutant
from tests.unit import test_likely_mistakes as tests
from tests.unit import test_transforms_over_ranks, test_wrap_fsdp, test_wrong_arguments

MUTANTS = [
    Mutant(
        "of a batch that is as long as the last one its length is told as a count",
        tests.test_a_number_that_a_module_counts_on_is_told,
        counters._counts,
        "or values[0] == values[1] → ",
        args={"name": "a length", "num_micro_batches": 1},
    ),
    Mutant(
        "a temperature that falls by a factor is not told",
        tests.test_a_number_that_a_module_counts_on_is_told,
        counters._counts,
        "all(values[:-1]) and all( → False and all(",
        args={"name": "a decay", "num_micro_batches": 2},
    ),
    Mutant(
        "lengths that vary are told as a count",
        tests.test_a_number_that_a_module_counts_on_is_told,
        counters._counts,
        "for a, b in pairs) → for a, b in pairs[:1])",
        args={"name": "a length that varies", "num_micro_batches": 1},
    ),
    Mutant(
        "a tensor that a module writes into is not told",
        tests.test_a_tensor_that_a_module_writes_into_is_told,
        counters._of_tensor,
        "tensor._version → 0",
        args={"like": torch.zeros(2), "into": "an attribute"},
    ),
    Mutant(
        "a number that a module counts on in a tensor is not told",
        tests.test_a_number_that_a_module_counts_on_is_told,
        counters._of_tensor,
        "tensor.numel() == 1 → tensor.numel() == 0",
        args={"name": "a tensor", "num_micro_batches": 1},
    ),
    Mutant(
        "modules are looked through for numbers again and again",
        tests.test_a_number_that_a_module_counts_on_is_told,
        counters.Counters.look,
        "return False → return True",
        args={"name": "of passes", "num_micro_batches": 1},
    ),
    Mutant(
        "a weight that is a tensor may be negative",
        tests.test_a_weight_is_one_that_totals_are_divided_by,
        read_loss._check_weight,
        "0 <= known < math.inf → known == known",
    ),
    Mutant(
        "of the graph of a loss the end alone is looked at for parameters of nobody",
        tests.test_parameters_of_a_model_that_was_given_away_are_told,
        strangers._leaves_of,
        "left += [after for after, _ in node.next_functions] → left = []",
    ),
    Mutant(
        "of several functions of a loss one is looked through for parameters of nobody",
        tests.test_parameters_that_nobody_trains_are_told,
        engine.Engine._look,
        "if strangers is None and → if not self._strangers and",
        args={"size": 1},
    ),
    Mutant(
        "a function of a loss is looked through again and again",
        tests.test_parameters_that_nobody_trains_are_told,
        engine.Engine._look,
        "self._strangers[code] = → ",
        args={"size": 1},
    ),
    Mutant(
        "inputs with a gradient are taken for parameters of nobody",
        tests.test_what_reads_a_frozen_model_is_not_told,
        strangers.Strangers.__init__,
        "nn.Parameter) → torch.Tensor)",
    ),
    Mutant(
        "memory that is put in the place of a lent tensor's is not looked at",
        tests.test_what_is_put_in_the_place_of_a_lent_tensor_is_refused,
        views._place,
        "return tensor.data_ptr(), → return 0,",
        args={"put": tests.put_data},
    ),
    Mutant(
        "a lent module of another kind of numbers is refused",
        tests.test_what_is_put_in_the_place_of_a_lent_tensor_is_refused,
        views._check_replaced,
        "and now[name][1][1:] == was[1][1:] → ",
        args={"put": tests.put_data},
    ),
    Mutant(
        "the gradient of a loss's weight is dropped",
        tests.test_a_weight_with_a_gradient_is_refused,
        metrics.Loss.__init__,
        "weight.requires_grad: → False:",
    ),
    Mutant(
        "a schedule may climb",
        tests.test_a_schedule_below_zero_is_refused,
        rates.FactorRates.__call__,
        "or factor < 0 → ",
    ),
    Mutant(
        "a list of many samples is taken for columns",
        tests.test_columns_in_a_list_are_told,
        checks._warn_of_columns,
        "if not 2 <= len(rows) <= _FEW or → if",
    ),
    Mutant(
        "ranks that agree by files do not look whether they see them",
        tests.test_directories_by_rank_are_refused_at_once,
        commit.check_seen,
        "if not paths.is_directory(save.partial): → if False:",
    ),
    Mutant(
        "an optimizer that lacks what it kept fails as Python does",
        tests.test_an_optimizer_of_other_options_says_what_it_lacks,
        live_optimizer.LiveOptimizer._stepped,
        "lacks {error} among → has not all that it needs among",
    ),
    Mutant(
        "a rate that is no number is taken",
        tests.test_a_rate_that_is_no_number_is_refused,
        prototype._check_rates,
        "not math.isfinite(rate) → rate == math.inf",
        args={"rate": math.nan, "first": True},
    ),
    Mutant(
        "a rate of a second group is not looked at",
        tests.test_a_rate_that_is_no_number_is_refused,
        prototype._check_rates,
        "enumerate(optimizer.param_groups) → enumerate(optimizer.param_groups[:1])",
        args={"rate": math.nan, "first": False},
    ),
    Mutant(
        "no world at all is tried",
        tests.test_numbers_of_ranks_are_asked_for,
        arguments.check_sizes,
        "if not sizes or not all → if not all",
        args={"sizes": []},
    ),
    Mutant(
        "a method without its parentheses is true",
        tests.test_a_method_is_not_taken_for_its_answer,
        question._Asked.__bool__,
        "raise CallError(msg) → return True",
        args={"name": "Stop.requested"},
    ),
    Mutant(
        "of a record a method that answers is the class's",
        tests.test_a_method_is_not_taken_for_its_answer,
        question._Question.__get__,
        "if record is None else → if True else",
        args={"name": "CheckpointStore.due"},
    ),
    Mutant(
        "every name is in what is shown",
        tests.test_what_is_shown_reads_as_a_dict,
        read_only.ReadOnly.__contains__,
        "key in self._shown → True",
    ),
    Mutant(
        "beside another dict's entries those that are shown are passed over",
        tests.test_what_is_shown_reads_as_a_dict,
        read_only.ReadOnly.__ror__,
        "{**other, **self._shown} → {**self._shown, **other}",
    ),
    Mutant(
        "a copy of what is shown is the dict itself",
        tests.test_what_is_shown_reads_as_a_dict,
        read_only.ReadOnly.copy,
        "dict(self._shown) → self._shown",
    ),
    Mutant(
        "who writes into what a state shows is told nothing",
        tests.test_what_a_state_holds_is_not_replaced,
        read_only.ReadOnly._refuse,
        "raise CallError(msg) → return self",
        args={"write": "|="},
    ),
    Mutant(
        "every rank tells that a model has no layers to synchronise",
        test_transforms_over_ranks.test_a_model_without_layers_to_synchronise_is_told,
        sync_batchnorm.module,
        "and state.world.is_main → ",
        args={"layer": nn.GroupNorm, "told": ["BatchNorm"], "size": 2},
    ),
    Mutant(
        "SyncBatchNorm is no layer to synchronise",
        test_transforms_over_ranks.test_a_model_without_layers_to_synchronise_is_told,
        sync_batchnorm.module,
        "isinstance(each, BatchNorm) → type(each).forward is BatchNorm.forward",
        args={"layer": nn.SyncBatchNorm, "told": [], "size": 1},
    ),
    Mutant(
        "a collate that packs samples is said to leave some out",
        tests.test_samples_that_a_collate_leaves_out_are_told,
        left_out.LeftOut.look,
        "each.is_integer() if known is None → False if known is None",
        args={"name": "rows of several"},
    ),
    Mutant(
        "each batch out of which samples are left is told",
        tests.test_samples_that_a_collate_leaves_out_are_told,
        left_out.LeftOut.look,
        "not as_ever:\n        self._looks = False → not as_ever:",
        args={"name": "several"},
    ),
    Mutant(
        "a mean that nothing is beside is said to count for too many",
        tests.test_samples_that_a_collate_leaves_out_are_told,
        engine.Engine._look,
        "and not samples.lone → ",
        args={"name": "a later one"},
    ),
    Mutant(
        "an evaluation by totals is said to be a mean of too many",
        tests.test_samples_that_a_collate_leaves_out_are_told,
        evaluate.evaluate,
        "and not isinstance(returned, Loss): → :",
        args={"name": "several"},
    ),
    Mutant(
        "a copy of what a state shows is empty",
        tests.test_what_is_shown_reads_as_a_dict,
        read_only.ReadOnly.__reduce__,
        "iter(self._shown.items()) → None",
    ),
    Mutant(
        "what is best by no metric is not told",
        test_wrong_arguments.test_the_best_is_best_by_a_metric,
        options.check_options,
        'keep_best is None and best_is != "min" → False',
    ),
    Mutant(
        "a schedule of two arguments is told at the first update",
        test_wrong_arguments.test_create_names_what_it_was_given,
        checks_of_definitions.check_schedule,
        "None if schedule is None else why_not(schedule, 0) → None",
        args={"case": "a schedule of two arguments"},
    ),
    Mutant(
        "a layer that is frozen is not split for its sparse gradients",
        test_wrap_fsdp.test_rows_that_are_not_trained_are_split,
        units._refuse_sparse,
        "and each.weight.requires_grad → ",
    ),
    Mutant(
        "of the metrics that ranks give a store those of the next rank alone are looked at",
        tests.test_metrics_of_one_rank_are_told,
        options.check_numbers,
        "in enumerate(said) → in enumerate(said[:2])",
        args={"given": ({"a": 1.0}, {"a": 1.0}, {"a": 2.0}), "async_": False},
    ),
]
