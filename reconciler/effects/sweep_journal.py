"""The journal of a sweep: a line for its header, one for each point as it ends. What is in it is never measured again.

Kept beside the other state of this installation, so that a sweep that was interrupted can be gone on with. Each
line is on the disk before the next rollout begins; a last line that was cut by a crash is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reconciler.core.errors import StoreError, UsageError, local_trouble
from reconciler.core.tuning import Tried

FORMAT_VERSION: Final = "1.0"
BYTES_LIMIT: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class SweepJournal:
    """One file of lines."""

    path: Path

    def begin(self, header: Mapping[str, Any], *, resume: bool) -> tuple[Tried, ...]:
        """Start a journal, or go on with one, and give what it already has.

        Raises:
            UsageError: There is an unfinished one and `resume` is not set, or it is of another sweep.
            StoreError: The file cannot be read or written.
        """
        lines = self._lines()
        finished = any(line.get("type") == "end" for line in lines)
        if not lines or (finished and not resume):
            self._replace(header)
            return ()
        if not resume:
            raise UsageError(
                f"{self.path}: a sweep of this server was not finished; add --resume to go on with it, or remove the file"
            )
        if lines[0].get("header") != json.loads(json.dumps(header)):
            raise UsageError(
                f"{self.path}: it is of another sweep (other values, limits, spec or prompts); leave --resume out, after "
                "removing the file, to begin anew"
            )
        try:
            return tuple(
                Tried.from_json(line["tried"]) for line in lines if line.get("type") == "point"
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self.path}: a line is not one of this tool's ({error}); remove the file to begin anew"
            ) from error

    def add(self, tried: Tried) -> None:
        """Write down what came of a point."""
        self._append({"type": "point", "tried": tried.to_json()})

    def end(self, sentence: str) -> None:
        """Write down that the sweep is over."""
        self._append({"type": "end", "sentence": sentence})

    def _lines(self) -> list[dict[str, Any]]:
        try:
            if self.path.stat().st_size > BYTES_LIMIT:
                raise UsageError(f"{self.path}: is larger than any journal of a sweep; remove it")
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read {local_trouble(error)}") from error
        found = []
        for line in raw.split(b"\n")[:-1]:
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not isinstance(entry, dict):
                break
            found.append(entry)
        if found and (
            found[0].get("type") != "header" or found[0].get("version") != FORMAT_VERSION
        ):
            raise UsageError(
                f"{self.path}: is no journal of a sweep that this version can read; remove it"
            )
        return found

    def _replace(self, header: Mapping[str, Any]) -> None:
        first = {"type": "header", "version": FORMAT_VERSION, "header": header}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"{self.path}: cannot be written {local_trouble(error)}. Nothing was done"
            ) from error
        self._append(first)

    def _append(self, entry: Mapping[str, Any]) -> None:
        try:
            descriptor = os.open(
                self.path,
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o600,
            )
            with os.fdopen(descriptor, "ab") as file:
                self._end_cut_line(file.fileno())
                file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be written {local_trouble(error)}") from error

    def _end_cut_line(self, descriptor: int) -> None:
        """Take away what a crash left of a line, so that the next one can be read."""
        size = os.fstat(descriptor).st_size
        if not size:
            return
        raw = self.path.read_bytes()
        if not raw.endswith(b"\n"):
            os.ftruncate(descriptor, raw.rfind(b"\n") + 1)


__all__ = ["SweepJournal"]
