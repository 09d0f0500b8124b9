# SPDX-License-Identifier: Apache-2.0
"""What `create(model=init="shard")` refuses, and edges of what it draws."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import ArgumentError, ModelError, ReplicaMismatchError
from accelfn.testing import simulate
from tests.states import create as create_state

create = partial(create_state, init="shard")


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(2))


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.weight[:2])


class Other(Half):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def reset_parameters(self):
        nn.init.ones_(self.weight)


class Copying(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(1))

    def reset_parameters(self):
        nn.init.constant_(self.gain, self.one.weight.sum().item())


def assigned():
    layer = nn.Linear(2, 2)
    values = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    layer.load_state_dict(values, assign=True)
    return layer


def asks():
    layer = nn.Linear(2, 2)
    assert layer.weight.sum().item() < 9
    return layer


def gives_data():
    layer = nn.Linear(2, 2)
    layer.weight.data = torch.ones(2, 2)
    return layer


THERE = nn.Linear(2, 2)
REFUSED = [
    (nn.Linear(2, 2), "functools.partial(Linear, ...)"),
    (3, "expected a torch.nn.Module, or a function"),
    (nn.Linear, "without arguments"),
    (lambda: 3, "returned int"),
    (Gain, "the model, a Gain, has a parameter 'gain' that nothing sets"),
    (lambda: nn.Sequential(Gain()), "the module '0', a Gain, has a parameter 'gain'"),
    (lambda: nn.ParameterList([torch.ones(1)]), "to the module around it that sets"),
    (Half, "'weight' that Half.reset_parameters() does not set"),
    (Other, "'weight' that the factory sets otherwise than Other.reset_parameters()"),
    (Copying, "Copying.reset_parameters() reads values that do not exist"),
    (assigned, "(1 more parameters have such a problem.)"),
    (asks, "reads values of parameters, which have no values yet"),
    (gives_data, "reads values of parameters, which have no values yet"),
    (lambda: nn.Sequential(THERE), "'0.weight' of Sequential existed before"),
    (lambda: copy.deepcopy(THERE), "'weight' of Linear existed before"),
    (partial(nn.LazyLinear, 1), "lazy parameter weight, which has no shape"),
    (nn.ReLU, "no trainable parameter"),
]


@pytest.mark.parametrize(("model", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_drawn_is_refused(model, said):
    """The sentence names the module, why, and what to write."""
    with pytest.raises(ModelError) as caught:
        create(model=model)
    assert said in str(caught.value)


def test_other_inits_are_refused():
    """And an error of the factory that has nothing to do with how it is run is its own."""
    with pytest.raises(ArgumentError, match=r'init=\'meta\'\): expected "whole" or'):
        create(model=Gain, init="meta")
    with pytest.raises(ZeroDivisionError):
        create(model=lambda: 1 / 0)


def test_ranks_that_draw_differently_are_told():
    """Though none has anything that another has."""

    def differ(world):
        with pytest.raises(ReplicaMismatchError, match="differ in values"):
            create(
                model=partial(nn.Linear, 4, 4),
                setup=af.wrap_fsdp(),
                world=world,
                seed=world.rank,
            )

    simulate(2, differ)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("angles", torch.arange(4.0).cos(), persistent=False)


def test_parameters_keep_what_they_are():
    """Parameters keep their dtype and marks, buffers what the factory writes, names their use."""

    def make():
        layer = nn.Linear(2, 2).to(torch.bfloat16)
        layer.bias.requires_grad_(requires_grad=False)
        vars(layer.weight)["mark"] = 1
        return layer

    state = create(model=make)
    assert state.params["weight"].dtype == torch.bfloat16
    assert state.definition.skeleton.trainable == ("weight",)
    assert vars(state.definition.skeleton.module.weight)["mark"] == 1
    buffers = create(model=Rotary).buffers
    assert torch.equal(buffers["angles"], torch.arange(4.0).cos())
    assert buffers["norm.running_var"].tolist() == [1, 1]
    assert buffers["norm.num_batches_tracked"].item() == 0
    assert create(model=Otherwise).params["layer.weight"].any()


def test_a_tied_parameter_is_drawn_as_its_first_module_draws():

    def make():
        model = nn.ModuleDict({"words": nn.Embedding(9, 30), "out": nn.Linear(30, 9)})
        model["out"].weight = model["words"].weight
        return model

    state = create(model=make)
    assert list(state.params) == ["words.weight", "out.bias"]
    assert 0.8 < state.params["words.weight"].std() < 1.2
    with af.borrow_model(state) as model:
        assert model["out"].weight is model["words"].weight


class Otherwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def _init_weights(self):
        raise AssertionError


@pytest.mark.parametrize(
    "init",
    [
        nn.init.trunc_normal_,
        nn.init.orthogonal_,
        nn.init.dirac_,
        partial(nn.init.sparse_, sparsity=0.5),
        nn.init.eye_,
        nn.init.kaiming_normal_,
    ],
    ids=("trunc_normal", "orthogonal", "dirac", "sparse", "eye", "kaiming_normal"),
)
def test_inits_that_do_nothing_on_meta_are_seen(init):
    """Where a module does it, it is drawn; where the factory does, it is refused."""
    shape = (4, 4, 3) if init is nn.init.dirac_ else (4, 4)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(shape))
            self.reset_parameters()

        def reset_parameters(self):
            init(self.weight)

    def once_more():
        model = Own()
        init(model.weight)
        nn.init.zeros_(model.weight)
        return model

    assert create(model=Own).params["weight"].std() > 0
    with pytest.raises(ModelError, match="otherwise than"):
        create(model=once_more)


def test_models_of_transformers_are_drawn_by_their_own_way():
    """Deviations are those of their configuration, in the module and from around it."""
    library = pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    config = library.GPT2Config(
        **sizes, vocab_size=64, bos_token_id=0, eos_token_id=0, initializer_range=0.5
    )
    params = create(model=lambda: library.GPT2LMHeadModel(config)).params
    block = "transformer.h.0.attn"
    assert 0.45 < params["transformer.wte.weight"].std() < 0.55
    assert 0.45 < params[f"{block}.c_attn.weight"].std() < 0.55
    assert 0.2 < params[f"{block}.c_proj.weight"].std() < 0.3  # for two layers, halved
    assert not params[f"{block}.c_attn.bias"].any()
    assert "lm_head.weight" not in params
