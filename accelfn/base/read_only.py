# SPDX-License-Identifier: Apache-2.0
"""Mappings that are shown, and say what to write where somebody would write into them."""

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, NoReturn, TypeVar

from accelfn.errors import CallError

V = TypeVar("V")


class ReadOnly(Mapping[str, V]):
    """A dict as it is, at each moment, which is not written into.

    Law: read, it is the dict, or raises as `check` does; what would change the dict raises.
    """

    __slots__ = ("_changes", "_check", "_name", "_values")

    def __init__(
        self,
        values: dict[str, V],
        name: str,
        changes: str,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Show a dict.

        Args:
            values: the dict.
            name: what the user's code calls this mapping.
            changes: what to write instead of writing into it.
            check: raises where the dict's tensors are no longer what it was shown for.
        """
        self._values, self._name, self._changes = values, name, changes
        self._check = check

    @property
    def _shown(self) -> dict[str, V]:
        self._check()
        return self._values

    def __getitem__(self, key: str) -> V:
        """Return an entry."""
        return self._shown[key]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._shown)

    def __reversed__(self) -> Iterator[str]:
        """Iterate over the names from the last."""
        return reversed(self._shown)

    def __len__(self) -> int:
        """Return how many entries there are."""
        return len(self._shown)

    def __contains__(self, key: object) -> bool:
        """Return whether a name is there."""
        return key in self._shown

    def keys(self) -> KeysView[str]:
        """Return the names, as a dict does."""
        return self._shown.keys()

    def values(self) -> ValuesView[V]:
        """Return the entries, as a dict does."""
        return self._shown.values()

    def items(self) -> ItemsView[str, V]:
        """Return both, as a dict does."""
        return self._shown.items()

    def copy(self) -> dict[str, V]:
        """Return a dict of its own with the same entries."""
        return dict(self._shown)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dict with the other's entries beside these, or in their place."""
        return {**self._shown, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dict with these beside the other's entries, or in their place."""
        return {**other, **self._shown}

    def __reduce__(self) -> tuple[Any, ...]:
        """Be copied, pickled and saved as torch's state dicts are, which any reader knows."""
        return OrderedDict, (), None, None, iter(self._shown.items())

    def __repr__(self) -> str:
        """Show the dict."""
        return repr(self._shown)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        msg = f"{self._name} is to be read, not written into: {self._changes}."
        raise CallError(msg)

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse
