# SPDX-License-Identifier: Apache-2.0
"""Models that are built without values, and real ones of Transformers among them."""

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

import accelfn as af
from tests.real_models import REAL, real


def test_a_lazy_layer_is_refused_where_it_is_built():
    """Section C: it has no shape, and the sentence says what to write."""
    with (
        pytest.raises(
            af.errors.ModelError,
            match=r"LazyLinear has a lazy.*weight.*nn.Linear\(in_f",
        ),
        af.empty_weights(),
    ):
        nn.LazyLinear(2)
    assert nn.LazyLinear(2)(torch.ones(1, 3)).shape == (1, 2)


@pytest.mark.parametrize(
    ("rows", "function"), [(4, "allclose"), (3, "geqrf")], ids=["square", "tall"]
)
def test_a_layer_that_reads_values_is_refused(rows, function, tmp_path):
    """Its function is named; built with values, the model is read."""

    def build():
        return nn.Sequential(orthogonal(nn.Linear(4, rows)))

    model, path = build(), tmp_path / "a.safetensors"
    safetensors.torch.save_file(
        {n: t.contiguous() for n, t in model.state_dict().items()}, path
    )
    said = f"The model reads values .* in {function} while .*import_model\\(Net"
    with pytest.raises(af.errors.ModelError, match=said):
        af.import_model(build, path)
    with pytest.raises(af.errors.ModelError, match=said), af.empty_weights():
        build()
    read = af.import_model(build(), path)
    assert torch.equal(model[0].weight, read[0].weight)


def test_what_fails_for_another_reason_is_that_error():
    """A mistake in a model that needs no values is told as torch tells it."""
    with pytest.raises(RuntimeError, match="size") as caught, af.empty_weights():
        torch.ones(2) + torch.ones(3)
    assert not isinstance(caught.value, af.errors.ModelError)


def test_values_that_no_module_asks_for_are_refused():
    """Between modules, too, what needs values is named."""
    said = r"The model reads values of its parameters in item while it is built,"
    with pytest.raises(af.errors.ModelError, match=said), af.empty_weights():
        nn.Linear(2, 2).weight.sum().item()


def test_what_would_be_left_without_values_is_named(tmp_path):
    """Section D: strict=False leaves no parameter on meta, and touches nothing before."""
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(2, 2)}, path)
    with af.empty_weights():
        model = nn.Linear(2, 2)
    with pytest.raises(
        af.errors.CheckpointError,
        match=r"the meta device, but not in the files: bias.*empty_weights",
    ):
        af.import_model(model, path, strict=False)
    assert model.weight.is_meta
    real = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="missing bias"):
        af.import_model(real, path, strict=False)
    assert torch.equal(torch.ones(2, 2), real.weight)


def test_integers_stay_as_they_are(tmp_path):
    """Quantised weights are not converted by dtype=, which is for floating-point tensors."""

    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            codes = torch.arange(6, dtype=torch.int8).reshape(2, 3)
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))

    model, path = Quantised(), tmp_path / "a.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    with af.empty_weights():
        empty = Quantised()
    assert (empty.codes.is_meta, empty.codes.dtype) == (True, torch.int8)
    af.import_model(empty, path, dtype=torch.bfloat16)
    assert torch.equal(model.codes, empty.codes)
    assert not empty.codes.requires_grad
    assert empty.scale.dtype == torch.bfloat16


def test_a_parametrised_layer_comes_back(tmp_path):
    """weight_norm, which replaces a parameter by two of its own, has those of the file."""

    def build():
        return nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))

    model, path = build(), tmp_path / "a.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    with af.empty_weights():
        empty = build()
    af.import_model(empty, path)
    x = torch.randn(4, 3)
    assert torch.equal(model(x), empty(x))


def test_no_state_is_made_of_a_model_without_values():
    """Section D: the error says which function gives it some."""
    with af.empty_weights():
        model = nn.Linear(2, 2)
    with pytest.raises(
        af.errors.ModelError, match=r"have no values: weight, bias.*import_model"
    ):
        af.TrainState.create(model=model, optimizer=torch.optim.SGD)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("name", REAL)
def test_real_models_come_back_bitwise(name, parts, tmp_path):
    """Section D: save_pretrained, empty_weights, import_model: the same tensors and outputs."""
    make, inputs = real(name)
    torch.manual_seed(1)
    model = make()
    size = "8KB" if parts else "5GB"
    model.save_pretrained(tmp_path, max_shard_size=size, save_original_format=False)
    with af.empty_weights():
        empty = make()
    assert all(param.is_meta for param in empty.parameters())
    found = af.import_model(empty, tmp_path)
    assert (
        dict(model.named_parameters()).keys() == dict(found.named_parameters()).keys()
    )
    for one, two in zip(model.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(model.buffers(), found.buffers(), strict=True):
        assert torch.equal(one, two)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, found(**inputs).logits)
