# SPDX-License-Identifier: Apache-2.0
"""`Gathered`: whether a loss computes with nothing but parameters that stage 3 has gathered."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

from accelfn.errors import LossError

NOT_GATHERED = (
    "The loss used {which} that DeepSpeed had not gathered, of which this rank has a part and"
    " no values: at stage 3 it gathers the parameters of a module that is called, and those that"
    " are taken by name, as model.head.weight. Take them by name, not from model.parameters() or"
    " state_dict(); a penalty of weights is the optimizer's weight_decay; or take stage 2."
)
_ASKED = frozenset(
    {
        *("__get__", "__set__", "__delete__", "__hash__", "__repr__", "__eq__"),
        *("numel", "nelement", "size", "dim", "ndimension", "stride", "element_size"),
        *("is_floating_point", "is_complex", "register_hook", "requires_grad_"),
        *("data_ptr", "type", "__format__", "get_device", "is_contiguous"),
    }
)
"""What does not compute: models ask for dtypes and devices, and DeepSpeed's hooks for more."""


class Gathered(TorchFunctionMode):
    """Refuses to compute with parameters that are not there: a sum of them would be 0.

    It costs some microseconds a call of torch, and so looks at the first pass of a loss alone.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        """Take the parameters' names by their ids."""
        super().__init__()
        self._names = names

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch.

        Raises:
            LossError: it would compute with a parameter that is not there.
        """
        options = kwargs or {}
        if getattr(func, "__name__", "") not in _ASKED:
            for value in _leaves((*args, *options.values())):
                name = self._names.get(id(value))
                if name is not None and value.ds_status.name == "NOT_AVAILABLE":
                    msg = NOT_GATHERED.format(which=f"the parameter {name!r}")
                    raise LossError(msg)
        return func(*args, **options)


def _leaves(values: tuple[Any, ...]) -> Iterator[Any]:
    """Yield arguments, and what is in lists of them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value
