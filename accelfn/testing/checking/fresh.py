# SPDX-License-Identifier: Apache-2.0
"""A call in a process in which nothing ran before."""

import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

import attrs
import cloudpickle

from accelfn.errors import ArgumentError
from accelfn.testing.processes.rank import Answer, Surroundings
from accelfn.testing.processes.run import RankError, RankProcess


@attrs.frozen
class FreshCall:
    """A function with its arguments, as they are before anything runs.

    A new process imports classes and functions of modules that it finds. Others travel with
    what they refer to.
    """

    _function: bytes

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "FreshCall":
        """Keep a function as it is now.

        Raises:
            ArgumentError: it cannot be sent to another process.
        """
        try:
            return cls(cloudpickle.dumps(function))
        except Exception as error:
            msg = f"This cannot be sent to another process: {function!r}: {error}"
            raise ArgumentError(msg) from error

    def result(self, *given: Any) -> Any:
        """Return what the function returns in a new process.

        Raises:
            ArgumentError: the function cannot be imported there.
            RankError: it raised.
        """
        started = RankProcess.start(_serve, name="new process")
        try:
            call = (Surroundings.of_process(), self._function, given)
            started.pipe.send_bytes(pickle.dumps(call))
            answer = started.answer()
        finally:
            started.end()
        if answer.failure is None:
            return pickle.loads(answer.result)  # noqa: S301 - of our own process
        if answer.result:
            raise ArgumentError(answer.last_line)
        raise RankError(answer.last_line)


def _serve(pipe: Pipe) -> None:
    surroundings, packed, given = pickle.loads(pipe.recv_bytes())  # noqa: S301 - the caller's own
    found = packed
    try:
        with surroundings.enter(0, 1):
            function = pickle.loads(packed)  # noqa: S301
            found = b""
            found = cloudpickle.dumps(function(*given))
        answer = Answer(found)
    except BaseException:  # noqa: BLE001 - told to the caller, who raises
        answer = Answer(found, failure=traceback.format_exc())
    pipe.send(answer)
