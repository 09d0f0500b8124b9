# SPDX-License-Identifier: Apache-2.0
"""The settings of a launch, from the command line, a settings file and defaults.

The command line overrides the file, and the file overrides the defaults.
"""

import difflib
import os
import stat
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from attrs import field, frozen

from accelfn.errors import ArgumentError, LaunchError
from accelfn.launching.machines import JOIN_SECONDS, MAIN_PORT, Machines
from accelfn.plug import arguments, axes

# The options of `accelfn launch`: names, help texts and valid values.


@frozen
class Kind:
    """The valid values of a setting.

    Attributes:
        expects: a phrase for error messages: the values that are valid.
        accepts: a function that returns whether a value is valid.
    """

    expects: str
    accepts: Callable[[Any], bool]


def _is_whole(value: object, least: int, most: float = float("inf")) -> bool:
    return type(value) is int and least <= value <= most


def _parse_count(text: str) -> int:
    """Parse a whole number; return -1 if the text is not one, or has 10 digits or more."""
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
    """Parse a number; return any other text unchanged, so that a later check rejects it."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


# Limits that are larger than any run needs. They keep a typing mistake from starting too many
# processes.
MOST_PROCESSES, _MOST, _LAST_PORT = 4096, 10**6, 65535
_INDEX = Kind("a whole number from 0 to a million", lambda v: _is_whole(v, 0, _MOST))
_PORT = Kind("a port from 1 to 65535", lambda v: _is_whole(v, 1, _LAST_PORT))
_ENDPOINT = Kind("HOST:PORT, with a port from 1 to 65535", _is_endpoint)
_TEXT = Kind("some text", lambda v: isinstance(v, str) and v != "" and v.isprintable())
_SECONDS = Kind(
    "a number of seconds from 1 to a million",
    lambda v: type(v) in (int, float) and 1 <= v <= _MOST,
)
_NPROC = Kind(
    f"a whole number from 1 to {MOST_PROCESSES}, or 'auto'",
    lambda v: v == "auto" or _is_whole(v, 1, MOST_PROCESSES),
)
_SPAN = Kind(
    f"'MIN:MAX', two whole numbers from 1 to {MOST_PROCESSES}",
    lambda v: isinstance(v, str) and _is_range(v, MOST_PROCESSES),
)
_MACHINES = Kind(
    "a whole number from 1 to a million, or two as 'FEWEST:MOST'",
    lambda v: _is_range(v, _MOST),
)


@frozen
class Option:
    """A setting: its valid values, its placeholder and help text, and its default."""

    kind: Kind
    metavar: str
    help: str
    default: Any = None


COMMAND_LINE = "command line"

OPTIONS: dict[str, Option] = {
    "nproc": Option(
        _NPROC,
        "N",
        "number of processes on each machine; 'auto' means one for each GPU, or one"
        " process without a GPU",
        "auto",
    ),
    "num_machines": Option(
        _MACHINES, "N", "number of machines; with --rdzv-endpoint also FEWEST:MOST", 1
    ),
    "machine_rank": Option(_INDEX, "I", "this machine's number, from 0"),
    "main_address": Option(_TEXT, "HOST", "address of machine 0 for other machines"),
    "main_port": Option(
        _PORT, "PORT", f"a free port of machine 0 (default {MAIN_PORT})"
    ),
    "rdzv_endpoint": Option(
        _ENDPOINT,
        "HOST:PORT",
        "address of torch's dynamic rendezvous, where machines can join and leave; it"
        " unpickles data, so anyone who can reach this port, such as another user of the"
        " machine, can run code as you",
    ),
    "rdzv_id": Option(_TEXT, "ID", "name of this run among the runs at that address"),
    "join_timeout": Option(
        _SECONDS, "S", "seconds that a machine waits for the others", JOIN_SECONDS
    ),
    "axes": Option(
        _TEXT,
        "AXIS=N,…",
        "how the ranks share the work, such as dp_replicate=2,dp_shard=4; -1 means all"
        " remaining ranks",
    ),
    "max_restarts": Option(
        _INDEX, "N", "how often all ranks are restarted after a rank fails", 0
    ),
    "elastic": Option(
        _SPAN,
        "MIN:MAX",
        "start MAX processes, on this machine only; if processes are killed, the run"
        " continues by af.regroup with at least MIN, and new processes replace them",
    ),
}
NUMBERED = ("machine_rank", "main_address", "main_port")
DYNAMIC = ("rdzv_endpoint", "rdzv_id")


def flag(name: str) -> str:
    """Return a setting's option on the command line, such as `--max-restarts`."""
    return f"--{name.replace('_', '-')}"


def check_setting(name: str, value: Any, source: str) -> Any:
    """Check a setting's name and value, and return the value unchanged.

    Raises:
        LaunchError: the name is unknown, or the value is invalid.
    """
    option = OPTIONS.get(name)
    if option is None:
        hint = suggest_name(name, list(OPTIONS))
        msg = f"{source}: {name!r:.80} is not a setting.{hint}"
        raise LaunchError(msg)
    if not option.kind.accepts(value):
        place, expects = _where(name, source), option.kind.expects
        msg = f"{place} is {value!r:.80}; expected {expects}."
        raise LaunchError(msg)
    if name == "axes":
        check_axes(value, source, None)
    return value


def parse_setting(name: str, text: str, source: str) -> Any:
    """Return a setting's value: a number, or the text if only the text is valid.

    Raises:
        LaunchError: the name is unknown, or the value is invalid.
    """
    value, option = _number(text), OPTIONS.get(name)
    if option and option.kind.accepts(text) and not option.kind.accepts(value):
        value = text
    return check_setting(name, value, source)


def check_axes(text: str, source: str, size: int | None) -> None:
    """Raise `LaunchError` for axes that a world of `size` ranks would reject."""
    try:
        axes.parse_axes(f"{_where('axes', source)} {text}", text, size)
    except ArgumentError as error:
        raise LaunchError(str(error)) from error


def _where(name: str, source: str) -> str:
    return flag(name) if source == COMMAND_LINE else f"{source}: {name}"


def suggest_name(name: str, names: list[str]) -> str:
    """Return a hint for an unknown name: the most similar name, or all valid names."""
    close = difflib.get_close_matches(name.replace("-", "_"), names, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(names)}."


DEFAULT = "default"


@frozen
class Setting:
    """The value of a setting (None without a value), and its source: a file, for example."""

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
    ) -> Self:
        """Combine the settings of the command line, of a file, and the defaults.

        Args:
            options: the options of the command line; None for an option that is not there.
            table: the settings of a file, as `read` returns them.
            file: the name of the file.
            is_whole: whether to raise if a setting is missing. False for a file, because the
                command line can add settings later.

        Raises:
            LaunchError: a value is invalid or missing, or settings contradict each other.
        """
        by_name = {n: Setting(option.default, DEFAULT) for n, option in OPTIONS.items()}
        by_name |= {name: Setting(value, file) for name, value in table.items()}
        for name in OPTIONS:
            text = options.get(name)
            if text is not None:
                value = parse_setting(name, text, COMMAND_LINE)
                by_name[name] = Setting(value, COMMAND_LINE)
        settings = cls(by_name)
        settings._check(is_whole=is_whole)
        return settings

    def __getitem__(self, name: str) -> Any:
        """Return a setting's value."""
        return self.by_name[name].value

    def _names_set(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if self[name] is not None]

    def _check(self, *, is_whole: bool) -> None:
        """Raise if settings exclude each other, or if `is_whole` and settings are missing."""
        static, dynamic = self._names_set(NUMBERED), self._names_set(DYNAMIC)
        if static and dynamic:
            msg = (
                f"{_join_flags(static)} cannot be used with {_join_flags(dynamic)}: either"
                " you number the machines, or the rendezvous numbers them."
            )
            raise LaunchError(msg)
        rivals = [name for name in OPTIONS if name not in ("elastic", "join_timeout")]
        names = [name for name in rivals if self[name] != OPTIONS[name].default]
        if self["elastic"] is not None and names:
            msg = (
                f"--elastic cannot be used with {_join_flags(names)}: an elastic run has MIN to"
                " MAX processes on one machine, without axes, and replaces killed processes"
                " instead of restarting all ranks."
            )
            raise LaunchError(msg)
        count = self["num_machines"]
        required_names: tuple[str, ...] = ()
        if dynamic:
            required_names = DYNAMIC
        elif isinstance(count, str):
            required_names = ("rdzv_endpoint",)
        elif count > 1:
            required_names = ("machine_rank", "main_address")
        elif static and self.by_name["num_machines"].source == DEFAULT:
            # without it, these settings have no effect
            required_names = ("num_machines",)
        missing = [name for name in required_names if name not in static + dynamic]
        if missing and is_whole:
            flags = dynamic or ([] if isinstance(count, str) else static)
            subject = _join_flags(flags) if flags else f"--num-machines {count}"
            msg = f"{subject} needs {_join_flags(missing)} too."
            raise LaunchError(msg)

    @property
    def elastic(self) -> tuple[int | None, int | None]:
        """The minimum and maximum number of ranks of an elastic run; (None, None) otherwise."""
        if self["elastic"] is None:
            return None, None
        least, most = self["elastic"].split(":")
        return int(least), int(most)

    def machines(self) -> Machines:
        """Return the machines of this launch, and the address where they connect.

        Raises:
            LaunchError: the machine's number or an address is not valid.
        """
        count, join_seconds = self["num_machines"], self["join_timeout"]
        if self["rdzv_endpoint"] is not None:
            fewest, _, most = str(count).rpartition(":")
            counts = int(fewest or most), int(most)
            host, _, port = self["rdzv_endpoint"].rpartition(":")
            return Machines.meeting_at(
                host, int(port), counts, join_seconds, run_id=self["rdzv_id"]
            )
        rank = self["machine_rank"] or 0
        if rank >= count:
            msg = f"--machine-rank is {rank}; with {count} machines, expected 0 to {count - 1}."
            raise LaunchError(msg)
        address, port = self["main_address"], self["main_port"]
        if count == 1 and address is None and port is None:
            return Machines()
        host, port = address or "127.0.0.1", port or (0 if count == 1 else MAIN_PORT)
        return Machines.meeting_at(host, port, (count, count), join_seconds, rank=rank)

    def axes_of(self, size: int | None) -> str | None:
        """Return the axes of the ranks as text, such as "dp_shard=4"; None without axes.

        Args:
            size: the number of ranks; None if this machine does not know the number.

        Raises:
            LaunchError: the product of the axes' sizes is not the number of ranks.
        """
        if self["axes"] is not None:
            check_axes(self["axes"], self.by_name["axes"].source, size)
        return self["axes"]

    def lines(self) -> list[str]:
        """Return one line of text for each setting: its name, value and source."""
        rows = [
            (name, "" if s.value is None else str(s.value), s.source)
            for name, s in self.by_name.items()
        ]
        wide = max(len(value) for _, value, _ in rows)
        return [f"{name:14}{value:{wide}}  {source}" for name, value, source in rows]


def _join_flags(names: list[str]) -> str:
    return " and ".join(flag(name) for name in names)


# Read the settings file: `accelfn.toml` in the current directory, or the file of `--config`.


FILE = "accelfn.toml"
TABLE = "launch"
_MOST_BYTES, _DEEPEST = 2**16, 100


def find(named: str | None) -> Path | None:
    """Return the path of the settings file; None without a settings file.

    Args:
        named: the file that the user named; None for `accelfn.toml` in the current directory.

    Raises:
        LaunchError: the named file does not exist.
    """
    file = Path(FILE if named is None else named)
    if arguments.is_file(file):
        return file
    if named is not None:
        msg = f"there is no file {named!r} in {Path.cwd()}; write it: accelfn config."
        raise LaunchError(msg)
    return None


def read(file: Path) -> dict[str, Any]:
    """Read the settings of a file, by name.

    Raises:
        LaunchError: the file is not valid TOML, or has an unknown name or an invalid value. Or
            the file sets an address, and another user owns the file or can write to it.
    """
    try:
        with file.open("rb") as stream:
            about = os.fstat(stream.fileno())
            tables = tomllib.loads(_decode_bounded(stream.read(_MOST_BYTES + 1)))
    except (OSError, ValueError) as error:
        msg = f"{file} cannot be read: {error}."
        raise LaunchError(msg) from error
    settings: Any = tables.pop(TABLE, {})
    for name in tables:
        below = f" Write it below [{TABLE}]." if name in OPTIONS else ""
        hint = below or suggest_name(name, [TABLE])
        msg = f"{file} has {name!r:.80}, which accelfn does not know.{hint}"
        raise LaunchError(msg)
    if not isinstance(settings, dict):
        msg = f"{file} has {TABLE!r}, which must be a table: a line [{TABLE}] and settings below."
        raise LaunchError(msg)
    named = [name for name in ("main_address", "rdzv_endpoint") if name in settings]
    if named and (about.st_uid != os.getuid() or about.st_mode & stat.S_IWOTH):
        msg = (
            f"{file} sets {named[0]!r}, and another user owns the file or can write to it. That"
            " user could choose where this run connects. Check the file, copy it, and pass your"
            " copy: accelfn launch --config COPY."
        )
        raise LaunchError(msg)
    return {n: check_setting(n, value, str(file)) for n, value in settings.items()}


def _decode_bounded(data: bytes) -> str:
    """Decode a file's bytes; raise if the text is too long or too deeply nested.

    The memory that the TOML parser needs grows with the length and the depth.
    """
    brackets = data.count(b"[") + data.count(b"{")
    dots = max(line.count(b".") for line in data.split(b"\n"))
    if len(data) > _MOST_BYTES or brackets + dots > _DEEPEST:
        msg = f"it has more than {_MOST_BYTES} bytes, or more than {_DEEPEST} brackets and dots"
        raise ValueError(msg)
    return data.decode()


# `accelfn config`: write the settings file, from the user's answers or from the command line.


def configure(
    named: str | None,
    assignments: Sequence[str],
    *,
    default: bool,
    ask: Callable[[str], str] | None = None,
) -> Path:
    """Write a settings file, and return its path.

    An existing file keeps its other settings and its comments.

    Args:
        named: the file to write; default: `accelfn.toml` in the current directory.
        assignments: settings as `name=value`; `name=` removes a setting.
        default: whether to write the defaults. With `default` or `assignments`, accelfn asks no
            questions.
        ask: a function that shows a question and returns the answer; default: ask on the
            terminal.

    Raises:
        LaunchError: a setting is invalid, or settings contradict each other. Nothing is written.
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
            _answer(table, name, ask or _ask_on_terminal)
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
    """Return a file's text with new settings, and with its comments, order and blank lines."""
    tomlkit = arguments.package(
        "tomlkit", call="accelfn config", extra="interactive", error=LaunchError
    )
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
        msg = f"--set {text!r}: expected NAME=VALUE."
        raise LaunchError(msg)
    name = name.strip().replace("-", "_")
    if name in OPTIONS and not value:
        table.pop(name, None)
    else:
        table[name] = parse_setting(name, value, "--set")


def _questions(table: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the settings to ask about; they depend on earlier answers."""
    yield "nproc"
    yield "num_machines"
    if table.get("num_machines", 1) == 1:
        for name in (*NUMBERED, *DYNAMIC):
            table.pop(name, None)
    else:
        # the number of a machine is not in the file: it is on the machine's command line
        is_dynamic = isinstance(table["num_machines"], str) or "rdzv_endpoint" in table
        yield from DYNAMIC if is_dynamic else ("main_address", "main_port")
    yield "max_restarts"


def _answer(table: dict[str, Any], name: str, ask: Callable[[str], str]) -> None:
    """Ask for a setting until the answer is valid; an empty answer keeps the current value."""
    option = OPTIONS[name]
    current = table.get(name, option.default)
    default = "none" if current is None else current
    while text := ask(f"{name}: {option.help} [{default}] ").strip():
        try:
            current = parse_setting(name, text, "the answer")
            break
        except LaunchError as error:
            sys.stderr.write(f"{error}\n")
    if current is not None:
        table[name] = current


def _ask_on_terminal(question: str) -> str:
    if not sys.stdin.isatty():
        msg = (
            "accelfn config needs a terminal to ask its questions. Without a terminal, pass"
            " --default, or --set NAME=VALUE for each setting."
        )
        raise LaunchError(msg)

    try:
        return input(question)
    except EOFError:
        msg = "the input ended before the last answer; nothing was written."
        raise LaunchError(msg) from None
