# SPDX-License-Identifier: Apache-2.0
"""Settings of a launch: what each means, and which value wins, and why.

The command line comes before the file, and the file before the default. A file is
`accelfn.toml` in the current directory, or another that is named:

    [launch]
    nproc = 4
    max_restarts = 2
"""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from accelfn.errors import ArgumentError, LaunchError
from accelfn.launching.machines import JOIN_SECONDS, MAIN_PORT, Machines
from accelfn.world.axes import of_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FILE = "accelfn.toml"
TABLE = "launch"


@frozen
class Kind:
    """What values a setting may have, and how the command line spells them.

    Attributes:
        expects: the values, in words.
        accepts: whether one is among them.
        from_text: how the command line's word is read.
        check: raises an ArgumentError, that begins with its first argument, for a value that
            others refuse by sentences of their own.
    """

    expects: str
    accepts: Callable[[Any], bool]
    from_text: Callable[[str], Any] = str
    check: Callable[[str, Any], object] | None = None


def _is_whole(value: object, least: int, most: float = float("inf")) -> bool:
    return type(value) is int and least <= value <= most


def _is_range(value: object) -> bool:
    if not isinstance(value, str):
        return _is_whole(value, 1)
    parts = value.split(":")
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit()]
    return len(parts) == len(numbers) == 2 and 1 <= numbers[0] <= numbers[1]


def _number(text: str) -> int | float | str:
    """Return a number where the text is one, else the text, which is then refused."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _meets(word: str, backend: str) -> None:
    """Refuse torchrun's name of machines that have numbers, and do not meet."""
    if backend == "static":
        msg = f"{word}: give --machine-rank and --main-address instead."
        raise ArgumentError(msg)


_COUNT = Kind("a whole number, 1 or more", lambda v: _is_whole(v, 1), _number)
_INDEX = Kind("a whole number, 0 or more", lambda v: _is_whole(v, 0), _number)
_PORT = Kind("a port, 1 to 65535", lambda v: _is_whole(v, 1, 65535), _number)
_TEXT = Kind("some text", lambda v: isinstance(v, str) and v != "" and v.isprintable())
_AXES = Kind(
    _TEXT.expects, _TEXT.accepts, check=lambda word, text: of_text(word, text, None)
)
_BACKEND = Kind(_TEXT.expects, _TEXT.accepts, check=_meets)
_SECONDS = Kind(
    "a number of seconds, 1 to a million",
    lambda v: type(v) in (int, float) and 1 <= v <= 10**6,
    _number,
)
_NPROC = Kind(
    "a whole number, 1 or more, or 'auto'",
    lambda v: v == "auto" or _is_whole(v, 1),
    _number,
)
_SPAN = Kind(
    "'MIN:MAX', two whole numbers, 1 or more",
    lambda v: isinstance(v, str) and _is_range(v),
)
_MACHINES = Kind("a whole number, 1 or more, or 'FEWEST:MOST'", _is_range, _number)


@frozen
class Option:
    """A setting's meaning."""

    kind: Kind
    metavar: str
    help: str
    default: Any = None


COMMAND_LINE, DEFAULT = "command line", "default"

OPTIONS: dict[str, Option] = {
    "nproc": Option(
        _NPROC,
        "N",
        "how many processes on each machine; 'auto' is one for each GPU, or one"
        " without any",
        "auto",
    ),
    "num_machines": Option(
        _MACHINES,
        "N",
        "how many machines; with --rdzv-endpoint also FEWEST:MOST",
        1,
    ),
    "machine_rank": Option(_INDEX, "I", "this machine's number, from 0"),
    "main_address": Option(_TEXT, "HOST", "machine 0, as the other machines reach it"),
    "main_port": Option(
        _PORT, "PORT", f"of machine 0, free there (default {MAIN_PORT})"
    ),
    "rdzv_endpoint": Option(
        _TEXT, "HOST:PORT", "where machines meet that come and go, as with torchrun"
    ),
    "rdzv_backend": Option(
        _BACKEND, "NAME", "torchrun's name of how they meet (default c10d)"
    ),
    "rdzv_id": Option(_TEXT, "ID", "what tells this run from others that meet there"),
    "join_timeout": Option(
        _SECONDS, "S", "how long a machine waits for the others", JOIN_SECONDS
    ),
    "axes": Option(
        _AXES,
        "AXIS=N,…",
        "how the ranks share the work, such as dp_replicate=2,dp_shard=4; -1 is what is"
        " left",
    ),
    "max_restarts": Option(
        _INDEX, "N", "how often all ranks start again after one has failed", 0
    ),
    "elastic": Option(
        _SPAN,
        "MIN:MAX",
        "how many processes, of this machine alone: MAX are started, MIN may go on, by"
        " af.regroup, where others are killed, and each is replaced by one that comes in",
    ),
}
NUMBERED = ("machine_rank", "main_address", "main_port")
ELASTIC = ("rdzv_endpoint", "rdzv_backend", "rdzv_id")


def flag(name: str) -> str:
    """Return a setting's name on the command line."""
    return f"--{name.replace('_', '-')}"


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
        numbered, elastic = self._given(NUMBERED), self._given(ELASTIC)
        if numbered and elastic:
            msg = (
                f"{_shown(numbered)} and {_shown(elastic)} exclude each other: machines"
                " have numbers, or get them where they meet."
            )
            raise LaunchError(msg)

    def _check_whole(self) -> None:
        """Refuse settings of which a part is missing, or has no effect."""
        numbered, elastic = self._given(NUMBERED), self._given(ELASTIC)
        count = self["num_machines"]
        if elastic:
            self._require(elastic, ("rdzv_endpoint", "rdzv_id"))
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
        beside = ("nproc", "num_machines", "max_restarts", "axes", *NUMBERED, *ELASTIC)
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
            return Machines.elastic(
                backend=self["rdzv_backend"] or "c10d",
                endpoint=self["rdzv_endpoint"],
                run_id=self["rdzv_id"],
                counts=(int(fewest or most), int(most)),
                join_seconds=self["join_timeout"],
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
        return Machines.numbered(
            count=count,
            rank=self["machine_rank"] or 0,
            address=address or "127.0.0.1",
            port=port or (0 if count == 1 else MAIN_PORT),
            join_seconds=self["join_timeout"],
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
            _pass(lambda word, text: of_text(word, text, size), "axes", text, source)
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


def find(named: str | None) -> Path | None:
    """Return the file of settings that is named, or the current directory's, if it has one.

    Raises:
        LaunchError: the one that is named is not there.
    """
    file = Path(FILE if named is None else named)
    if file.is_file():
        return file
    if named is not None:
        msg = (
            f"there is no file {named!r} in {Path.cwd()}; `accelfn config` writes one."
        )
        raise LaunchError(msg)
    return None


def read(file: Path) -> dict[str, Any]:
    """Return the settings that a file has.

    Raises:
        LaunchError: it is no TOML, or has a name or a value that none may have.
    """
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        msg = f"{file} cannot be read: {error}."
        raise LaunchError(msg) from error
    for name, table in tables.items():
        if name == TABLE and not isinstance(table, dict):
            msg = (
                f"{file} has {TABLE!r}, which must be a table: a line [{TABLE}], and"
                " settings below it."
            )
            raise LaunchError(msg)
        if name != TABLE:
            near = f" Write it below [{TABLE}]." if name in OPTIONS else ""
            msg = f"{file} has {name!r}, of which nothing is known.{near or _near(name, [TABLE])}"
            raise LaunchError(msg)
    settings: dict[str, Any] = tables.get(TABLE, {})
    return {name: checked(name, value, str(file)) for name, value in settings.items()}


def checked(name: str, value: Any, source: str) -> Any:
    """Return a setting's value.

    Raises:
        LaunchError: there is no such setting, or it cannot have it.
    """
    option = OPTIONS.get(name)
    if option is None:
        msg = f"{source} has {name!r}, which is no setting.{_near(name, list(OPTIONS))}"
        raise LaunchError(msg)
    if not option.kind.accepts(value):
        msg = f"{_where(name, source)} is {value!r}; give {option.kind.expects}."
        raise LaunchError(msg)
    if option.kind.check is not None:
        _pass(option.kind.check, name, value, source)
    return value


def _pass(
    check: Callable[[str, Any], object], name: str, value: Any, source: str
) -> None:
    """Check a setting by others' sentences, and refuse it as one of a launch."""
    try:
        check(f"{_where(name, source)} {value}", value)
    except ArgumentError as error:
        raise LaunchError(str(error)) from error


def _where(name: str, source: str) -> str:
    return flag(name) if source == COMMAND_LINE else f"{source}: {name}"


def _near(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), names, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(names)}."


def spelt(value: Any) -> str:
    """Return a value as TOML has it, which of these is JSON; but JSON's escapes are not TOML's."""
    return json.dumps(value, ensure_ascii=False)
