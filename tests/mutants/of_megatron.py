# SPDX-License-Identifier: Apache-2.0
"""Bugs in Megatron-core's layers, as accelfn makes them whole and splits them."""

from accelfn.checkpoint import slices
from accelfn.engine.module import megatron, megatron_layers, plan
from accelfn.structure import skeleton
from accelfn.weights import export
from tests.laws import test_megatron as laws
from tests.mutants.mutant import Mutant
from tests.unit import test_megatron as unit
from tests.unit import test_model, test_tensor_parallel

TRAINS = laws.test_layers_of_megatron_train_what_torch_s_do
GOES_ON = laws.test_what_torch_s_layers_saved_megatron_s_go_on_with
BEGINS = laws.test_any_number_of_ranks_begins_with_the_same

MUTANTS = [
    Mutant(
        "L3: a bias that Megatron does not add has no gradient",
        TRAINS,
        megatron_layers.Linear.with_bias,
        "made + bias, None → made + bias.detach(), None",
    ),
    Mutant(
        "L3: a bias that is given on is added, too",
        TRAINS,
        megatron_layers.Linear.with_bias,
        "return made, bias → return made if bias is None else made + bias, bias",
    ),
    Mutant(
        "L3: features that are gathered have the gradient of their sum",
        TRAINS,
        megatron_layers.Column.forward,
        "crossing.gathered(made, → crossing.gathered_and_handed(made,",
    ),
    Mutant(
        "L3: what all ranks have is given to a row layer whole, of which each has a part",
        TRAINS,
        megatron_layers.Row.forward,
        "if self.takes_some: → if True:",
    ),
    Mutant(
        "L3: behind a row layer of Megatron's features are still a rank's own",
        TRAINS,
        megatron_layers.Row.forward,
        "layers.end_region() → pass",
    ),
    Mutant(
        "Megatron's layers have parameters in 32 bits, whatever was asked for",
        unit.test_parameters_have_the_dtype_that_was_asked_for,
        megatron_layers.config_of,
        "params_dtype=dtype → params_dtype=torch.float32",
    ),
    Mutant(
        "L45: a part of Megatron's layers is saved in the place of the first",
        GOES_ON,
        slices.slice_of,
        "tuple(offset), tuple(size)) → (0,) * len(shape), tuple(size))",
    ),
    Mutant(
        "L47: each rank has all of Megatron's layers",
        BEGINS,
        plan.cut_of,
        "if said is not None: → if False:",
    ),
    Mutant(
        "L54: a layer of Megatron's begins with what was in its memory",
        BEGINS,
        megatron_layers.Megatron.reset_parameters,
        'self._made[1]["init_method"](self.weight) → pass',
    ),
    Mutant(
        "layers are told of other ranks than share them",
        unit.test_layers_of_another_world_are_refused,
        megatron_layers.Megatron.check,
        "if made_for != size: → if False:",
    ),
    Mutant(
        "sequences are split between layers of Megatron's, which take their first dim",
        unit.test_what_cannot_be_split_is_refused,
        megatron_layers.Megatron.check,
        "if sequence and size > 1: → if False:",
        args={
            "model": unit.Net,
            "plan": {},
            "options": {"sequence": True},
            "said": "'words' is a layer of Megatron's, which puts",
        },
    ),
    Mutant(
        "the gradients of a row layer's parts are summed with those of a module around it",
        test_tensor_parallel.test_what_a_model_has_not_is_refused,
        plan._check_inside,
        "if word not in (REPLICATED, SEQUENCE): → if True:",
        args={
            "plan": {"up": "column", "tail.down": "row", "tail": "replicated"},
            "model": test_tensor_parallel.Tailed,
            "said": "about all modules in it",
        },
    ),
    Mutant(
        "a layer that says it is a part is cut once more",
        unit.test_what_cannot_be_split_is_refused,
        plan.check_model,
        "elif any(own_cut(p) is not None for p in each.parameters(recurse=False)):"
        " → elif False:",
        args={
            "model": unit.Foreign,
            "plan": {},
            "options": {},
            "said": "'up' is a torch.nn.modules.linear.Linear, whose parameters",
        },
    ),
    Mutant(
        "an empty plan splits nothing, in silence",
        unit.test_no_layer_at_all_is_refused,
        plan.check_model,
        "if not plan and not split_themselves: → if False:",
    ),
    Mutant(
        "an extra state that is none cannot be exported",
        unit.test_an_export_has_parameters_and_nothing_of_megatron_s,
        export._named,
        "if meta is None: → if False:",
    ),
    Mutant(
        "a model that cannot be copied is told so without the attribute",
        test_model.test_module_with_computed_tensors,
        skeleton._uncopied,
        """yield f" for its {'.'.join(filter(None, (name, attribute)))!r}" → yield "" """,
    ),
    Mutant(
        "a missing package is found missing by an import",
        unit.test_without_the_package_it_says_what_to_install,
        megatron.layers,
        'if importlib.util.find_spec("megatron") is None: → if False:',
    ),
]
