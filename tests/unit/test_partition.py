# SPDX-License-Identifier: Apache-2.0
"""Several optimizers as one: what each part gets, what is refused, what torch would do."""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

import accelfn as af
from tests.internals import parts_of

X = torch.linspace(-1, 1, 24).reshape(8, 3)
ADAMW = partial(optim.AdamW, lr=0.1)
MUON = partial(optim.Muon, lr=0.02)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def is_matrix(_name, param):
    return param.ndim == 2


STEP = af.make_step(lambda model, x: model(x).square().mean())
PARTED = af.combine_optimizers((is_matrix, MUON), (..., ADAMW))


def create(optimizer, **options):
    return af.TrainState.create(model=net, optimizer=optimizer, **options)


def test_groups_are_numbered_through_the_parts():
    """Rates stand in the order of the parts, and `hyper` goes by that number."""

    @af.transform
    class Stops:
        where: object

        def hyper(self, hyper, slot, update):
            return {(self.where, "lr"): 0.0}, slot

    for where, still in ((0, "weight"), (1, "bias")):
        state = create(PARTED, setup=Stops(where))
        assert state.lrs == ((0.0, 0.1), (0.02, 0.0))[where]
        before = {name: param.clone() for name, param in state.params.items()}
        after = STEP(state, X)[0].params
        same = [n for n in before if torch.equal(before[n], after[n])]
        assert same == [f"0.{still}", f"2.{still}"]


def test_a_hyperparameter_that_one_part_lacks():
    """An option of all groups must be one of each; the group without it is named."""

    @af.transform
    class Sets:
        def hyper(self, hyper, slot, update):
            return {"betas": (0.5, 0.5)}, slot

    with pytest.raises(af.errors.OptimizerError, match="group 0 of .* ns_steps"):
        STEP(create(PARTED, setup=Sets()), X)


class Counting(optim.SGD):
    """Keeps an entry that belongs to no parameter, as MADGRAD does."""

    def step(self, closure=None):
        self.state["k"] = self.state.get("k", 0) + 1
        super().step(closure)


def test_entries_of_no_parameter_are_the_parts_own(tmp_path):
    """Two parts may keep entries under one key; each has its own, copied and loaded."""
    make = partial(Counting, lr=0.1)
    parted = af.combine_optimizers((is_matrix, make), (..., ADAMW))
    twice = af.combine_optimizers((is_matrix, make), (..., make))
    for optimizer, expected in ((parted, {"0:k": 3}), (twice, {"0:k": 3, "1:k": 3})):
        state = create(optimizer)
        for _ in range(3):
            state, _ = STEP(state.copy(), X)
        assert state.opt_state["<optimizer>"] == expected
        folder = tmp_path / str(len(expected))
        af.save(state, folder)
        assert af.load(create(optimizer), folder).opt_state["<optimizer>"] == expected


def test_a_checkpoint_of_other_parts_is_refused(tmp_path):
    """Parts of other kinds, or with other parameters, do not get each other's state."""
    state, _ = STEP(create(PARTED), X)
    af.save(state, tmp_path / "saved")
    is_first = lambda name, param: param.ndim == 2 and name.startswith("0.")  # noqa: E731
    for other in (
        ADAMW,
        af.combine_optimizers((is_first, MUON), (..., ADAMW)),
        af.combine_optimizers((is_matrix, ADAMW), (..., ADAMW)),
    ):
        with pytest.raises(af.errors.CheckpointError, match=r"Muon of 2 parameters"):
            af.load(create(other), tmp_path / "saved")


def test_parts_of_parts():
    """A part may be divided again."""
    is_bias = lambda name, _: name == "0.bias"  # noqa: E731
    inner = af.combine_optimizers((is_bias, ADAMW), (..., ADAMW))
    state = create(af.combine_optimizers((is_matrix, MUON), (..., inner)))
    assert len(parts_of(state.definition.optimizer)) == 3
    plain = create(PARTED)
    for _ in range(3):
        state, plain = STEP(state, X)[0], STEP(plain, X)[0]
    assert all(torch.equal(state.params[n], plain.params[n]) for n in plain.params)


@pytest.mark.parametrize("whole", [True, False])
def test_fused_parts_divide_by_the_weight(whole):
    """Where each part's kernel divides gradients it is left to them, else it is done before."""
    adamw = partial(ADAMW, fused=True)
    other = partial(optim.SGD, lr=0.1, fused=True) if whole else MUON
    optimizer = af.combine_optimizers((is_matrix, other), (..., adamw))

    def loss(model, x):
        return af.Loss(model(x).square().sum(), torch.tensor(8.0))

    summed, mean = create(optimizer), create(optimizer)
    made = optimizer(list(net().named_parameters()))
    assert made._step_supports_amp_scaling is whole
    for i in range(3):
        summed, _ = af.make_step(loss)(summed, X + i)
        mean, _ = STEP(mean, X + i)
    for name, param in mean.params.items():
        torch.testing.assert_close(param, summed.params[name])


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_fused_parts_leave_out_what_overflowed(found):
    """What a GradScaler hands to the whole, the scale and its flag, each part is handed."""
    model = net()
    make = partial(optim.SGD, lr=1.0, fused=True)
    whole = af.combine_optimizers((is_matrix, make), (..., make))(
        list(model.named_parameters())
    )
    before = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.full_like(param, 4.0)
    whole.grad_scale, whole.found_inf = torch.tensor(2.0), torch.tensor(found)
    whole.step()
    moved = 0.0 if found else 2.0
    for one, two in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(one - two, torch.full_like(one, moved))
    assert not any("found_inf" in vars(part) for part in whole.parts)


class Looked(nn.Module):
    """Gives a table sparse gradients, or dense ones."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 1, bias=False)
        self.table = nn.Embedding(3, 2, sparse=True)
        self.is_sparse = False

    def forward(self, rows):
        found = self.table(rows) if self.is_sparse else self.table.weight
        return self.head(found).sum()


@pytest.mark.parametrize(
    "by", [{"fused": True}, {"foreach": True}, {"foreach": False}, {}]
)
def test_a_part_that_raises_behind_another(by):
    """Torch does not count what its kernels change: the state is over, or it is as it was."""
    sgd, adam = partial(torch.optim.SGD, lr=0.5, **by), partial(torch.optim.Adam, lr=1)
    optimizer = af.combine_optimizers(
        (lambda name, _: name == "head.weight", sgd), (..., adam)
    )

    def loss(model, rows, is_sparse):
        model.is_sparse = is_sparse
        return model(rows).square()

    step, rows = af.make_step(loss), torch.tensor([0, 2])
    state = af.TrainState.create(model=Looked, optimizer=optimizer)
    state, _ = step(state, rows, False)  # noqa: FBT003 - an extra of the loss
    before = state.copy()
    with pytest.raises(RuntimeError, match="sparse"):
        step(state, rows, True)  # noqa: FBT003
    try:
        after = state.params
    except af.errors.StateDonatedError:
        return
    assert all(torch.equal(before.params[n], value) for n, value in after.items())


def test_hooks_of_parts_and_of_the_whole_run():
    """Step hooks run once an update, those of the whole and those of a part."""
    model, seen = net(), []
    optimizer = PARTED(list(model.named_parameters()))
    optimizer.register_step_post_hook(lambda *_: seen.append("whole"))
    optimizer.parts[1].register_step_post_hook(lambda *_: seen.append("part"))
    state = af.TrainState.create(model=model, optimizer=optimizer)
    STEP(state, X)
    assert sorted(seen) == ["part", "whole"]


def test_a_partition_is_a_torch_optimizer():
    """Outside of accelfn it steps, clears gradients, and takes a closure as torch's do."""
    model = net()
    twin = copy.deepcopy(model)
    whole = PARTED(list(model.named_parameters()))
    parts = PARTED(list(twin.named_parameters())).parts
    for _ in range(2):

        def closure():
            whole.zero_grad()
            loss = model(X).square().mean()
            loss.backward()
            return loss

        whole.step(closure)
        twin(X).square().mean().backward()
        for part in parts:
            part.step()
            part.zero_grad()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(af.errors.OptimizerError, match="parts"):
        whole.load_state_dict({})


def test_its_printing_names_functions():
    """A partition prints the names of its predicates and optimizers."""
    assert repr(PARTED) == "af.combine_optimizers((is_matrix, Muon), (..., AdamW))"


# What is refused.


MADE = ADAMW(list(net().named_parameters()))
NO_PARTS = [
    ((), "pairs, such as"),
    ((ADAMW,), "pair 0 .*pair"),
    (((is_matrix, ADAMW, 3),), "pair 0 .*pair"),
    (((..., ADAMW), (is_matrix, MUON)), "pair 0 .*which only the last pair can have"),
    ((("weight", ADAMW),), "pair 0 has 'weight'.*function of"),
    (((is_matrix, 3),), "pair 0 has 3.*factory"),
    (((..., MADE),), "pair 0 has an optimizer, AdamW.*factory"),
]


@pytest.mark.parametrize(("parts", "why"), NO_PARTS, ids=range(len(NO_PARTS)))
def test_no_parts(parts, why):
    """What is no pair of a predicate and a factory is refused when it is written."""
    with pytest.raises(af.errors.ArgumentError, match=why):
        af.combine_optimizers(*parts)


def others(_named):
    return optim.SGD(net().parameters(), lr=0.1)


def some(named):
    return optim.SGD(named[:1], lr=0.1)


UNFIT = [
    (((is_matrix, MUON),), r"belong to no pair.*0\.bias, 2\.bias.*factory"),
    (((..., MUON),), "2D"),
    (((lambda *_: True, ADAMW), (..., ADAMW)), r"pair 1 gets none .*0\.weight"),
    (((lambda *_: None, ADAMW), (..., ADAMW)), "pair 0 gets none"),
    (((..., lambda _: None),), "pair 0 returned NoneType"),
    (((is_matrix, MUON), (..., others)), r"pair 1 returned .*lacks .*has 4 others"),
    (((is_matrix, some), (..., ADAMW)), r"pair 0 returned .*lacks 2\.weight"),
    (((..., lambda named: optim.LBFGS([p for _, p in named])),), "LBFGS .*closure"),
]


@pytest.mark.parametrize(("parts", "why"), UNFIT, ids=range(len(UNFIT)))
def test_parts_that_do_not_fit_the_model(parts, why):
    """Parameters without a part, and parts without theirs, are named at `create`."""
    with pytest.raises((af.errors.OptimizerError, ValueError), match=why):
        create(af.combine_optimizers(*parts))
