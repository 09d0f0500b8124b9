# SPDX-License-Identifier: Apache-2.0
"""What a launch can be told: each option's name, its meaning and the values that it may have."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from attrs import frozen

from accelfn.errors import ArgumentError, LaunchError
from accelfn.launching.machines import JOIN_SECONDS, MAIN_PORT
from accelfn.world.axes import of_text

if TYPE_CHECKING:
    from collections.abc import Callable


@frozen
class Kind:
    """What values a setting may have, and how the command line spells them.

    Attributes:
        expects: the values, in words.
        accepts: whether one is among them.
    """

    expects: str
    accepts: Callable[[Any], bool]

    def from_text(self, text: str) -> Any:
        """Return the value that a word of the command line means."""
        number = _number(text)
        return text if self.accepts(text) and not self.accepts(number) else number


def _is_whole(value: object, least: int, most: float = float("inf")) -> bool:
    return type(value) is int and least <= value <= most


def _parse_count(text: str) -> int:
    """Return the number that a text is; -1 where it is none, or has many digits."""
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
    """Return a number where the text is one, else the text, which is then refused."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# more than any machine starts, or any run has, and few enough to be tried by mistake
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


def checked(name: str, value: Any, source: str) -> Any:
    """Return a setting's value.

    Raises:
        LaunchError: there is no such setting, or it cannot have it.
    """
    option = OPTIONS.get(name)
    if option is None:
        msg = f"{source} has {name!r:.80}, which is no setting.{near(name, list(OPTIONS))}"
        raise LaunchError(msg)
    if not option.kind.accepts(value):
        msg = f"{_where(name, source)} is {value!r:.80}; give {option.kind.expects}."
        raise LaunchError(msg)
    if name == "axes":
        check_axes(value, source, None)
    return value


def check_axes(text: str, source: str, size: int | None) -> None:
    """Refuse axes that no world has, or none of so many ranks, as a world refuses them."""
    try:
        of_text(f"{_where('axes', source)} {text}", text, size)
    except ArgumentError as error:
        raise LaunchError(str(error)) from error


def _where(name: str, source: str) -> str:
    return flag(name) if source == COMMAND_LINE else f"{source}: {name}"


def near(name: str, names: list[str]) -> str:
    """Return the name that was meant, or all that there are, as the end of a sentence."""
    close = difflib.get_close_matches(name.replace("-", "_"), names, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(names)}."
