"""Run a piece of a test as a user without rights, also where the tests run as root.

A forked child gives its rights away for good and does the work with what is imported already: the interpreter's own folder may
be closed to that user.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import TypeVar

NOBODY = 65534

T = TypeVar("T")


def as_nobody(work: Callable[[], T]) -> T:
    """Give what `work` returns when nobody in particular does it. What it raises fails the test."""
    if os.geteuid() != 0:
        return work()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            answer: tuple[bool, object] = (True, work())
        except BaseException as error:  # noqa: BLE001  (it is handed to the parent, which raises)
            answer = (False, f"{type(error).__name__}: {error}")
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(answer))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    good, value = pickle.loads(data)
    assert good, value
    return value  # type: ignore[no-any-return]
