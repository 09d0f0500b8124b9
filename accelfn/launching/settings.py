# SPDX-License-Identifier: Apache-2.0
"""The settings of a launch, from the command line, a settings file and defaults.

The command line overrides the file, and the file overrides the defaults.
"""

from __future__ import annotations

import difflib
import os
import stat
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomlkit
from attrs import field, frozen

from accelfn.errors import ArgumentError, LaunchError
from accelfn.launching.machines import JOIN_SECONDS, MAIN_PORT, Machines
from accelfn.plug import arguments, axes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# The options of a launch: names, meanings and valid values.


@frozen
class Kind:
    """The valid values of a setting, and their spelling on the command line.

    Attributes:
        expects: the valid values, in words.
        accepts: returns whether a value is valid.
    """

    expects: str
    accepts: Callable[[Any], bool]

    def from_text(self, text: str) -> Any:
        """Parse a word of the command line."""
        number = _number(text)
        return text if self.accepts(text) and not self.accepts(number) else number


def _is_whole(value: object, least: int, most: float = float("inf")) -> bool:
    return type(value) is int and least <= value <= most


def _parse_count(text: str) -> int:
    """Parse a count; return -1 if the text is not a number, or has too many digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


def _is_range(value: object, most: int) -> bool:
    if not isinstance(value, str):
        return _is_whole(value, 1, most)
    numbers = [_parse_count(part) for part in value.split(":")]
    return len(numbers) == 2 and 1 <= numbers[0] <= numbers[1] <= most


def _is_endpoint(value: object) -> bool:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return host != "" and _is_whole(_parse_count(port), 1, _LAST_PORT)


def _number(text: str) -> int | float | str:
    """Parse a number; return other text unchanged, so that a check rejects it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# more than any machine or run needs, and few enough to survive a mistake
MOST_PROCESSES, _MOST, _LAST_PORT = 4096, 10**6, 65535
_INDEX = Kind(
    "a whole number, 0 or more, a million at most", lambda v: _is_whole(v, 0, _MOST)
)
_PORT = Kind("a port, 1 to 65535", lambda v: _is_whole(v, 1, _LAST_PORT))
_ENDPOINT = Kind("HOST:PORT, a port from 1 to 65535", _is_endpoint)
_TEXT = Kind("some text", lambda v: isinstance(v, str) and v != "" and v.isprintable())
_SECONDS = Kind(
    "a number of seconds, 1 to a million",
    lambda v: type(v) in (int, float) and 1 <= v <= _MOST,
)
_NPROC = Kind(
    f"a whole number, 1 or more, or 'auto'; {MOST_PROCESSES} at most",
    lambda v: v == "auto" or _is_whole(v, 1, MOST_PROCESSES),
)
_SPAN = Kind(
    f"'MIN:MAX', two whole numbers, 1 or more, {MOST_PROCESSES} at most",
    lambda v: isinstance(v, str) and _is_range(v, MOST_PROCESSES),
)
_MACHINES = Kind(
    "a whole number, 1 or more, or 'FEWEST:MOST'; a million at most",
    lambda v: _is_range(v, _MOST),
)


@frozen
class Option:
    """A setting's meaning."""

    kind: Kind
    metavar: str
    help: str
    default: Any = None


COMMAND_LINE = "command line"

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
        _ENDPOINT,
        "HOST:PORT",
        "where machines that come and go meet by torch's dynamic rendezvous, which"
        " unpickles what it finds there: whoever can reach this port, such as another user"
        " of the machine, runs code as you",
    ),
    "rdzv_id": Option(_TEXT, "ID", "what tells this run from others that meet there"),
    "join_timeout": Option(
        _SECONDS, "S", "how long a machine waits for the others", JOIN_SECONDS
    ),
    "axes": Option(
        _TEXT,
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
DYNAMIC = ("rdzv_endpoint", "rdzv_id")


def flag(name: str) -> str:
    """Return a setting's name on the command line."""
    return f"--{name.replace('_', '-')}"


def check_setting(name: str, value: Any, source: str) -> Any:
    """Check a setting's value, and return the value.

    Raises:
        LaunchError: the name is unknown, or the value is invalid.
    """
    option = OPTIONS.get(name)
    if option is None:
        msg = f"{source} has {name!r:.80}, which is no setting.{suggest_name(name, list(OPTIONS))}"
        raise LaunchError(msg)
    if not option.kind.accepts(value):
        msg = f"{_where(name, source)} is {value!r:.80}; give {option.kind.expects}."
        raise LaunchError(msg)
    if name == "axes":
        check_axes(value, source, None)
    return value


def check_axes(text: str, source: str, size: int | None) -> None:
    """Reject axes that a world of this size would reject."""
    try:
        axes.parse_axes(f"{_where('axes', source)} {text}", text, size)
    except ArgumentError as error:
        raise LaunchError(str(error)) from error


def _where(name: str, source: str) -> str:
    return flag(name) if source == COMMAND_LINE else f"{source}: {name}"


def suggest_name(name: str, names: list[str]) -> str:
    """Return a sentence with the nearest known name, or with all known names."""
    close = difflib.get_close_matches(name.replace("-", "_"), names, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(names)}."


DEFAULT = "default"


@frozen
class Setting:
    """A value and its source; None if the setting has no value."""

    value: Any
    source: str


@frozen
class Settings:
    """All settings of a launch."""

    by_name: dict[str, Setting] = field(repr=False)

    @classmethod
    def of(
        cls,
        options: Mapping[str, str | None],
        table: Mapping[str, Any],
        file: str,
        *,
        is_whole: bool = True,
    ) -> Settings:
        """Combine the command line, a file and the defaults.

        Args:
            options: values of the command line; None for options that it leaves out.
            table: values of a file, as `read` returns them.
            file: the name of the file.
            is_whole: whether these are all settings; False for a file that a command line
                will complete.

        Raises:
            LaunchError: a value is invalid or missing, or values contradict each other.
        """
        by_name: dict[str, Setting] = {}
        for name, option in OPTIONS.items():
            text = options.get(name)
            if text is not None:
                value = check_setting(name, option.kind.from_text(text), COMMAND_LINE)
                by_name[name] = Setting(value, COMMAND_LINE)
            elif name in table:
                by_name[name] = Setting(table[name], file)
            else:
                by_name[name] = Setting(option.default, DEFAULT)
        settings = cls(by_name)
        settings._check_exclusive()
        settings._check_elastic()
        if is_whole:
            settings._check_whole()
        return settings

    def __getitem__(self, name: str) -> Any:
        """Return a setting's value."""
        return self.by_name[name].value

    def _names_set(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if self[name] is not None]

    def _check_exclusive(self) -> None:
        """Reject settings that contradict each other."""
        static, dynamic = self._names_set(NUMBERED), self._names_set(DYNAMIC)
        if static and dynamic:
            msg = (
                f"{_join_flags(static)} and {_join_flags(dynamic)} exclude each other: machines"
                " have numbers, or get them where they meet."
            )
            raise LaunchError(msg)

    def _check_whole(self) -> None:
        """Reject settings that are incomplete or have no effect."""
        static, dynamic = self._names_set(NUMBERED), self._names_set(DYNAMIC)
        count = self["num_machines"]
        if dynamic:
            self._require(dynamic, ("rdzv_endpoint", "rdzv_id"))
        elif isinstance(count, str):
            msg = f"--num-machines {count} needs --rdzv-endpoint, where they meet."
            raise LaunchError(msg)
        elif count > 1:
            self._require(static, ("machine_rank", "main_address"))
        elif static and self.by_name["num_machines"].source == DEFAULT:
            msg = f"{_join_flags(static)} without --num-machines has no effect; add it."
            raise LaunchError(msg)

    def _check_elastic(self) -> None:
        """Reject settings that an elastic run cannot have."""
        rivals = ("nproc", "num_machines", "max_restarts", "axes", *NUMBERED, *DYNAMIC)
        names = [name for name in rivals if self[name] != OPTIONS[name].default]
        if self["elastic"] is not None and names:
            msg = (
                f"--elastic and {_join_flags(names)} exclude each other: ranks that come and go"
                " are MIN to MAX processes of one machine, without axes; and one that was"
                " killed is replaced, so that not all start again."
            )
            raise LaunchError(msg)

    @property
    def elastic(self) -> tuple[int | None, int | None]:
        """The minimum and the maximum number of ranks of an elastic run."""
        if self["elastic"] is None:
            return None, None
        least, most = self["elastic"].split(":")
        return int(least), int(most)

    def _require(self, flags: list[str], names: tuple[str, ...]) -> None:
        missing = [name for name in names if name not in flags]
        if missing:
            why = (
                _join_flags(flags)
                if flags
                else f"--num-machines {self['num_machines']}"
            )
            verb = "is" if len(missing) == 1 else "are"
            msg = f"{why}: {_join_flags(missing)} {verb} missing."
            raise LaunchError(msg)

    def machines(self) -> Machines:
        """Return the machines of this launch, and their rendezvous.

        Raises:
            LaunchError: the machines cannot meet.
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
            size: the number of ranks; None if this machine cannot know the number.

        Raises:
            LaunchError: the axes do not multiply to the number of ranks.
        """
        text, source = self["axes"], self.by_name["axes"].source
        if text is not None:
            check_axes(text, source, size)
        return text

    def lines(self) -> list[str]:
        """Return a line for each setting, with its value and source."""
        rows = [
            (name, "" if s.value is None else str(s.value), s.source)
            for name, s in self.by_name.items()
        ]
        wide = max(len(value) for _, value, _ in rows)
        return [f"{name:14}{value:{wide}}  {source}" for name, value, source in rows]


def _join_flags(names: list[str]) -> str:
    return " and ".join(flag(name) for name in names)


# The settings file: `accelfn.toml` in the current directory, or a named file.


FILE = "accelfn.toml"
TABLE = "launch"
_MOST_BYTES, _DEEPEST = 2**16, 100
_MEETS = ("main_address", "rdzv_endpoint")


def find(named: str | None) -> Path | None:
    """Return the named settings file, or that of the current directory, if any.

    Raises:
        LaunchError: the named file does not exist.
    """
    file = Path(FILE if named is None else named)
    if arguments.is_file(file):
        return file
    if named is not None:
        msg = (
            f"there is no file {named!r} in {Path.cwd()}; `accelfn config` writes one."
        )
        raise LaunchError(msg)
    return None


def read(file: Path) -> dict[str, Any]:
    """Read the settings of a file.

    Raises:
        LaunchError: the file is not TOML, or has an unknown name or a wrong value; or the file
            sets the endpoint and another user can write to it.
    """
    try:
        with file.open("rb") as stream:
            about = os.fstat(stream.fileno())
            tables = tomllib.loads(_decode_bounded(stream.read(_MOST_BYTES + 1)))
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
            hint = f" Write it below [{TABLE}]." if name in OPTIONS else ""
            hint = hint or suggest_name(name, [TABLE])
            msg = f"{file} has {name!r:.80}, of which nothing is known.{hint}"
            raise LaunchError(msg)
    settings: dict[str, Any] = tables.get(TABLE, {})
    named = [name for name in _MEETS if name in settings]
    if named and (about.st_uid != os.getuid() or about.st_mode & stat.S_IWOTH):
        msg = (
            f"{file} has {named[0]!r}, and another user owns it or can write to it: that"
            " user would say where this run connects. Read it, copy it, and name your copy:"
            " accelfn launch --config COPY."
        )
        raise LaunchError(msg)
    return {
        name: check_setting(name, value, str(file)) for name, value in settings.items()
    }


def _decode_bounded(data: bytes) -> str:
    """Decode a text of limited length and depth: the parser's memory grows with both."""
    brackets = data.count(b"[") + data.count(b"{")
    dots = max(line.count(b".") for line in data.split(b"\n"))
    if len(data) > _MOST_BYTES or brackets + dots > _DEEPEST:
        msg = (
            f"it has more than {_MOST_BYTES} bytes, or more than {_DEEPEST} brackets and dots"
            " in a key; no settings are so long or deep"
        )
        raise ValueError(msg)
    return data.decode()


# `accelfn config`: write the file of settings, from answers or from the command line.


def configure(
    named: str | None,
    assignments: Sequence[str],
    *,
    default: bool,
    ask: Callable[[str], str] | None = None,
) -> Path:
    """Write a file of settings, and return its path.

    An existing file keeps its other settings and its comments.

    Args:
        named: the file; default `accelfn.toml` in the current directory.
        assignments: settings as `name=value`; `name=` removes a setting.
        default: whether to write the defaults. With defaults or assignments, accelfn asks no
            questions.
        ask: shows a question and returns the answer; default on the terminal.

    Raises:
        LaunchError: a setting is invalid, or settings contradict each other; nothing is
            written.
    """
    file = Path(FILE if named is None else named)
    table = read(file) if arguments.is_file(file) else {}
    if default:
        defaults = {n: o.default for n, o in OPTIONS.items() if o.default is not None}
        table = {**defaults, **table}
    for assignment in assignments:
        _assign(table, assignment)
    if not assignments and not default:
        for name in _questions(table):
            _answer(table, name, ask or _terminal())
    Settings.of({}, table, str(file), is_whole=False)
    in_order = {name: table[name] for name in OPTIONS if name in table}
    text = file.read_text(encoding="utf-8") if arguments.is_file(file) else ""
    part = file.with_name(f".{file.name}.part")
    try:
        part.write_text(edit_settings(text, in_order), encoding="utf-8")
        part.replace(file)
    except OSError as error:
        msg = f"{file} cannot be written: {error}."
        raise LaunchError(msg) from error
    return file


def edit_settings(text: str, settings: Mapping[str, Any]) -> str:
    """Return a file's text with new settings; keeps comments, order and blank lines."""
    document = tomlkit.parse(text)
    table: Any = document.setdefault(TABLE, tomlkit.table())
    for name in [key for key in table if key not in settings]:
        table.remove(name)
    for name, value in settings.items():
        if name not in table or table[name] != value:
            table[name] = value
    return tomlkit.dumps(document)


def _assign(table: dict[str, Any], text: str) -> None:
    name, equals, value = text.partition("=")
    if not equals:
        msg = f"--set {text!r}; write it as NAME=VALUE."
        raise LaunchError(msg)
    name = name.strip().replace("-", "_")
    if name in OPTIONS and not value:
        table.pop(name, None)
        return
    kind = OPTIONS[name].kind if name in OPTIONS else None
    setting = value if kind is None else kind.from_text(value)
    table[name] = check_setting(name, setting, "--set")


def _questions(table: dict[str, Any]) -> Iterator[str]:
    """Yield the names of settings to ask for, depending on earlier answers."""
    yield "nproc"
    yield "num_machines"
    if table.get("num_machines", 1) == 1:
        for name in (*NUMBERED, *DYNAMIC):
            table.pop(name, None)
    else:
        # each machine has its own number, from its command line
        is_dynamic = isinstance(table["num_machines"], str) or "rdzv_endpoint" in table
        yield from DYNAMIC if is_dynamic else ("main_address", "main_port")
    yield "max_restarts"


def _answer(table: dict[str, Any], name: str, ask: Callable[[str], str]) -> None:
    """Ask until the answer is valid; an empty answer keeps the current value."""
    option = OPTIONS[name]
    current = table.get(name, option.default)
    default = "none" if current is None else current
    while True:
        text = ask(f"{name}: {option.help} [{default}] ").strip()
        try:
            if text:
                current = check_setting(name, option.kind.from_text(text), "the answer")
        except LaunchError as error:
            sys.stderr.write(f"{error}\n")
            continue
        if current is not None:
            table[name] = current
        return


def _terminal() -> Callable[[str], str]:
    if not sys.stdin.isatty():
        msg = (
            "there is no terminal to ask on; give --default, or --set NAME=VALUE for what"
            " is to be written."
        )
        raise LaunchError(msg)

    def ask(question: str) -> str:
        try:
            return input(question)
        except EOFError:
            msg = "the answers ended; nothing is written."
            raise LaunchError(msg) from None

    return ask
