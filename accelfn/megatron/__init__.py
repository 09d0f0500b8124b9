# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's parallel layers for any model (extra `accelfn[megatron]`)."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from accelfn import World
from accelfn.errors import ArgumentError

if TYPE_CHECKING:
    from accelfn.megatron.parallel_layers import Column, Row, Vocabulary

_AS_TORCH = partial(nn.init.kaiming_uniform_, a=5**0.5)
"""Initializes a weight like torch's `nn.Linear`."""


@attrs.frozen
class Layers:
    """Creates Megatron-core's layers, which are split over the ranks along "tp".

    The layers run Megatron's forward and backward passes. A linear layer returns a pair of an
    output and a bias, so write `layer(x)[0]`. Each layer is created with its full size, so a state
    starts with the same values for any number of ranks. With `tensor_parallel()` in the setup,
    each rank then gets its shard.

    Attributes:
        config: Megatron's config for the layers.
    """

    config: Any

    def column(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        init_method: Callable[[torch.Tensor], object] = _AS_TORCH,
    ) -> "Column":
        """Create a linear layer that is split by output features.

        Args:
            input_size: the number of input features: inputs have the shape (..., input_size).
            output_size: the number of output features, a multiple of the number of ranks.
            bias: whether the layer has a bias, initialized to 0.
            gather_output: whether each rank gets the output features of all ranks.
            skip_bias_add: whether to return the bias instead of adding it.
            init_method: a function that initializes the weight in place.

        Raises:
            ArgumentError: gather_output and skip_bias_add are both True.
        """
        return _import_layers().Column(
            input_size,
            output_size,
            bias=bias,
            gather_output=gather_output,
            skip_bias_add=skip_bias_add,
            init_method=init_method,
            config=self.config,
        )

    def row(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        init_method: Callable[[torch.Tensor], object] = _AS_TORCH,
    ) -> "Row":
        """Create a linear layer that is split by input features, and sums over the ranks.

        Args:
            input_size: the number of input features, a multiple of the number of ranks.
            output_size: the number of output features: outputs have the shape
                (..., output_size), and are the same on all ranks.
            bias: whether the layer has a bias, initialized to 0 and added once.
            input_is_parallel: whether the input has only this rank's features, as after a column
                layer. Otherwise the input has all features.
            skip_bias_add: whether to return the bias instead of adding it.
            init_method: a function that initializes the weight in place.
        """
        return _import_layers().Row(
            input_size,
            output_size,
            bias=bias,
            input_is_parallel=input_is_parallel,
            skip_bias_add=skip_bias_add,
            init_method=init_method,
            config=self.config,
        )

    def vocabulary(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Callable[[torch.Tensor], object] = nn.init.normal_,
    ) -> "Vocabulary":
        """Create an embedding that is split by rows (words of the vocabulary).

        Args:
            num_embeddings: the number of rows, a multiple of the number of ranks.
            embedding_dim: the size of an embedding vector: outputs have the shape
                (..., embedding_dim).
            init_method: a function that initializes the weight in place.
        """
        return _import_layers().Vocabulary(
            num_embeddings, embedding_dim, init_method=init_method, config=self.config
        )


def layers(world: World, *, dtype: torch.dtype = torch.float32) -> Layers:
    """Return a `Layers` that creates Megatron-core's layers for the "tp" ranks of a world.

    `af.tensor_parallel()` splits these layers without a tensor-parallel plan. Modules with
    parameters between a column and a row layer still need a plan, such as
    `{"*.norm_of_heads": "replicated"}`. You do not need Megatron's `parallel_state`, because the
    world provides the process groups.

    Args:
        world: the world. Its ranks along "tp" share each layer.
        dtype: the dtype of the parameters.

    Law:
        Parameters, optimizer state and metrics are those of unsplit torch layers, up to
        rounding. Checkpoints and exports have the same tensors as those of torch layers.

    Cost:
        The cost of `tensor_parallel`. The first call imports Megatron-core, which takes seconds.

    Raises:
        ArgumentError: Megatron-core is not installed.

    References:
        Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models
        Using Model Parallelism".

    Example:
        >>> layers = af.megatron.layers(af.World.single(device="cpu"))
        >>> up, down = layers.column(8, 32), layers.row(32, 8)
        >>> down(torch.relu(up(torch.ones(2, 8))[0]))[0].shape
        torch.Size([2, 8])
    """
    if importlib.util.find_spec("megatron") is None:
        msg = "af.megatron.layers needs megatron-core: pip install 'accelfn[megatron]'."
        raise ArgumentError(msg)
    return Layers(_import_layers().config_of(world.along("tp").size, dtype))


def _import_layers() -> Any:
    from accelfn.megatron import parallel_layers  # noqa: PLC0415 - a slow import

    return parallel_layers
