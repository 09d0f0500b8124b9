# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's parallel layers, created with full sizes and then split over ranks.

A layer is created with its full size, so a state has the same values for any number of ranks. With
several ranks along "tp", Megatron's constructor runs a second time for the group of these ranks,
on the meta device. Then the rank's shards replace the parameters.
"""

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn

from accelfn.errors import ArgumentError, ModelError
from accelfn.model_parallel.layers import Layers, SelfSplittingLayer

# pyright: reportPrivateUsage=false

with warnings.catch_warnings():  # Megatron warns about optional packages
    warnings.simplefilter("ignore")
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        linear_with_grad_accumulation_and_async_allreduce,
        set_tensor_model_parallel_attributes,
    )

# torch has no public name for a module's dict of parameters

OutputAndBias: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


class Megatron(SelfSplittingLayer):
    """A Megatron layer that keeps the arguments of its constructor.

    Attributes:
        word: the word for this kind of layer in a tensor-parallel plan.
        cuts: the dim along which each parameter is split.
        place: the layer's name in the model, set when the layer is split.
        layers: the data that the split layers of a model share, set when the layer is split.
    """

    word: ClassVar[str]
    cuts: ClassVar[Mapping[str, int]]
    place: str
    layers: Layers | None = None
    weight: nn.Parameter
    _made: tuple[tuple[int, ...], dict[str, Any]]

    def __init__(self, *sizes: int, **options: Any) -> None:
        """Create the layer with its full size, and initialize its parameters."""
        super().__init__(*sizes, **options)
        self._made = sizes, options
        set_tensor_model_parallel_attributes(
            self.weight, is_parallel=True, dim=self.cuts["weight"], stride=1
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight by `init_method`, and the bias to 0."""
        self._made[1]["init_method"](self.weight)
        bias = self._parameters.get("bias")
        if bias is not None:
            nn.init.zeros_(bias)

    def split(self, layers: Layers, place: str) -> None:
        """Split the layer: replace the full parameters by this rank's shards."""
        if layers.ranks.device.type != "cuda":  # suppress a warning about GPU streams
            vars(linear_with_grad_accumulation_and_async_allreduce)["warned"] = True
        sizes, options = self._made
        parts, training = dict(self._parameters), self.training
        with torch.device("meta"):
            super().__init__(*sizes, **options, tp_group=layers.ranks.group)
        self._parameters.update(parts)
        self.train(training)
        self._made, self.place, self.layers = (sizes, options), place, layers

    def check(self, size: int, place: str, caller: str, *, sequence: bool) -> None:
        """Raise an error if the layer cannot be split over `size` ranks.

        Raises:
            ModelError: the layer cannot be split over this number of ranks, or along sequences.
        """
        made_for = self._made[1]["config"].tensor_model_parallel_size
        if made_for != size:
            msg = (
                f'{caller}: {place!r} was made for {made_for} ranks along "tp", but the state\'s'
                f" world has {size}. Make the layers for that world: af.megatron.layers(world)."
            )
            raise ModelError(msg)
        if sequence and size > 1:
            msg = (
                f"{caller}: {place!r} is a Megatron layer, and accelfn does not support"
                " sequence=True for Megatron layers: they gather sequences along dim 0, and only"
                " on GPUs. Remove sequence=True, or build the model from torch.nn layers."
            )
            raise ModelError(msg)
        dim = self.cuts["weight"]
        count = self.weight.shape[dim]
        if count % size:
            noun = "input features" if dim else "output features"
            noun = "rows" if self.word == "vocabulary" else noun
            msg = (
                f"{caller}: {place!r} has {count} {noun}, which do not divide evenly among"
                f' the {size} ranks of "tp". Use a multiple of {size}.'
            )
            raise ModelError(msg)

    def full_param(self, name: str) -> Any:
        """Return the full parameter, or None; for a split parameter, this is a collective."""
        param: torch.Tensor | None = getattr(self, name)
        if param is None or self.layers is None or name not in self.cuts:
            return param
        return self.layers.gather_param(param, self.cuts[name])


class Linear(Megatron):
    """A linear layer that adds its bias, or returns it.

    This class adds the bias itself. Megatron's code would lose the bias's gradient if the weight
    is frozen.
    """

    def __init__(
        self, input_size: int, output_size: int, *, skip_bias_add: bool, **options: Any
    ) -> None:
        """Create the layer with its full size."""
        self.gives_bias = skip_bias_add
        super().__init__(input_size, output_size, **options, skip_bias_add=True)

    def in_one_piece(self, input_: torch.Tensor) -> OutputAndBias:
        """Compute with the full, gathered weight and bias."""
        out = F.linear(input_, self.full_param("weight"))
        return self.with_bias(out, self.full_param("bias"))

    def with_bias(self, out: torch.Tensor, bias: torch.Tensor | None) -> OutputAndBias:
        """Add the bias to an output, or return it with the output if `skip_bias_add` is set."""
        if self.gives_bias or bias is None:
            return out, bias
        return out + bias, None


class Column(Linear, ColumnParallelLinear):
    """A linear layer that is split by output features."""

    word = "column"
    cuts = {"weight": 0, "bias": 0}  # noqa: RUF012 - the same for all instances

    def __init__(
        self, input_size: int, output_size: int, *, gather_output: bool, **options: Any
    ) -> None:
        """Create the layer with its full size."""
        if gather_output and options["skip_bias_add"]:
            msg = (
                "af.megatron.layers: a column layer with gather_output=True and"
                " skip_bias_add=True would return the features of all ranks, but the bias of"
                " only one rank. Leave out one of the two options."
            )
            raise ArgumentError(msg)
        self.gathers = gather_output
        super().__init__(input_size, output_size, **options)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_: torch.Tensor
    ) -> OutputAndBias:
        """Return this rank's output features (with `gather_output` all), and a bias or None."""
        layers = self.layers
        if layers is None or layers.is_whole:
            return self.in_one_piece(input_)
        output, bias = self.with_bias(*ColumnParallelLinear.forward(self, input_))
        if self.gathers:  # not with Megatron's gather, which only works on GPUs
            return layers.gather_features(output), bias
        layers.begin_region(self.place, training=self.training)
        return output, bias


class Row(Linear, RowParallelLinear):
    """A linear layer that is split by input features, and sums over the ranks."""

    word = "row"
    cuts = {"weight": 1}  # noqa: RUF012 - the same for all instances

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        input_is_parallel: bool,
        **options: Any,
    ) -> None:
        """Create the layer with its full size."""
        self.takes_some = input_is_parallel
        super().__init__(input_size, output_size, **options, input_is_parallel=True)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_: torch.Tensor
    ) -> OutputAndBias:
        """Return the sum of the ranks' outputs, and a bias or None."""
        layers = self.layers
        if layers is not None and self.takes_some:
            layers.looks.see(self.place, input_, is_whole=layers.is_whole)
        if layers is None or layers.is_whole:
            return self.in_one_piece(input_)
        if self.takes_some:
            layers.end_region()
        else:  # not with Megatron's scatter, which only works on GPUs
            input_ = layers.scatter_features(input_)
        return self.with_bias(*RowParallelLinear.forward(self, input_))


class Vocabulary(Megatron, VocabParallelEmbedding):
    """An embedding that is split by rows (words of the vocabulary)."""

    word = "vocabulary"
    cuts = {"weight": 0}  # noqa: RUF012 - the same for all instances

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the embedding vectors of all indices, each from the rank that has its row."""
        if self.layers is None or self.layers.is_whole:
            return F.embedding(input_, self.full_param("weight"))
        return VocabParallelEmbedding.forward(self, input_)


def config_of(world_size: int, dtype: torch.dtype) -> ModelParallelConfig:
    """Return a Megatron config for layers that do not use Megatron's global state."""
    return ModelParallelConfig(
        tensor_model_parallel_size=world_size,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
    )
