"""The safety rules as predicates on a simulated host's own state, checked after every effect. The code under test never reads it.

Numbers are those of the rules in `reconciler/README.md`. A violated rule raises `ViolationError` at the instant at which it is
violated, so that a trace ends where the fault is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from reconciler.helper.records import PERMANENT, RUN, STATE
from reconciler.lab.simulated import SimulatedHost
from reconciler.lab.world import Effect

FENCED_VERBS = frozenset(
    {
        "record",
        "disarm",
        "stop",
        "signal",
        "install",
        "set-aside",
        "remove",
        "start",
        "deadline",
        "commit",
        "settle",
    }
)
DISTURBING = frozenset({"start", "stop", "signal", "kill_group"})


class ViolationError(AssertionError):
    """A safety rule does not hold."""


@dataclass
class Oracle:
    """Watches one simulated host that runs the servers named in `units` (server to unit)."""

    simulated: SimulatedHost
    units: dict[str, str]
    bystanders: tuple[int, ...] = ()
    unknown_outcome: bool = False
    verbs: list[str] = field(default_factory=list)
    seen_starts: int = 0
    seen_signals: int = 0
    applied: dict[str, str | None] = field(default_factory=dict)
    boot_id: str = ""
    broken: ViolationError | None = None

    def __post_init__(self) -> None:
        """Remember the boot in which the bystanders live."""
        self.boot_id = self.simulated.host.boot_id

    def watch(self, effect: Effect) -> None:
        """Check every rule that an effect can touch."""
        if effect.kind == "call":
            self._call(effect)
        else:
            self._effect(effect)
        if effect.stage == "after":
            self.check()

    def check(self) -> None:
        """Check the rules about the host's state at this instant, and say again what was broken before.

        Said again, because the helper catches what is raised inside it, as it must.
        """
        if self.broken is not None:
            raise self.broken
        self._one_server_a_gpu()
        self._starts()
        self._signals()
        self._applied()
        self._bystanders()
        if self.simulated.host.truth.overwritten:
            raise self._broken(
                "S7", f"overwrote {self.simulated.host.truth.overwritten[0][0]}, which was not ours"
            )

    def _broken(self, rule: str, sentence: str) -> ViolationError:
        self.broken = self.broken or ViolationError(
            f"{rule} at {self.simulated.world.now:.2f} s: {sentence}"
        )
        return self.broken

    def _read(self, path: str) -> dict[str, Any] | None:
        data = self.simulated.host.files.data.get(path)
        return json.loads(data) if data is not None else None

    # -- what is sent -----------------------------------------------------------------------------------

    def _call(self, effect: Effect) -> None:
        request = effect.request or {}
        verb = str(request.get("verb"))
        if effect.stage == "after":
            return
        self.verbs.append(verb)
        if self.unknown_outcome and verb in FENCED_VERBS:
            raise self._broken(
                "S12", f"{verb} was sent after an unknown outcome, before a claim and a look"
            )
        if verb == "claim":
            self.unknown_outcome = False
        if verb in FENCED_VERBS:
            self._lease_outlasts(request, verb)

    def _lease_outlasts(self, request: Any, verb: str) -> None:
        """S9: the host must not be asked for an effect that its lease would not outlast."""
        lease = self._read(f"{RUN}/{request.get('server')}.lease")
        fence = request.get("fence") or {}
        if lease is None or lease.get("nonce") != fence.get("nonce"):
            return  # The host refuses it; that is S8's matter.
        if request.get("not_after", 0) > lease["expires_boottime"] + 1.0:
            late = request["not_after"] - lease["expires_boottime"]
            raise self._broken("S9", f"{verb} may act {late:.1f} s after its lease")

    # -- what is done -------------------------------------------------------------------------------------

    def _effect(self, effect: Effect) -> None:
        request = effect.request
        if request is None or request.get("verb") not in FENCED_VERBS or effect.stage != "before":
            return
        server = str(request.get("server"))
        fence = self._read(f"{STATE}/{server}/fence.json") or {}
        sent = request.get("fence") or {}
        if (fence.get("epoch"), fence.get("nonce")) != (sent.get("epoch"), sent.get("nonce")):
            raise self._broken(
                "S8", f"{effect.kind} {effect.detail} acts under a fence that is not the host's"
            )
        if effect.kind in DISTURBING and self._read(f"{STATE}/{server}/intent.json") is None:
            raise self._broken("S11", f"{effect.kind} {effect.detail} without a durable intent")

    # -- what is true ---------------------------------------------------------------------------------------

    def _one_server_a_gpu(self) -> None:
        for gpu, holders in self.simulated.host.serving_units().items():
            servers = {h for h in holders if h[0] in self.units.values()}
            if len(servers) > 1:
                raise self._broken("S1", f"GPU {gpu} is held by {sorted(map(str, servers))}")

    def _starts(self) -> None:
        starts = self.simulated.host.truth.starts
        for started in starts[self.seen_starts :]:
            if started.unit in self.units.values() and started.holders:
                raise self._broken(
                    "S2", f"{started.unit} was started while {started.holders} held its GPUs"
                )
        self.seen_starts = len(starts)

    def _signals(self) -> None:
        signals = self.simulated.host.truth.signals
        for signal in signals[self.seen_signals :]:
            if signal.by == "helper" and signal.unit not in self.units.values():
                raise self._broken(
                    "S3", f"pid {signal.pid} of {signal.unit} was sent signal {signal.number}"
                )
        self.seen_signals = len(signals)

    def _applied(self) -> None:
        host = self.simulated.host
        for server, unit in self.units.items():
            applied = self._read(f"{STATE}/{server}/applied.json")
            if applied is None:
                continue
            content = f"{STATE}/{server}/revisions/{applied['revision']}/unit.service"
            if content not in host.files.data:
                raise self._broken(
                    "S5", f"{server}: the content of the applied revision is not on the host"
                )
            key = f"{applied['revision']} {applied['boot_id']} {applied['invocation']}"
            if key == self.applied.get(server):
                continue
            self.applied[server] = key
            if applied["boot_id"] != host.boot_id or not self._runs(unit, applied["invocation"]):
                raise self._broken("S4", f"{server}: applied names a process that does not run")

    def _runs(self, unit: str, invocation: str) -> bool:
        return any(
            p.alive and p.unit == unit and p.invocation == invocation
            for p in self.simulated.host.processes.values()
        )

    def _bystanders(self) -> None:
        if self.simulated.host.boot_id != self.boot_id:
            return  # A reboot ends everybody, and is nobody's act.
        for pid in self.bystanders:
            process = self.simulated.host.processes.get(pid)
            if process is None or not process.alive:
                raise self._broken("S3", f"the bystander {pid} is gone")


def end_state(simulated: SimulatedHost, server: str, unit: str) -> dict[str, Any]:
    """Give what must be equal to the undisturbed run: everything but pids, invocations and times."""
    files = simulated.host.files.data

    def revision(name: str) -> str | None:
        data = files.get(f"{STATE}/{server}/{name}.json")
        return json.loads(data).get("revision") if data is not None else None

    def text(path: str) -> str | None:
        data = files.get(path)
        return data.decode() if data is not None else None

    running = sorted(
        {
            p.argv[-1] if p.argv else ""
            for p in simulated.host.processes.values()
            if p.alive and p.unit == unit
        }
    )
    return {
        "applied": revision("applied"),
        "permanent": text(f"{PERMANENT}/{unit}"),
        "running": running,
        "rejected": sorted(simulated.host.files.names(f"{STATE}/{server}/rejected")),
        "left": sorted(
            path
            for path in files
            if path.endswith(
                (
                    f"system.control/{unit}",
                    "zz-reconciler-disarm.conf",
                    f"{unit}.disarmed",
                    f"{server}/intent.json",
                    f"{server}/deadline.json",
                )
            )
        ),
    }


__all__ = ["Oracle", "ViolationError", "end_state"]
