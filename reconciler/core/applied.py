"""The records that a host keeps of one server, as they are read back. Each has a `version`; older ones stay readable.

Unknown keys are ignored here, and only here: a newer version of this product may have written more (F10).
A record of a version that this code does not know is an error: refused, never half understood.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class StoredRecord(BaseModel):
    """What all records have in common."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    version: Literal[1] = 1


class Applied(StoredRecord):
    """The revision last proven by its gate, and on which process it was proven (S4)."""

    revision: str
    boot_id: str
    invocation: str
    at: float = 0.0
    unit_sha256: str = ""
    spec: str = ""
    policy_digest: str = ""
    evidence: dict[str, Any] = Field(default_factory=dict)


class Attempted(StoredRecord):
    """The revision last tried. Never the same field as applied."""

    revision: str
    attempt: str = ""
    at: float = 0.0


class Rejected(StoredRecord):
    """A revision that failed here; not tried again until it changes or a person says `retry`.

    `definite` is false where the host went back by itself: its controller was gone, which is no evidence about the
    revision (S22), so it may be tried again.
    """

    revision: str
    reason: str = ""
    sentence: str = ""
    at: float = 0.0
    definite: bool = True


class Intent(StoredRecord):
    """A rollout under way: the step machine's own state, from before the effect that it was about to do."""

    state: dict[str, Any]
    verb: str = ""
    boot_id: str = ""
    holder: str = ""


class Hold(StoredRecord):
    """A person's wish that the server be left alone."""

    owner: str = ""
    reason: str = ""
    at: float = 0.0
    until: float | None = None


class HistoryLine(StoredRecord):
    """One finished rollout, for people and for estimates. Times in seconds."""

    outcome: str
    reason: str = ""
    sentence: str = ""
    revision: str = ""
    previous: str = ""
    at: float = 0.0
    took_s: float = 0.0
    outage_s: float | None = None
    steps: dict[str, float] = Field(default_factory=dict)
    by: str = ""
