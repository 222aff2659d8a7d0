"""The benchmark client on the server's own host, so that no network is in what it measures.

The client is carried there as the helper is: a fixed command, the program and then one request after the other on
standard input. Nothing is installed, nothing stays. What breaks on the way is an infrastructure error of the round,
never a verdict (S22).
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from reconciler.bench import carried
from reconciler.bench.load_plan import Endpoint, LoadPlan, Progress, digest_of
from reconciler.core.errors import HostError, OutcomeUnknownError
from reconciler.core.measurement import ReasonCode, RunResult
from reconciler.effects.channel import parse_frame
from reconciler.helper.records import PYTHON
from reconciler.transports.base import Session, Transport

# The host's own packages are looked at for uvloop, and no line of their `.pth` files is run, which is what `site` would do.
COMMAND = (
    f'exec {PYTHON} -I -S -c "import sys, site; sys.path += site.getsitepackages(); '
    'i = sys.stdin.buffer; exec(i.read(int(i.readline())))"'
)
# A round of 20 distributions and as many texts as it has questions is some 300 kB.
CAP_BYTES = 32 << 20
# Starting Python, compiling the client, opening connections.
START_S = 60.0
# A round without a deadline of its own: no gate and no benchmark is longer than a day.
LONGEST_S = 86_400.0
FLUSH_S = START_S + 15.0
_PROGRESS = re.compile(rb"@@reconciler-progress ([0-9a-f]{32}) ([0-9]{1,7}) ([0-9]{1,7})\n")


@dataclass
class HostMeter:
    """A `bench.meter.Meter` whose rounds run on a host. Give it the transport that leads beside the server."""

    host: str
    transport: Transport
    clock: Callable[[], float] = time.monotonic
    _session: Session | None = field(default=None, repr=False)
    _sent: set[str] = field(default_factory=set, repr=False)

    @contextmanager
    def running(self) -> Iterator[HostMeter]:
        """End the client on the host when the measuring is over."""
        try:
            yield self
        finally:
            self._close()

    def measure(
        self, plan: LoadPlan, endpoint: Endpoint, on_progress: Callable[[Progress], None] | None
    ) -> RunResult:
        """Run one round there."""
        return self._asked(plan, endpoint, on_progress, texts=False)[0]

    def ask(
        self, plan: LoadPlan, endpoint: Endpoint, on_progress: Callable[[Progress], None] | None
    ) -> tuple[RunResult, Mapping[int, str]]:
        """Run one round there and give the texts."""
        return self._asked(plan, endpoint, on_progress, texts=True)

    def flush(self, endpoint: Endpoint) -> bool:
        """Empty the server's prefix cache from there; False where nothing says that it was."""
        try:
            request = {"endpoint": _endpoint_json(endpoint)}
            return self._exchange(request, FLUSH_S, None, None).get("flushed") is True
        except HostError:
            self._close()
            return False

    def _asked(
        self,
        plan: LoadPlan,
        endpoint: Endpoint,
        on_progress: Callable[[Progress], None] | None,
        *,
        texts: bool,
    ) -> tuple[RunResult, Mapping[int, str]]:
        try:
            self._open()
            request = {
                "texts": texts,
                "plan": self._plan_json(plan),
                "endpoint": _endpoint_json(endpoint),
            }
            limit_s = START_S + (plan.deadline_s or LONGEST_S)
            told = self._exchange(request, limit_s, plan, on_progress)
            if "error" in told:
                return self._broken(plan, f"the client there said: {told['error']}"), {}
            result = RunResult.from_json(told["result"])
            heard = told.get("texts") or {}
            return result, {int(number): str(text) for number, text in heard.items()}
        except HostError as error:
            self._close()
            return self._broken(plan, str(error)), {}
        except (KeyError, TypeError, ValueError) as error:
            self._close()
            return self._broken(plan, f"its answer cannot be read ({error})"), {}

    def _open(self) -> Session:
        if self._session is None:
            self._session = self.transport.open(COMMAND)
            self._sent.clear()
            self._session.send(carried.program())
        return self._session

    def _exchange(
        self,
        request: Mapping[str, Any],
        limit_s: float,
        plan: LoadPlan | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> dict[str, Any]:
        session = self._open()
        nonce = secrets.token_hex(16)
        session.send(json.dumps({**request, "nonce": nonce}).encode() + b"\n")
        due = self.clock() + limit_s
        heard = b""
        while True:
            left = due - self.clock()
            if left <= 0:
                raise OutcomeUnknownError(self.host, "the client there did not answer in time")
            packet = session.receive(left)
            if not packet:
                said = session.stderr_tail().decode("utf-8", "replace").strip()[-300:]
                raise OutcomeUnknownError(
                    self.host, f"the client there ended: {said or 'without a word'}"
                )
            heard += packet
            told = parse_frame(heard, nonce)
            if told is not None:
                return told
            if len(heard) > CAP_BYTES:
                raise OutcomeUnknownError(self.host, "the client there says too much")
            if on_progress is not None and plan is not None:
                _report(heard, nonce, plan, on_progress)

    def _plan_json(self, plan: LoadPlan) -> dict[str, Any]:
        digest = digest_of(plan.prompts)
        told = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name != "prompts"}
        told["sampling"] = {f.name: getattr(plan.sampling, f.name) for f in fields(plan.sampling)}
        told["given_up"] = sorted(plan.given_up)
        told["digest"] = digest
        if digest not in self._sent:
            told["prompts"] = [[p.kind, p.text, p.messages] for p in plan.prompts]
            self._sent.add(digest)
        return told

    def _broken(self, plan: LoadPlan, why: str) -> RunResult:
        return RunResult(
            run=plan.run,
            round=plan.round,
            workload=plan.workload,
            concurrency=plan.concurrency,
            max_tokens=plan.max_tokens,
            infrastructure=ReasonCode.UNREACHABLE,
            infrastructure_message=f"{self.host}: measuring on the host did not work: {why}",
        )

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def _endpoint_json(endpoint: Endpoint) -> dict[str, Any]:
    told = {f.name: getattr(endpoint, f.name) for f in fields(endpoint)}
    return told | {"server": dict(endpoint.server)}


def _report(
    heard: bytes, nonce: str, plan: LoadPlan, on_progress: Callable[[Progress], None]
) -> None:
    found = [m for m in _PROGRESS.finditer(heard) if m.group(1).decode() == nonce]
    if found:
        completed, failed = int(found[-1].group(2)), int(found[-1].group(3))
        on_progress(Progress(plan.run, plan.round, plan.requests, completed, failed))
