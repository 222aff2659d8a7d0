"""The ladder alone on a lab host: one server brought up, and taken down by the product's own step machine and helper.

No command line, no gate, short waits: what is tried is how a release ends. Servers are named `row-…`, and each test has its own.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lab_engine import hold_command, wait_for
from witness import Witness

from reconciler.core.attempt import Attempt, Member, Phase
from reconciler.core.conditions import Outcome, Reason, ServerResult
from reconciler.core.desired import Budgets, Target, text_sha256
from reconciler.core.effect import Effect, Fence, Signal
from reconciler.core.steps import group_number
from reconciler.effects.carry import Turn, carry
from reconciler.effects.channel import HelperChannel
from reconciler.effects.enrol import Enrolled, enrol
from reconciler.effects.host import ConnectedHost
from reconciler.effects.perform import Performer
from reconciler.effects.ports import GateReport, Ports, Request
from reconciler.lab.hosts import LabPaths, SystemdHost
from reconciler.systemd import ServerUnit, server_unit
from reconciler.transports.host_keys import HostKeys
from reconciler.transports.ssh import SshTarget, SshTransport

MIB = 4000
LEASE: Mapping[str, object] = {"holder": "row", "takeover": True}
BUDGETS = Budgets(drain_s=0, stop_s=1, release_s=6, settle_s=0.4)
"""A left-over is asked to go after 1 s, ended 2 s later, and given up 3 s after that."""


class Clock:
    """Real time."""

    stopping = False

    def now(self) -> float:
        """Give seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Row:
    """One server of a test: its unit is up, and this is its run."""

    server: str
    text: str

    @property
    def unit(self) -> str:
        """Give its unit."""
        return f"{self.server}.service"


@dataclass
class Ended:
    """How a release ended, and what was done on the way."""

    result: ServerResult
    effects: list[tuple[Phase, Effect]]
    took_s: float

    @property
    def released(self) -> bool:
        """Say whether the GPUs were proven free."""
        return self.result.outcome is Outcome.STOPPED

    @property
    def signals(self) -> list[str]:
        """Name the signals that were sent."""
        return [e.signal for _, e in self.effects if isinstance(e, Signal)]


@dataclass
class Ladder:
    """The product's own way down, on one host."""

    host: SystemdHost
    connected: ConnectedHost
    witness: Witness
    uuids: tuple[str, ...]
    rows: list[Row] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    @classmethod
    def on(cls, host: SystemdHost, lab: LabPaths, directory: Path) -> Ladder:
        """Enrol the host, and have the witness and the bystanders run."""
        lab.write_inventory()
        keys = HostKeys((lab.known_hosts,))
        transport = SshTransport(SshTarget(host.ip, host.user, host.port), keys, lab.ssh_config)
        channel = HelperChannel(host.name, transport)
        done = enrol(host.name, channel, None, login="root", protect=(), state_dir=directory, at=time.time())  # fmt: skip
        assert isinstance(done, Enrolled), done
        assert len(done.baselines) == len(done.gpus), done.notes
        installed = HelperChannel(host.name, transport, installed=done.pin.digest)
        connected = ConnectedHost(host.name, installed, transports=(transport,))
        return cls(host, connected, Witness.begin(host), tuple(done.gpus))

    def close(self) -> None:
        """End the connection."""
        self.connected.close()

    # -- up ----------------------------------------------------------------------------------------------

    def up(
        self,
        *options: str,
        settings: Mapping[str, str] | None = None,
        command: list[str] | None = None,
        waits: bool = True,
        starts: bool = True,
    ) -> Row:
        """Bring a server of ours up on GPU 0; `settings` replace lines of the unit that the product writes."""
        server = f"row-{next(self.numbers)}"
        argv = command or hold_command("--model", server, *options, mib=MIB, port=30000)
        text = server_unit(
            ServerUnit(
                server, f"{server}.service", "0" * 64, "a row", tuple(argv), {}, stop_s=1, ready_s=5, group_id=group_number(server), restart_s=1,
            )
        )  # fmt: skip
        for key, value in (settings or {}).items():
            text, found = re.subn(rf"^{key}=.*$", f"{key}={value}", text, flags=re.MULTILINE)
            assert found == 1, (key, text)
        row = Row(server, text)
        self.rows.append(row)
        self.bind(row)
        self.host.check(["sh", "-c", f"cat >/etc/systemd/system/{row.unit}"], text.encode())
        self.host.check(["systemctl", "daemon-reload"])
        if starts:
            self.host.check(["systemctl", "start", "--no-block", row.unit])
        if starts and waits:
            try:
                wait_for(lambda: self.state(row) == "active" and bool(self.witness.now()), 20)
            except AssertionError as error:
                said = self.host.check(["journalctl", "--output=cat", "-n", "12", "--no-pager"])
                raise AssertionError(f"{row.unit} is {self.state(row)}: {said}") from error
        return row

    def bind(self, row: Row, *uuids: str) -> None:
        """Record that a server has GPU 0, under a lease that is given back."""
        content = {"unit": row.unit, "gpus": list(uuids or self.uuids[:1]), "gid": group_number(row.server), "uid": 0}  # fmt: skip
        self.asked(row, 60, ("record", {"name": "bindings", "content": content}), ("claim", {**LEASE, "ttl_s": 0}))  # fmt: skip

    def asked(self, row: Row, ttl_s: float, *requests: tuple[str, Mapping[str, object]]) -> None:
        """Claim a server for so long, and ask the helper for one thing after the other."""
        lease = {**LEASE, "ttl_s": ttl_s}
        claimed = self.connected.call(Request("claim", lease, server=row.server), deadline_s=30)
        assert claimed.outcome == "done", claimed
        fence, boot = claimed.data["fence"], claimed.data["boot_id"]
        after = claimed.data["boottime"] + 60
        for verb, args in requests:
            request = Request(verb, args, server=row.server, fence=fence, boot_id=boot, not_after=after)  # fmt: skip
            answer = self.connected.call(request, deadline_s=30)
            assert answer.outcome == "done", answer

    def left_behind(self, row: Row, deadline_s: float) -> None:
        """Disarm and stop a server as a rollout does, and never come back."""
        disarm = {"unit": row.unit, "stop_timeout_s": 5, "deadline_s": deadline_s, "grace_s": 1}
        stop = {"unit": row.unit, "invocation": self.show(row, "InvocationID")}
        self.asked(row, 8, ("disarm", disarm), ("stop", stop))
        wait_for(lambda: self.state(row) == "inactive")

    def remember(self, row: Row) -> None:
        """Have the run of a row recorded, as a commit records it: what an escaped process of it is known by."""
        pid = self.show(row, "MainPID")
        space = self.host.check(["readlink", f"/proc/{pid}/ns/mnt"])
        identity = self.connected.call(Request("observe", {"servers": [], "gpus": False, "paths": [], "users": [], "kernel_cursor": None}), deadline_s=30)  # fmt: skip
        run = {
            "invocation": self.show(row, "InvocationID"),
            "boot_id": identity.data["boot_id"],
            "main_pid": int(pid),
            "main_start_ticks": int(self.witness.process(int(pid))[1]),
            "uid": 0,
            "gid": 0,
            "mount_ns": int("".join(filter(str.isdigit, space))),
            "cgroup": f"/system.slice/{row.unit}",
        }
        record = json.dumps({"version": 1, "invocations": [run]}).encode()
        self.host.check(["sh", "-c", f"umask 077; cat >/var/lib/reconciler/{row.server}/invocations.json"], record)  # fmt: skip

    def produced(self, row: Row) -> None:
        """Have the text of a row's unit recorded as one that we wrote."""
        record = json.dumps({"version": 1, "sha256": [text_sha256(row.text)]}).encode()
        self.host.check(["sh", "-c", f"umask 077; cat >/var/lib/reconciler/{row.server}/produced.json"], record)  # fmt: skip

    # -- down --------------------------------------------------------------------------------------------

    def down(
        self,
        row: Row,
        *,
        at: Mapping[Phase, Callable[[], None]] | None = None,
        budgets: Budgets = BUDGETS,
    ) -> Ended:
        """Take a server down until its GPU is proven free; `at` a phase's first look something else happens."""
        target = Target("0" * 64, row.text, gpu_uuids=self.uuids[:1])
        hold = json.dumps({"version": 1, "owner": "row", "reason": "a row", "at": 0.0})
        member = Member(row.server, row.unit, None, target, budgets, hold=hold)
        happens = dict(at or {})
        effects: list[tuple[Phase, Effect]] = []

        def on_turn(turn: Turn) -> None:
            effects.append((turn.state.phase, turn.effect))
            if (act := happens.pop(turn.state.phase, None)) is not None:
                act()

        ports = Ports(self.connected, Clock(), {}, _no_gate, "row")
        began = time.monotonic()
        (result,) = carry(
            Attempt(f"{row.server}-{began}", self.host.name, (member,)), Performer(ports), on_turn
        )
        assert not happens, f"never came to {happens}"
        return Ended(result, effects, time.monotonic() - began)

    # -- looking -----------------------------------------------------------------------------------------

    def state(self, row: Row) -> str:
        """Give `ActiveState`."""
        return self.show(row, "ActiveState")

    def show(self, row: Row, name: str) -> str:
        """Give one property of the row's unit."""
        return self.host.check(
            ["systemctl", "show", f"--property={name}", "--value", row.unit]
        ).strip()

    def clear(self) -> None:
        """End what a test left of its own servers: by their control groups, which hold nobody else."""
        for row in self.rows:
            self.host.exec(["systemctl", "stop", "--no-block", row.unit])
            for group in (f"system.slice/{row.unit}", "lab-escaped"):
                # Not cgroup.kill: it leaves out the living threads of a leader that is dead.
                self.host.exec(["sh", "-c", f"kill -KILL $(cat /sys/fs/cgroup/{group}/cgroup.procs /sys/fs/cgroup/{group}/cgroup.threads)"])  # fmt: skip
            wait_for(lambda row=row: self.state(row) in {"inactive", "failed"})  # type: ignore[misc]
            self.host.exec(["rm", "-rf", f"/etc/systemd/system/{row.unit}", f"/run/systemd/system/{row.unit}.d", f"/run/reconciler/{row.unit}.disarmed"])  # fmt: skip
        self.rows.clear()
        self.host.exec(["sh", "-c", "rm -f /run/fakegpu/fault.json /var/lib/reconciler/quarantine.json; systemctl daemon-reload; systemctl reset-failed 'row-*'"])  # fmt: skip
        wait_for(lambda: not self.witness.now())


def _no_gate(*_: object, **__: object) -> GateReport:
    raise AssertionError("nothing is measured here")


__all__ = ["BUDGETS", "Ended", "Fence", "Ladder", "Outcome", "Reason", "Row"]
