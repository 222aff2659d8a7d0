"""What this installation knows of a host from its enrolment: identity, helper digest, GPU UUIDs. One JSON file a host.

Host keys are pinned beside it in a file of OpenSSH's own form, so that `ssh -o UserKnownHostsFile=` reads it too.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from reconciler.core.errors import StoreError, local_trouble


class Pin(BaseModel):
    """One enrolled host."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = 1
    host: str
    machine_id: str
    outer_machine_id: str | None = None
    digest: str
    sudo: bool = False
    gpu_uuids: tuple[str, ...] = ()
    enrolled_at: float = 0.0


def pin_path(state_dir: Path, host: str) -> Path:
    """Give the file that holds one host's pin. `host` is a checked label: no separator can be in it."""
    return state_dir / "hosts" / f"{host}.json"


def known_hosts_path(state_dir: Path) -> Path:
    """Give the file of pinned host keys."""
    return state_dir / "known_hosts"


def load_pin(state_dir: Path, host: str) -> Pin | None:
    """Read a host's pin; None when it was never enrolled from here.

    Raises:
        StoreError: It is there and cannot be read: nobody is trusted on a guess.
    """
    path = pin_path(state_dir, host)
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be read {local_trouble(error)}. Nothing was asked of {host}"
        ) from error
    try:
        return Pin.model_validate_json(text)
    except ValidationError as error:
        raise StoreError(
            f"{path}: is not a pin of this tool; remove it and enrol {host} again"
        ) from error


def save_pin(state_dir: Path, pin: Pin) -> None:
    """Write a host's pin in one step."""
    write_whole(pin_path(state_dir, pin.host), pin.model_dump_json(indent=2).encode() + b"\n")


def forget_pin(state_dir: Path, host: str) -> None:
    """Remove a host's pin; a missing one is fine.

    Raises:
        StoreError: It cannot be removed.
    """
    path = pin_path(state_dir, host)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot be removed {local_trouble(error)}") from error


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file of ours: temporary file beside it, fsync, rename. Readable by its owner only.

    Raises:
        StoreError: The disk is full, or the folder cannot be written; the old file is intact.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be written {local_trouble(error)}. It is as it was"
        ) from error
