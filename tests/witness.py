"""What must be true on a lab host after any release, seen without the product.

Nobody foreign was signalled, and no second server was started on a held GPU.

The witness is a unit of the host. It looks at /proc by its own few lines, twenty times a second, and writes down who has which card
open. Beside it run bystanders that write down every signal they get, and whose pid and start time must stay.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from lab_engine import wait_for

from reconciler.lab.hosts import SystemdHost

SEEN = "/run/lab-witness.ndjson"
SIGNALS = "/run/lab-signals"

WITNESS = f"""
import json, os, stat, time
cards = {{os.stat(f"/dev/nvidia{{n}}").st_rdev: n for n in range(16) if os.path.exists(f"/dev/nvidia{{n}}")}}
def look():
    held = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            mine = set()
            for tid in os.listdir(f"/proc/{{pid}}/task"):
                try: names = os.listdir(f"/proc/{{tid}}/fd")
                except OSError: continue  # dead, and its threads may not be
                for fd in names:
                    if not os.readlink(f"/proc/{{tid}}/fd/{{fd}}").startswith("/dev/"): continue
                    seen = os.stat(f"/proc/{{tid}}/fd/{{fd}}")
                    if stat.S_ISCHR(seen.st_mode) and seen.st_rdev in cards: mine.add(cards[seen.st_rdev])
            if not mine: continue
            start = int(open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[19])
            group = open(f"/proc/{{pid}}/cgroup").read().strip().rpartition("::")[2]
            words = []
            try: words = open(f"/proc/{{pid}}/environ", "rb").read().split(b"\\0")
            except OSError: pass  # a dead leader has none
            run = next((w[14:].decode() for w in words if w.startswith(b"INVOCATION_ID=")), "")
        except (OSError, IndexError, ValueError): continue  # it ended
        held += [[card, int(pid), start, run, group] for card in sorted(mine)]
    return sorted(held)
last = None
with open("{SEEN}", "w", buffering=1) as out:
    while True:
        now = look()
        if now != last: print(json.dumps([time.monotonic(), now]), file=out)
        last = now
        time.sleep(0.05)
"""

BYSTANDER = f"""
import os, signal, sys
out = os.open("{SIGNALS}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def note(number, frame): os.write(out, f"{{sys.argv[1]}} got signal {{number}}\\n".encode())
for number in set(signal.valid_signals()) - {{signal.SIGKILL, signal.SIGSTOP}}: signal.signal(number, note)
for path in sys.argv[2:]:
    os.open(path, os.O_RDWR) if path.startswith("/dev/") else os.memfd_create(path)
open("/run/" + sys.argv[1] + ".up", "w").close()
while True: signal.pause()
"""


@dataclass(frozen=True, slots=True)
class Holding:
    """One process that had one card open."""

    card: int
    pid: int
    start: int
    run: str
    group: str


@dataclass
class Witness:
    """The witness of one host, and the bystanders that it vouches for: pid and start time by unit."""

    host: SystemdHost
    bystanders: dict[str, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def begin(cls, host: SystemdHost) -> Witness:
        """Start the witness, a bystander without a card, and a neighbour with memory on GPU 1."""
        program(host, "lab-witness", WITNESS)
        witness = cls(host)
        witness.bystander("lab-quiet")
        witness.bystander("lab-neighbour", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", "fakegpu-1-3000-b5")  # fmt: skip
        return witness

    def bystander(self, name: str, *opens: str) -> int:
        """Start one more process that nobody may touch; return its pid."""
        pid = program(self.host, name, BYSTANDER, name, *opens)
        wait_for(lambda: self.host.exec(["rm", f"/run/{name}.up"]).exit_status == 0)
        self.bystanders[name] = self.process(pid)
        return pid

    def dismiss(self, name: str) -> None:
        """End a bystander of the test's own."""
        self.vouch()
        del self.bystanders[name]
        self.host.exec(["systemctl", "kill", "--signal=KILL", name])
        self.host.exec(["systemctl", "reset-failed", name])
        wait_for(lambda: self.host.exec(["systemctl", "is-active", name]).exit_status != 0)

    def process(self, pid: int) -> tuple[int, str]:
        """Return a process by pid and start time; start "" when it is gone or dead."""
        stat = (
            self.host.exec(["cat", f"/proc/{pid}/stat"]).stdout.decode().rpartition(")")[2].split()
        )
        return (pid, "" if not stat or stat[0] in "ZX" else stat[19])

    def holding(self) -> list[list[Holding]]:
        """Return every state of the cards that was seen, in its order."""
        lines = self.host.check(["cat", SEEN]).splitlines()
        return [[Holding(*one) for one in json.loads(line)[1]] for line in lines]

    def now(self, card: int = 0) -> set[int]:
        """Return who has a card open now."""
        return {one.pid for one in self.holding()[-1] if one.card == card}

    def vouch(self) -> None:
        """Assert that no bystander was touched, and that nothing of ours began on a card that another run still had."""
        assert self.host.exec(["systemctl", "is-active", "lab-witness"]).exit_status == 0
        assert self.host.exec(["cat", SIGNALS]).stdout == b""
        for name, before in self.bystanders.items():
            assert self.process(before[0]) == before, f"{name} was {before}"
        for seen in self.holding():
            for one in seen:
                others = [o for o in seen if o.card == one.card and _begun_beside(one, o)]
                assert not others, f"{one} began while it was held by {others}"


def _begun_beside(one: Holding, other: Holding) -> bool:
    """Say whether a server's run began although another run, or somebody else, had the card."""
    if not one.group.startswith("/system.slice/row-") or not one.run:
        return False
    return other.run != one.run and other.group != one.group and other.start < one.start


def program(host: SystemdHost, name: str, code: str, *words: str) -> int:
    """Run python code as a unit of its own, and return its pid."""
    host.check(["sh", "-c", f"cat >/usr/local/lib/{name}.py"], code.encode())
    run = ["systemd-run", "--quiet", f"--unit={name}", "--property=KillMode=process"]
    host.check([*run, "/usr/bin/python3", f"/usr/local/lib/{name}.py", *words])
    return int(host.check(["systemctl", "show", "--property=MainPID", "--value", name]))
