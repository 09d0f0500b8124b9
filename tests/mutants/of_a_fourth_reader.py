# SPDX-License-Identifier: Apache-2.0
"""Bugs that a reader planted who had seen the code alone, and that no test found then."""

import torch

from accelfn.launching import worker
from accelfn.outer import exchange
from accelfn.step import stages
from accelfn.structure import prototype
from accelfn.testing.traffic import traffic
from accelfn.weights import torch_files
from tests.laws import test_traffic
from tests.mutants.mutant import Mutant
from tests.unit import (
    test_diloco,
    test_import_empty,
    test_optimizer,
    test_scripts,
    test_state,
)

MUTANTS = [
    Mutant(
        "modules beside a script that a link leads to are not found",
        test_scripts.test_a_script_finds_what_python_lets_it_find,
        worker.run_script,
        "os.path.dirname(os.path.realpath(path)) → os.path.dirname(file)",
        args={"link": "to its folder", "spelled": "whole"},
    ),
    Mutant(
        "L49: each bucket is sent as if the link were free",
        test_traffic.test_buckets_are_sent_beside_the_backward_pass,
        traffic._after_backward,
        "max(now, backward * num_bytes / whole) → backward * num_bytes / whole",
    ),
    Mutant(
        "gradients that were divided can be given again where a transform raised",
        test_state.test_gradients_that_were_begun_with_are_given_away,
        stages.take,
        "given.give_away() → pass",
    ),
    Mutant(
        "a step hook of an optimizer is run as a state is made",
        test_optimizer.test_step_hooks_run,
        prototype._refuse_closure,
        "trial._optimizer_step_post_hooks.clear() → pass",
        args={"kind": test_optimizer.OfOnesOwn},
    ),
    Mutant(
        "of a name in two files the last file's tensor is taken",
        test_import_empty.test_of_a_name_in_two_files_the_index_says_which,
        torch_files.state_dict_of,
        "if places.get(n, file) == file → if True",
    ),
    Mutant(
        "moves of 16 bits are added up in 16 bits",
        test_diloco.test_moves_are_added_up_in_32_bits_at_least,
        exchange.moved,
        "_wide(local(a)) → local(a)",
        args={"dtype": torch.bfloat16},
    ),
]
