"""The log: constant phrases, everything else a key. For machines and for whoever looks for a cause afterwards.

What a person follows on a terminal is the run's own output; the log is quiet unless `RECONCILER_LOG` says otherwise
(`debug`, `info`, `warning`). It goes to standard error: key=value on a terminal, JSON lines elsewhere. Never an
environment, a token, or a host's answer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO, cast

import structlog

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class _StandardError:
    """Standard error as it is when something is written. A log that nobody can read any more stops no work and no thread."""

    def write(self, text: str) -> int:
        """Write, or let it go."""
        with suppress(OSError, ValueError, AttributeError):
            return sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or let it go."""
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()


def configure(environ: Mapping[str, str]) -> None:
    """Set the log up once, from the environment. Libraries may say warnings and no more: their debug output holds data."""
    level = LEVELS.get(environ.get("RECONCILER_LOG", "warning").lower(), logging.WARNING)
    terminal = sys.stderr.isatty()
    last: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=terminal and not environ.get("NO_COLOR"))
        if terminal
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _StandardError())),
        cache_logger_on_first_use=True,
    )
    for library in ("paramiko", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
