# SPDX-License-Identifier: Apache-2.0
"""What breaks a step in its midst."""

import torch


class Refuses(torch.autograd.Function):
    """The identity, whose backward pass raises."""

    @staticmethod
    def forward(_ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(_ctx, _grad):
        raise ZeroDivisionError
