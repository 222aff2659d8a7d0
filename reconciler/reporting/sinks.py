"""Where reports go: a forge's statuses by its API, and messages by Apprise (an extra; a hundred services by URL)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from reconciler.core.standing import Message
from reconciler.reporting.base import Forge, Place, Status
from reconciler.reporting.client import ForgeClient

MAX_FILE: Final = 64 * 1024
MAX_TEXT: Final = 1_500
"""Of a message; services cut or refuse more than a few thousand characters."""


class NotBroughtError(Exception):
    """A message could not be brought; says nothing of the address, which holds a secret."""


@dataclass
class ForgeStatuses:
    """Statuses beside commits of one repository."""

    forge: Forge
    place: Place
    token: Callable[[], str]
    """Read each time: tokens are exchanged while a daemon runs."""

    def send_status(self, commit: str, status: Status) -> None:
        """Show it on the forge."""
        with ForgeClient(self.forge, replace(self.place, commit=commit), self.token()) as client:
            client.set_status(status)


@dataclass
class AppriseMessages:
    """Messages by Apprise. Its addresses hold secrets, so they come from a file that only its owner reads, one a line."""

    path: Path

    def send_message(self, message: Message) -> None:
        """Bring it to every address.

        Raises:
            NotBroughtError: Apprise is not there, the file cannot be used, or a service did not take the message.
        """
        try:
            import apprise  # noqa: PLC0415  (an extra, and slow to import)
        except ImportError:
            why = "notifications need Apprise: pip install 'inference-reconciler[notify]'"
            raise NotBroughtError(why) from None
        box = apprise.Apprise()
        for number, line in enumerate(_lines(self.path), 1):
            if not box.add(line):
                raise NotBroughtError(
                    f"{self.path}: line {number} of the addresses is none that Apprise knows"
                )
        kinds: dict[str, Any] = {k.value: k for k in apprise.NotifyType}
        done = box.notify(
            title=seen(message.title, 150),
            body=seen(message.text, MAX_TEXT),
            notify_type=kinds[message.urgency.value],
            body_format=apprise.NotifyFormat.TEXT,
        )
        if not done:
            raise NotBroughtError("a notification service did not take the message")


def _lines(path: Path) -> list[str]:
    """Read the addresses; empty lines and those that begin with # do not count."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(MAX_FILE + 1)
    except OSError as error:
        raise NotBroughtError(f"{path}: cannot be read ({error.strerror})") from error
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in {0, os.getuid()}:
        raise NotBroughtError(f"{path}: others may read it; it must be yours or root's, mode 0600")
    lines = text[:MAX_FILE].decode("utf-8", "replace").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def seen(text: str, limit: int) -> str:
    """Give text for a message: what cannot be seen is shown, and nobody is mentioned by it."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    shown = shown.replace("@", "@\N{ZERO WIDTH SPACE}").replace("<!", "<\N{ZERO WIDTH SPACE}!")
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"
