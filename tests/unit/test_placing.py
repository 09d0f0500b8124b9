# SPDX-License-Identifier: Apache-2.0
"""Plans of where a model is: what they say, what they refuse, and real models in them."""

import attrs
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accelfn as af
from tests.checkpoints import refused
from tests.internals import units_of
from tests.real_models import REAL, real

ArgumentError, ModelError = af.errors.ArgumentError, af.errors.ModelError


def empty(make):
    """Return a model without values."""
    with af.empty_weights():
        return make()


def not_placed(words, kind, *args, **options):
    """Expect that a model is not placed."""
    with refused(words, kind), af.on_devices(*args, **options):
        pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_plan_is_a_table(tmp_path):
    """It is printed, changed, and compared as a value; tied modules are one unit."""
    plan = af.plan_devices(Net(), {"cpu": 400, "disk": tmp_path})
    table = (
        "unit           size  where\n"
        "embed + head  128 B  cpu\n"
        "blocks.0       80 B  cpu\n"
        "blocks.1       80 B  cpu"
    )
    assert table == str(plan)
    moved = plan.moved("head", "disk").moved("blocks.1", "disk")
    assert [unit.device for unit in moved.units] == ["disk", "cpu", "disk"]
    assert moved != plan == moved.moved("embed", "cpu").moved("blocks.1", "cpu")


BUDGETS = [
    ({"cpu": 100}, r"'cpu': 100 B.*room for the unit 'embed \+ head' of 128 B"),
    (
        {"cpu": 100, "disk": "."},
        r"100 B is too small.*128 B are for offloaded units.*\(embed \+ head\)",
    ),
    ({"cpu": "1 apple"}, r"'1 apple'.*expected an integer number of bytes"),
    ({"cpu": 0}, "expected an integer number of bytes"),
    ({"gpu": 9}, "no device 'gpu'"),
    ({"cuda:99": 9}, "no device 'cuda:99'"),
    ({"meta": 9}, "have no values"),
    ({"disk": "."}, "other than the disk"),
    ({}, "expected bytes by device"),
    (3, "expected bytes by device"),
    ({"cpu": 9, "disk": "./no/such"}, "folder does not exist"),
]


@pytest.mark.parametrize(("budgets", "said"), BUDGETS)
def test_budgets_that_make_no_sense_are_refused(budgets, said):
    """Each with what was given, and the sizes where one is too small."""
    with refused(said, ArgumentError):
        af.plan_devices(Net(), budgets)


def test_moves_that_make_no_sense_are_refused(tmp_path):
    """An unknown unit, a device without budget, one whose budget is too small."""
    plan = af.plan_devices(Net(), {"cpu": 300, "disk": tmp_path})
    with refused(r"no unit has this name.*blocks.0", ArgumentError):
        plan.moved("block", "cpu")
    with refused(r"budgets only for 'cpu', 'disk'", ArgumentError):
        plan.moved("embed", "cuda:0")
    small = af.plan_devices(Net(), {"cpu": 208, "disk": tmp_path})
    small = small.moved("embed", "disk").moved("blocks.0", "cpu")
    with refused("208 B is too small. The device needs 288 B", ArgumentError):
        small.moved("blocks.1", "cpu")


def test_plans_of_other_models_are_refused(tmp_path):
    """What a plan leaves out is named, and what the model does not have."""
    net, plan = Net(), af.plan_devices(Net(), {"cpu": 400, "disk": tmp_path})
    net.more = nn.Linear(1, 1)
    not_placed("does not have more", ArgumentError, net, plan)
    smaller = Net()
    del smaller.blocks[1]
    not_placed("twice: blocks.1", ArgumentError, smaller, plan)
    not_placed("result of af.plan_devices", ArgumentError, net, {})
    not_placed("no values: embed.weight", ModelError, empty(Net), plan)


def test_a_placed_model_is_for_its_forward_alone(tmp_path):
    """No state is made of it, it is not placed twice, and gradients are refused."""
    net, ids = Net(), torch.arange(4)
    plan = af.plan_devices(net, {"cpu": 400, "disk": tmp_path})
    plan = plan.moved("blocks.0", "disk")
    with af.on_devices(net, plan) as model:
        with refused("inside `with af.on_devices", ModelError):
            af.TrainState.create(model=model, optimizer=torch.optim.SGD)
        not_placed("only the forward pass", ModelError, model, plan)
        with refused("gradients are enabled", ModelError), torch.enable_grad():
            model(ids)
        assert not model(ids).requires_grad
    assert net(ids).requires_grad
    af.TrainState.create(model=net, optimizer=torch.optim.SGD)


def test_what_is_no_module_is_not_placed(tmp_path):
    """The function is named, and what it was given."""
    plan = af.plan_devices(Net(), {"cpu": 400, "disk": tmp_path})
    with refused(r"af\.plan_devices\(model=.*expected a torch", ModelError):
        af.plan_devices(len, {"cpu": 400})
    not_placed(r"af\.on_devices\(model=.*expected a torch", ModelError, len, plan)


LACKS = "is on the meta"
WEIGHTS = {
    "of another dtype": ("blocks.1.bias", torch.Tensor.half, "float16 tensor of sh"),
    "of another shape": ("blocks.1.bias", lambda t: t[:2].clone(), r"shape \(2,\) in"),
    "missing": ("blocks.1.bias", None, f"parameter blocks.1.bias {LACKS}"),
    "of a tie": ("embed.weight", None, f"parameter embed.weight {LACKS}"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_of_another_model_are_refused(case, tmp_path):
    """A parameter that the files lack, or have otherwise, is named, and the model is as it was."""
    name, change, said = WEIGHTS[case]
    held = {n: t for n, t in Net().state_dict().items() if n != "head.weight"}
    model = empty(Net)
    plan = af.plan_devices(model, {"cpu": 400, "disk": tmp_path})
    there = {n: t for n, t in held.items() if n != name}
    if change:
        there[name] = change(held[name])
    save_file(there, tmp_path / "model.safetensors")
    not_placed(said, af.errors.CheckpointError, model, plan, weights=tmp_path)
    assert all(param.is_meta for param in model.parameters())
    save_file(held, tmp_path / "model.safetensors")
    with af.on_devices(model, plan, weights=tmp_path) as lent:
        assert torch.equal(lent.blocks[1].bias, held["blocks.1.bias"])
        assert lent.head.weight is lent.embed.weight
    assert all(param.is_meta for param in model.parameters())


def test_a_buffer_of_another_shape_is_refused(tmp_path):
    """With both shapes; one that the files have under its second name is read."""
    model = empty(lambda: nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)))
    model[1].running_mean = model[0].running_mean
    layer = nn.BatchNorm1d(2).state_dict()
    held = {f"{at}.{n}": t.clone() for at in range(2) for n, t in layer.items()}
    held["1.running_mean"] = torch.tensor([3.0, 4.0])
    plan = af.plan_devices(model, {"cpu": "1MiB", "disk": tmp_path})
    del held["0.running_mean"]
    save_file(held, tmp_path / "model.safetensors")
    with af.on_devices(model, plan, weights=tmp_path) as lent:
        assert lent[0].running_mean.tolist() == [3.0, 4.0]
    held["1.running_var"] = torch.ones(3)
    save_file(held, tmp_path / "model.safetensors")
    said = r"buffer 1\.running_var needs .* \(2,\), but .* shape \(3,\)"
    not_placed(said, af.errors.CheckpointError, model, plan, weights=tmp_path)


def test_a_plan_is_of_the_model_s_units_and_its_own_budgets(tmp_path):
    """Units joined otherwise, or on a device that has no budget, are of another plan."""
    net, plan = Net(), af.plan_devices(Net(), {"cpu": 400, "disk": tmp_path})
    untied = Net()
    untied.head.weight = nn.Parameter(untied.embed.weight.detach().clone())
    apart = af.plan_devices(untied, {"cpu": 800, "disk": tmp_path})
    first, *others = plan.units
    strange = attrs.evolve(plan, units=(attrs.evolve(first, device="cuda:7"), *others))
    for model, given in ((untied, plan), (net, apart), (net, strange)):
        not_placed("model has other units|no budget", ArgumentError, model, given)


def test_memory_that_is_shared_is_refused_on_the_disk(tmp_path):
    """Two parameters over one memory would be two afterwards."""
    net = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2)})
    net["a"].weight = nn.Parameter(net["b"].weight.data)
    plan = af.plan_devices(net, {"cpu": 99, "disk": tmp_path}).moved("a", "disk")
    not_placed("shares its memory", ModelError, net, plan)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", REAL)
def test_real_models_compute_from_the_disk(name, tmp_path):
    """Section D: a model whose blocks are in files computes bitwise what it does whole."""
    make, inputs = real(name)
    torch.manual_seed(1)
    model = make()
    model.save_pretrained(tmp_path, save_original_format=False)
    meta = empty(make)
    units = af.plan_devices(meta, {"cpu": "1GiB", "disk": tmp_path}).units
    budget = 2 * max(unit.num_bytes for unit in units)
    plan = af.plan_devices(meta, {"cpu": budget, "disk": tmp_path})
    assert "disk" in {unit.device for unit in plan.units}
    with torch.no_grad(), af.on_devices(meta, plan, weights=tmp_path) as lent:
        assert torch.equal(model(**inputs).logits, lent(**inputs).logits)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    """Statistics that the files lack are named; values that the model has are not ignored."""

    def refuse(words, kind, model):
        plan = af.plan_devices(model, {"cpu": "1MiB", "disk": tmp_path})
        not_placed(words, kind, model, plan, weights=tmp_path)

    def make():
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    params = {n: p.detach() for n, p in make().named_parameters()}
    save_file(params, tmp_path / "model.safetensors")
    words = "buffer 1.running_mean .* have none"
    refuse(words, af.errors.CheckpointError, empty(make))
    refuse("already has values", ArgumentError, make())


def test_what_has_no_elements_shares_no_memory(tmp_path):
    """Modules with empty tensors are units of their own, as any."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        layer.register_buffer("nothing", torch.empty(0))
    plan = af.plan_devices(model, {"cpu": 170, "disk": tmp_path})
    assert [unit.names for unit in plan.units] == [("0",), ("1",), ("2",)]


class Looped(nn.Module):
    """A block under two names, others in lists, and parameters that nobody calls."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.last = self.blocks[1]
        self.none = nn.ModuleList()
        self.scales = nn.ParameterList([torch.ones(2), torch.full((2,), 3.0)])

    def forward(self, x):
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        return self.last(x)


def test_a_module_under_two_names_is_one_unit(tmp_path):
    """Parameters in a list are of the module around it; all is counted, and computed, once."""
    model = Looped()
    plan = af.plan_devices(model, {"cpu": 100, "disk": tmp_path})
    names = [unit.names for unit in plan.units]
    assert sorted(names) == [("",), ("blocks.0",), ("blocks.1",)]
    params = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    assert sum(unit.num_bytes for unit in plan.units) == sum(params.values())
    x = torch.ones(1, 2)
    for unit in plan.units:
        plan = plan.moved(unit.names[0], "disk")
    with torch.no_grad():
        expected = model(x)
        with af.on_devices(model, plan) as lent:
            assert torch.equal(lent(x), expected)
        assert torch.equal(model(x), expected)
    assert model.last is model.blocks[1]


class Holding(nn.Module):
    """Of the parameters that it is given."""

    def __init__(self, *given):
        super().__init__()
        for i, each in enumerate(given):
            self.register_parameter(f"given_{i}", each)

    def forward(self, x):
        return x


def test_units_that_a_tie_joins_are_one_for_whom_comes_later():
    """A part that has two units' parameters makes one of them, and the next may have either's."""
    a, b, c, d = (nn.Parameter(torch.ones(4)) for _ in "abcd")
    for last in ([a], [b], [c], [d, c], [a, b, c]):
        model, other = nn.Module(), nn.Parameter(torch.ones(4))
        for name, given in enumerate(([a], [b, c], [a, b], last, [other])):
            model.add_module(f"{name}", Holding(*given))
        try:
            tied, alone = (
                {id(tensor) for part in unit for tensor in part.tensors.values()}
                for unit in units_of(model)
            )
        except ValueError as error:
            pytest.fail(f"{error}")
        assert tied == {id(each) for each in (a, b, c, *last)}
        assert len(alone) == 1
