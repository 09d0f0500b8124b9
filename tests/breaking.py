# SPDX-License-Identifier: Apache-2.0
"""Functions and transforms that raise an error in the middle of a step."""

import torch


class Refuses(torch.autograd.Function):
    """The identity, whose backward pass raises."""

    @staticmethod
    def forward(_ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(_ctx, _grad):
        raise ZeroDivisionError
