"""What the daemon remembers between processes, and a person's `retry`: files in this installation's state directory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from reconciler.core.errors import StoreError, local_trouble
from reconciler.core.pacing import Pace
from reconciler.logs import log

PACES = TypeAdapter(dict[str, Pace])


@dataclass(frozen=True, slots=True)
class PaceFile:
    """The daemon's memory below a state directory."""

    state_dir: Path

    @property
    def path(self) -> Path:
        """Give the file of all paces."""
        return self.state_dir / "paces.json"

    def load(self) -> Mapping[str, Pace]:
        """Give what was saved; without it every server begins fresh, which costs a few tries and no safety."""
        try:
            return PACES.validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            log.warning(
                "paces cannot be read, all begin anew",
                path=str(self.path),
                error=type(error).__name__,
            )
            return {}

    def save(self, paces: Mapping[str, Pace]) -> None:
        """Keep it, atomically."""
        fresh = self.path.with_suffix(".new")
        try:
            self.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            fresh.write_bytes(PACES.dump_json(dict(paces)))
            fresh.replace(self.path)
        except OSError as error:
            log.warning("paces cannot be kept", path=str(self.path), error=error.strerror)

    def token(self, server: str) -> str:
        """Name the last request to try a server again."""
        try:
            return (self.state_dir / "retries" / server).read_text()[:64]
        except OSError:
            return ""

    def ask(self, server: str) -> None:
        """Ask the daemon of this installation to try a server again at once.

        Raises:
            StoreError: The state directory cannot be written.
        """
        folder = self.state_dir / "retries"
        fresh = folder / f".{server}.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fresh.write_text(f"{time.time_ns()}")
            fresh.replace(folder / server)
        except OSError as error:
            raise StoreError(f"{folder}: cannot be written {local_trouble(error)}") from error
