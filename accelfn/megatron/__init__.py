# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's parallel layers, as layers of any model (extra `accelfn[megatron]`)."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from accelfn.errors import ArgumentError
from accelfn.world import World

if TYPE_CHECKING:
    from accelfn.megatron.parallel_layers import Column, Row, Vocabulary

_AS_TORCH = partial(nn.init.kaiming_uniform_, a=5**0.5)
"""Draws a weight as torch's linear layers do."""


@attrs.frozen
class Layers:
    """Makes Megatron-core's layers, of which each rank along "tp" has a part.

    They compute as Megatron's do, whose forward and backward pass they run, and give an output
    and a bias: `layer(x)[0]`. Each is made whole, so that a state begins with the same for any
    number of ranks, and with `tensor_parallel()` in its setup each rank gets its part.

    Attributes:
        config: Megatron's settings of them.
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
        """Return a linear layer of whose output features each rank has some.

        Args:
            input_size: how many features it is given, (..., input_size).
            output_size: how many it makes, a multiple of the ranks.
            bias: whether it has one, which begins with 0.
            gather_output: gives each rank the features of all.
            skip_bias_add: gives the bias of its features on, for others to add.
            init_method: draws the weight.

        Raises:
            ArgumentError: it gathers features and gives the bias of some on.
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
        """Return a linear layer that takes the features of each rank, and adds up.

        Args:
            input_size: how many features all ranks have, a multiple of the ranks.
            output_size: how many it makes, (..., output_size), the same on all ranks.
            bias: whether it has one, which begins with 0, and is added once.
            input_is_parallel: each rank gives it some features, as behind a column layer;
                otherwise all give it all.
            skip_bias_add: gives the bias on, for others to add.
            init_method: draws the weight.
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
        """Return an embedding of whose words each rank has the vectors of some.

        Args:
            num_embeddings: how many words there are, a multiple of the ranks.
            embedding_dim: how many features each gets, (..., embedding_dim).
            init_method: draws the vectors.
        """
        return _import_layers().Vocabulary(
            num_embeddings, embedding_dim, init_method=init_method, config=self.config
        )


def layers(world: World, *, dtype: torch.dtype = torch.float32) -> Layers:
    """Return what makes Megatron-core's layers, for the ranks of a world along "tp".

    `af.tensor_parallel()` splits them, without a plan, for they say for themselves how; what
    stands between a column and a row layer is named in it as ever: `{"*.norm_of_heads":
    "replicated"}`. Megatron's `parallel_state` is not asked for: groups are those of the world.

    Args:
        world: whose ranks along "tp" share each layer.
        dtype: of their parameters.

    Law:
        Parameters, optimizer state and metrics are those of torch's layers, whole, up to
        rounding, and checkpoints and exports theirs, bitwise.

    Cost:
        That of `tensor_parallel`. The first call imports Megatron-core, which takes seconds.

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
        msg = (
            "af.megatron.layers: the layers are megatron-core's. Install it: pip install"
            " 'accelfn[megatron]'."
        )
        raise ArgumentError(msg)
    return Layers(_import_layers().config_of(world.along("tp").size, dtype))


def _import_layers() -> Any:
    from accelfn.megatron import parallel_layers  # noqa: PLC0415 - imported in seconds

    return parallel_layers
