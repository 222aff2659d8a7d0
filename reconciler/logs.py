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
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger, Processor

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


class Log:
    """The one logger.

    structlog is loaded with the first line that is written: most passes have nothing to log, and would pay a fifth of
    a second for it.
    """

    def __init__(self) -> None:
        self._level = logging.WARNING
        self._colours = True
        self._logger: FilteringBoundLogger | None = None

    def configure(self, environ: Mapping[str, str]) -> None:
        """Take level and colours from the environment."""
        self._level = LEVELS.get(environ.get("RECONCILER_LOG", "warning").lower(), logging.WARNING)
        self._colours = not environ.get("NO_COLOR")
        self._logger = None

    def debug(self, event: str, **keys: Any) -> None:
        """Say what only a developer wants to know."""
        if self._level <= logging.DEBUG:
            self._loaded().debug(event, **keys)

    def info(self, event: str, **keys: Any) -> None:
        """Say what was done."""
        if self._level <= logging.INFO:
            self._loaded().info(event, **keys)

    def warning(self, event: str, **keys: Any) -> None:
        """Say what somebody should look at."""
        if self._level <= logging.WARNING:
            self._loaded().warning(event, **keys)

    def error(self, event: str, **keys: Any) -> None:
        """Say what went wrong."""
        self._loaded().error(event, **keys)

    def exception(self, event: str, **keys: Any) -> None:
        """Say what went wrong, with the exception that is being handled."""
        self._loaded().exception(event, **keys)

    def _loaded(self) -> FilteringBoundLogger:
        if self._logger is None:
            self._logger = _structlog(self._level, colours=self._colours)
        return self._logger


def _structlog(level: int, *, colours: bool) -> FilteringBoundLogger:
    """Load structlog and give a logger: key=value on a terminal, JSON lines elsewhere."""
    import structlog  # noqa: PLC0415

    terminal = sys.stderr.isatty()
    last: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=colours)]
        if terminal
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    processors: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *last,
    ]
    logger: FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(cast("TextIO", _StandardError())),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )
    return logger


log = Log()


def configure(environ: Mapping[str, str]) -> None:
    """Set the log up once, from the environment. Libraries may say warnings and no more: their debug output holds data."""
    log.configure(environ)
    for library in ("paramiko", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
