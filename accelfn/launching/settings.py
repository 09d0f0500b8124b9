# SPDX-License-Identifier: Apache-2.0
"""The settings of one launch: which value of each option wins, and whether they go together.

The command line comes before the file, and the file before the default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from accelfn.errors import LaunchError
from accelfn.launching.machines import MAIN_PORT, Machines
from accelfn.launching.options import (
    COMMAND_LINE,
    DYNAMIC,
    NUMBERED,
    OPTIONS,
    check_axes,
    checked,
    flag,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT = "default"


@frozen
class Setting:
    """A value, and where it is from; None where nobody gave one."""

    value: Any
    source: str


@frozen
class Settings:
    """All settings of a launch."""

    by_name: dict[str, Setting] = field(repr=False)

    @classmethod
    def of(
        cls,
        given: Mapping[str, str | None],
        written: Mapping[str, Any],
        file: str,
        *,
        is_whole: bool = True,
    ) -> Settings:
        """Decide which value each setting has.

        Args:
            given: the command line's words; None where it has none.
            written: what a file has, as `read` returns it.
            file: its name.
            is_whole: whether they are all, and not a file that a command line completes.

        Raises:
            LaunchError: a value cannot be, values contradict each other, or one is missing.
        """
        found: dict[str, Setting] = {}
        for name, option in OPTIONS.items():
            text = given.get(name)
            if text is not None:
                value = checked(name, option.kind.from_text(text), COMMAND_LINE)
                found[name] = Setting(value, COMMAND_LINE)
            elif name in written:
                found[name] = Setting(written[name], file)
            else:
                found[name] = Setting(option.default, DEFAULT)
        settings = cls(found)
        settings._check_exclusive()
        settings._check_elastic()
        if is_whole:
            settings._check_whole()
        return settings

    def __getitem__(self, name: str) -> Any:
        """Return a setting's value."""
        return self.by_name[name].value

    def _given(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if self[name] is not None]

    def _check_exclusive(self) -> None:
        """Refuse settings that contradict each other."""
        numbered, dynamic = self._given(NUMBERED), self._given(DYNAMIC)
        if numbered and dynamic:
            msg = (
                f"{_shown(numbered)} and {_shown(dynamic)} exclude each other: machines"
                " have numbers, or get them where they meet."
            )
            raise LaunchError(msg)

    def _check_whole(self) -> None:
        """Refuse settings of which a part is missing, or has no effect."""
        numbered, dynamic = self._given(NUMBERED), self._given(DYNAMIC)
        count = self["num_machines"]
        if dynamic:
            self._require(dynamic, ("rdzv_endpoint", "rdzv_id"))
        elif isinstance(count, str):
            msg = f"--num-machines {count} needs --rdzv-endpoint, where they meet."
            raise LaunchError(msg)
        elif count > 1:
            self._require(numbered, ("machine_rank", "main_address"))
        elif numbered and self.by_name["num_machines"].source == DEFAULT:
            msg = f"{_shown(numbered)} without --num-machines has no effect; add it."
            raise LaunchError(msg)

    def _check_elastic(self) -> None:
        """Refuse what cannot be said of ranks that come and go."""
        beside = ("nproc", "num_machines", "max_restarts", "axes", *NUMBERED, *DYNAMIC)
        given = [name for name in beside if self[name] != OPTIONS[name].default]
        if self["elastic"] is not None and given:
            msg = (
                f"--elastic and {_shown(given)} exclude each other: ranks that come and go"
                " are MIN to MAX processes of one machine, without axes; and one that was"
                " killed is replaced, so that not all start again."
            )
            raise LaunchError(msg)

    @property
    def elastic(self) -> tuple[int | None, int | None]:
        """How many ranks may go on at least, and how many there are at most."""
        if self["elastic"] is None:
            return None, None
        least, most = self["elastic"].split(":")
        return int(least), int(most)

    def _require(self, given: list[str], names: tuple[str, ...]) -> None:
        missing = [name for name in names if name not in given]
        if missing:
            why = _shown(given) if given else f"--num-machines {self['num_machines']}"
            verb = "is" if len(missing) == 1 else "are"
            msg = f"{why}: {_shown(missing)} {verb} missing."
            raise LaunchError(msg)

    def machines(self) -> Machines:
        """Return how the machines of this launch meet.

        Raises:
            LaunchError: they cannot.
        """
        count = self["num_machines"]
        if self["rdzv_endpoint"] is not None:
            fewest, _, most = str(count).rpartition(":")
            host, _, port = self["rdzv_endpoint"].rpartition(":")
            return Machines.meeting_at(
                host,
                int(port),
                counts=(int(fewest or most), int(most)),
                join_seconds=self["join_timeout"],
                run_id=self["rdzv_id"],
            )
        if (self["machine_rank"] or 0) >= count:
            msg = (
                f"--machine-rank is {self['machine_rank']}, of {count} machines: expected 0"
                f" to {count - 1}."
            )
            raise LaunchError(msg)
        address, port = self["main_address"], self["main_port"]
        if count == 1 and address is None and port is None:
            return Machines()
        return Machines.meeting_at(
            address or "127.0.0.1",
            port or (0 if count == 1 else MAIN_PORT),
            counts=(count, count),
            join_seconds=self["join_timeout"],
            rank=self["machine_rank"] or 0,
        )

    def axes_of(self, size: int | None) -> str | None:
        """Return the axes of the ranks, as text.

        Args:
            size: how many ranks there will be; None where this machine cannot know it.

        Raises:
            LaunchError: they do not multiply to so many.
        """
        text, source = self["axes"], self.by_name["axes"].source
        if text is not None:
            check_axes(text, source, size)
        return text

    def lines(self) -> list[str]:
        """Return a line for each setting: its value, and where that is from."""
        rows = [
            (name, "" if each.value is None else str(each.value), each.source)
            for name, each in self.by_name.items()
        ]
        wide = max(len(value) for _, value, _ in rows)
        return [f"{name:14}{value:{wide}}  {source}" for name, value, source in rows]


def _shown(names: list[str]) -> str:
    return " and ".join(flag(name) for name in names)
