# SPDX-License-Identifier: Apache-2.0
"""Bugs in how a state's values lie in ZeRO's flat tensors, and in what is refused."""

from accelfn.engine.zero import flats, places, settings, turns, zero
from accelfn.transforms.deepspeed import wrap_deepspeed
from tests.laws import test_flats as laws
from tests.laws import test_turns as order
from tests.mutants.mutant import Mutant
from tests.unit import test_wrap_deepspeed as unit

SAME = laws.test_rows_and_flat_tensors_hold_the_same
HAS = laws.test_what_an_optimizer_has_goes_there_and_back
MOVES = laws.test_each_rank_gets_the_elements_that_it_wants
COVER = laws.test_equal_parts_cover_each_element_once
ORDER = order.test_gradients_cross_in_one_order
ALIKE = laws.test_parameters_of_a_group_count_alike

MUTANTS = [
    Mutant(
        "L45: elements that several ranks have come from each of them",
        MOVES,
        places._overlap,
        "begin = max(begin, min(end, earlier[1])) → pass",
    ),
    Mutant(
        "L45: a piece is cut as if it began with the first element",
        MOVES,
        places._overlap,
        "piece[low - runs[rank][0] : high - runs[rank][0]] → piece[low:high]",
    ),
    Mutant(
        "L45: what overlaps with no other run goes to its end",
        COVER,
        places.cut_of,
        "min(run[1], within[1]) → run[1]",
    ),
    Mutant(
        "L45: equal parts begin with the second rank's",
        COVER,
        places.evenly,
        "(r * part, (r + 1) * part) → ((r + 1) * part, (r + 2) * part)",
    ),
    Mutant(
        "L45: a parameter begins where its elements of a rank do not",
        SAME,
        zero.Zero._places_of_groups,
        "offset = runs[rank][0] - rank * size → offset = 0",
    ),
    Mutant(
        "L45: elements of a group are counted from the group's beginning",
        SAME,
        zero.Zero._places_of_groups,
        "(begin - start, end - start) → (begin, end)",
    ),
    Mutant(
        "L45: parts of parameters lie over one another",
        SAME,
        zero.Zero._places_of_parts,
        "offset += part → pass",
    ),
    Mutant(
        "L45: what was read once is read for ever",
        SAME,
        flats.FlatParams.changed,
        "self._rows, self._read = None, _Read({}) → pass",
    ),
    Mutant(
        "L45: padding of a flat tensor is whatever was there",
        SAME,
        flats.Flats.gathered,
        "part.new_zeros( → part.new_ones(",
    ),
    Mutant(
        "L47: rows are shared out as if there were one more",
        SAME,
        flats.Flats._rows_of,
        "rows = -(-shape[0] // ranks) → rows = -(-shape[0] // ranks) + 1",
    ),
    Mutant(
        "L45: parameters of a flat tensor share one count",
        HAS,
        flats.FlatOptState._brought,
        "value.clone() if own else value → value",
    ),
    Mutant(
        "L45: numbers of a group are left behind",
        HAS,
        flats.flattened,
        "if k not in where.places → if k in where.places",
    ),
    Mutant(
        "L45: a second moment is the first",
        HAS,
        flats.flattened,
        "where.gathered(by_key[key]).items() → where.gathered(by_key[min(by_key)]).items()",
    ),
    Mutant(
        "L45: parameters that have counted otherwise have the count of the first",
        ALIKE,
        flats._check_alike,
        "if lacking or differ: → if lacking:",
        args={"other": {"step": laws.torch.tensor(2.0)}, "match": "counted"},
    ),
    Mutant(
        "L45: parameters of which there is no state have that of the first",
        ALIKE,
        flats._check_alike,
        "if lacking or differ: → if differ:",
        args={"other": {}, "match": "no state yet"},
    ),
    Mutant(
        "L3: gradients wait for the end, and their memory with them",
        ORDER,
        turns.Turns._out_of_turn,
        "self._waiting.add(number) → pass",
    ),
    Mutant(
        "L1: each rank learns its own order",
        ORDER,
        turns.Turns._turn,
        'broadcast_([told], self._ranks, label="order of gradients") → pass',
    ),
    Mutant(
        "L1: what has no gradient on a rank does not cross",
        ORDER,
        turns.Turns.rest,
        "while len(self._had) < self._count: → while self._waiting:",
    ),
    Mutant(
        "L24: who had a turn in a pass has none in the next",
        ORDER,
        turns.Turns.begin,
        "self._had.clear() → pass",
    ),
    Mutant(
        "L24: what waited in a pass that was broken off crosses in the next",
        order.test_a_pass_that_was_broken_off_leaves_nothing,
        turns.Turns.begin,
        "self._waiting.clear() → pass",
    ),
    Mutant(
        "L1: a second gradient of a parameter waits for ever",
        order.test_what_comes_twice_is_not_held_back,
        turns.Turns._out_of_turn,
        "if number in self._had: → if False:",
    ),
    Mutant(
        "L1: who comes in its turn passes those who wait for it",
        ORDER,
        turns.Turns.come,
        "if in_turn and not self._waiting: → if in_turn:",
    ),
    Mutant(
        "a setting of DeepSpeed's that accelfn says is taken",
        unit.test_a_setting_is_one_that_deepspeed_alone_says,
        settings.check_settings,
        "if key in _OURS: → if False:",
        args={"config": {"gradient_clipping": 1.0}, "match": r"af\.clip_grad_norm"},
    ),
    Mutant(
        "a setting that is misspelt is taken",
        unit.test_a_setting_is_one_that_deepspeed_alone_says,
        settings._check_known,
        "if key not in known: → if False:",
        args={"config": {"zero_optimisation": {}}, "match": "Did you mean"},
    ),
    Mutant(
        "values of DeepSpeed's settings are first looked at in the first step",
        unit.test_a_value_is_one_that_deepspeed_takes,
        settings.check_values,
        "if not config: → if True:",
        args={
            "config": {"zero_optimization": {"reduce_bucket_size": -1}},
            "match": "greater than 0",
        },
    ),
    Mutant(
        "what looks at gradients that DeepSpeed holds is composed",
        unit.test_what_looks_at_gradients_is_refused,
        wrap_deepspeed._check_grads,
        'if not {"clips", "skips_alone"} & facts_of(each).keys(): → if False:',
        args={"other": unit.af.clip_grad_value(0.1), "match": "looks at them"},
    ),
    Mutant(
        "DeepSpeed makes float32 of float64",
        unit.test_parameters_are_those_of_float32,
        wrap_deepspeed._check_model,
        "if meta.dtype is not torch.float32 → if False",
        args={
            "model": lambda: unit.nn.Linear(4, 4).double(),
            "match": "float32; weight, bias are torch.float64",
        },
    ),
    Mutant(
        "DeepSpeed's engine is built among simulated ranks",
        unit.test_simulated_ranks_are_refused,
        wrap_deepspeed._check_world,
        "if world.connection.simulated is not None: → if False:",
    ),
]
