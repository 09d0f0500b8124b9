# SPDX-License-Identifier: Apache-2.0
"""Models that are built without values, and real ones of Transformers among them."""

from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

import accelfn as af
from accelfn.errors import CheckpointError, ModelError
from tests.real_models import REAL, real
from tests.states import bits


def empty(build):
    with af.empty_weights():
        return build()


LINEAR = partial(nn.Linear, 2, 2)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.LazyLinear(2), r"LazyLinear has a lazy.*weight.*nn.Linear\(in_f"),
        (
            lambda: LINEAR().weight.sum().item(),
            "The model reads values of its parameters in item while it is built,",
        ),
    ],
)
def test_what_needs_values_is_refused_where_it_is_built(build, words):
    """Section C: it has no shape, or something asks for values, in a module or between them."""
    with pytest.raises(ModelError, match=words):
        empty(build)
    assert nn.LazyLinear(2)(torch.ones(1, 3)).shape == (1, 2)


@pytest.mark.parametrize(("rows", "function"), [(4, "allclose"), (3, "geqrf")])
def test_a_layer_that_reads_values_is_refused(rows, function, tmp_path):
    """Its function is named; built with values, the model is read."""

    def build():
        return nn.Sequential(orthogonal(nn.Linear(4, rows)))

    model, path = build(), tmp_path / "a.safetensors"
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, path)
    said = f"The model reads values .* in {function} while .*import_model\\(Net"
    with pytest.raises(ModelError, match=said):
        af.import_model(build, path)
    with pytest.raises(ModelError, match=said):
        empty(build)
    read = af.import_model(build(), path)
    assert torch.equal(model[0].weight, read[0].weight)


def test_what_fails_for_another_reason_is_that_error():
    """A mistake in a model that needs no values is told as torch tells it."""
    with pytest.raises(RuntimeError, match="size") as caught:
        empty(lambda: torch.ones(2) + torch.ones(3))
    assert not isinstance(caught.value, ModelError)


def test_what_would_be_left_without_values_is_named(tmp_path):
    """Section D: strict=False leaves no parameter on meta, and touches nothing before."""
    path = tmp_path / "a.safetensors"
    save_file({"weight": torch.ones(2, 2)}, path)
    model = empty(LINEAR)
    words = r"the meta device, but not in the files: bias.*empty_weights"
    with pytest.raises(CheckpointError, match=words):
        af.import_model(model, path, strict=False)
    assert model.weight.is_meta
    with pytest.raises(ModelError, match=r"have no values: weight, bias.*import_model"):
        af.TrainState.create(model=model, optimizer=torch.optim.SGD)
    real = LINEAR()
    with pytest.warns(UserWarning, match="missing bias"):
        af.import_model(real, path, strict=False)
    assert torch.equal(torch.ones(2, 2), real.weight)


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        codes = torch.arange(6, dtype=torch.int8).reshape(2, 3)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))


def test_integers_stay_as_they_are(tmp_path):
    """Quantised weights are not converted by dtype=, which is for floating-point tensors."""
    model, path = Quantised(), tmp_path / "a.safetensors"
    save_file(model.state_dict(), path)
    found = empty(Quantised)
    assert (found.codes.is_meta, found.codes.dtype) == (True, torch.int8)
    af.import_model(found, path, dtype=torch.bfloat16)
    assert torch.equal(model.codes, found.codes)
    assert not found.codes.requires_grad
    assert found.scale.dtype == torch.bfloat16


def test_a_parametrised_layer_comes_back(tmp_path):
    """weight_norm, which replaces a parameter by two of its own, has those of the file."""
    model, path = weight_norm(LINEAR()), tmp_path / "a.safetensors"
    save_file(model.state_dict(), path)
    found = af.import_model(empty(lambda: weight_norm(LINEAR())), path)
    x = torch.randn(4, 2)
    assert torch.equal(model(x), found(x))


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("name", REAL)
def test_real_models_come_back_bitwise(name, parts, tmp_path):
    """Section D: save_pretrained, empty_weights, import_model: the same tensors and outputs."""
    make, inputs = real(name)
    torch.manual_seed(1)
    model = make()
    size = "8KB" if parts else "5GB"
    model.save_pretrained(tmp_path, max_shard_size=size, save_original_format=False)
    found = empty(make)
    assert all(param.is_meta for param in found.parameters())
    found = af.import_model(found, tmp_path)
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        assert bits(dict(named(model))) == bits(dict(named(found)))
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, found(**inputs).logits)
