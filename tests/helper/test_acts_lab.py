"""The joined program on a real systemd: enrol, a rollout, a rollback by the host, and what the guard keeps out."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest

from reconciler.helper import build
from reconciler.helper.records import helper_command
from reconciler.lab.hosts import SystemdHost

pytestmark = pytest.mark.lab

UNIT = "qwen.service"
HOLD = "/usr/local/bin/fakegpu-hold"


class LabController:
    """Sends requests to the helper in a lab host, as a controller does over ssh."""

    def __init__(self, host: SystemdHost) -> None:
        self.host = host
        self.fence: dict[str, Any] | None = None
        self.boot_id, self.boottime = "", 0.0
        self.heard = time.monotonic()

    def send(self, request: dict[str, Any], *, carried: bool = False) -> dict[str, Any]:
        """Send one request and return its answer."""
        if carried:
            out = self.host.check(["/usr/bin/python3", "-I", "-S", "-"], build.carried(request))
        else:
            line = json.dumps(request).encode() + b"\n"
            out = self.host.check(helper_command(build.digest()).split(), line)
        match = re.search(r"@@reconciler-begin ([0-9a-f]+) \d+\n(.*)\n@@reconciler-end", str(out))
        assert match is not None, out
        assert match.group(1) == request["nonce"], out
        answer: dict[str, Any] = json.loads(match.group(2))
        self.boot_id, self.boottime, self.heard = (
            answer["boot_id"],
            answer["boottime"],
            time.monotonic(),
        )
        return answer

    def ask(
        self, verb: str, *, intent: dict[str, Any] | None = None, **args: Any
    ) -> dict[str, Any]:
        """Send a request under the current fence."""
        request: dict[str, Any] = {
            "format": 1,
            "nonce": secrets.token_hex(16),
            "verb": verb,
            "args": args,
            "server": "qwen",
            "boot_id": self.boot_id,
            "not_after": self.boottime + (time.monotonic() - self.heard) + 30,
        }
        if self.fence is not None:
            request["fence"] = self.fence
        if intent is not None:
            request["intent"] = intent
        return self.send(request)

    def done(
        self, verb: str, *, intent: dict[str, Any] | None = None, **args: Any
    ) -> dict[str, Any]:
        """Send a request that must succeed."""
        answer = self.ask(verb, intent=intent, **args)
        assert answer["outcome"] == "done", answer
        data: dict[str, Any] = answer["data"]
        return data

    def claim(self, ttl_s: float = 300) -> None:
        """Claim the server."""
        self.fence = None
        self.fence = self.done("claim", holder="lab", ttl_s=ttl_s, takeover=True)["fence"]

    def enrol(self) -> dict[str, Any]:
        """Enrol the host."""
        args = {
            "program": build.program(),
            "digest12": build.digest(),
            "sudo_user": None,
            "protect": [],
            "learn": True,
        }
        request = {"format": 1, "nonce": secrets.token_hex(16), "verb": "enrol", "args": args}
        answer = self.send(request, carried=True)
        assert answer["outcome"] == "done", answer
        data: dict[str, Any] = answer["data"]
        return data

    def see(self) -> dict[str, Any]:
        """Return the server's section of an observation."""
        asked = [{"server": "qwen", "unit": UNIT, "port": 30000, "invocation_lines": 20}]
        data = self.done(
            "observe", servers=asked, gpus=True, paths=[], users=[], kernel_cursor=None
        )
        section: dict[str, Any] = data["servers"]["qwen"]
        return {**section, "holders": data["holders"], "props": section["unit"]["known"]}

    def until(
        self, condition: Callable[[dict[str, Any]], bool], limit_s: float = 30
    ) -> dict[str, Any]:
        """Observe until a condition holds."""
        end = time.monotonic() + limit_s
        while True:
            seen = self.see()
            if condition(seen):
                return seen
            assert time.monotonic() < end, json.dumps(seen)[:6000]
            time.sleep(0.3)

    def file(self, path: str) -> str:
        """Return a file of the host."""
        return str(self.host.check(["cat", path]))


def unit(model: str, *more: str) -> tuple[str, list[str]]:
    """Return a unit's text and argv for a simulated engine."""
    argv = [HOLD, "--gpu", "0", "--mib", "8000", "--serve", "30000", "--model", model, *more]
    line = " ".join('"' + word.replace("$", "$$").replace("%", "%%") + '"' for word in argv)
    text = (
        f"[Unit]\nDescription={model}\nRequires=reconciler-guard@qwen.service\nAfter=reconciler-guard@qwen.service\n"
        f'[Service]\nType=exec\nSupplementaryGroups=60706\nExecStart={line}\nEnvironment="RECONCILER_SERVER=qwen"\n'
        'Environment="SPT_NOENV=1"\nPrivateMounts=yes\nRestart=on-failure\nRestartSec=1s\nTimeoutStopSec=20s\n'
        "[Install]\nWantedBy=multi-user.target\n"
    )
    return text, argv


def revision(model: str) -> str:
    """Return a revision for a model's name."""
    return hashlib.sha256(model.encode()).hexdigest()


def install(controller: LabController, model: str, *more: str) -> None:
    """Install a trial."""
    text, argv = unit(model, *more)
    controller.done(
        "install",
        intent={"state": {}, "revision": revision(model)},
        unit=UNIT,
        place="trial",
        revision=revision(model),
        text=text,
        argv=argv,
        environment=["RECONCILER_SERVER=qwen", "SPT_NOENV=1"],
        server_json={"name": "qwen"},
        secrets=[],
        saved_sha=None,
    )


def disarm_and_stop(controller: LabController, deadline_s: float = 600) -> str:
    """Bring the running server down and return its invocation."""
    old = str(controller.see()["props"]["InvocationID"])
    data = controller.done(
        "disarm", unit=UNIT, stop_timeout_s=20, deadline_s=deadline_s, grace_s=30
    )
    assert (data["restart"], data["timeout_stop_us"]) in (("no", 20_000_000), ("no", 90_000_000))
    if old:
        controller.done("stop", unit=UNIT, invocation=old)
        controller.until(lambda s: s["props"]["ActiveState"] in ("inactive", "failed"))
    return old


def start(controller: LabController, previous: str) -> dict[str, Any]:
    """Start and wait until it runs under a new invocation."""
    controller.done("start", unit=UNIT, previous_invocation=previous or None)
    return controller.until(
        lambda s: s["props"]["ActiveState"] == "active" and s["props"]["InvocationID"] != previous
    )


def deploy(controller: LabController, model: str) -> None:
    """Roll a revision out."""
    controller.claim()
    uuid = controller.done("release-check", uuids=[], unit=None)["gpus"]["known"]["gpus"][0]["uuid"]
    controller.done(
        "record", name="bindings", content={"unit": UNIT, "gpus": [uuid], "gid": 60706, "uid": 0}
    )
    controller.done("record", name="attempted", content={"revision": revision(model)})
    old = disarm_and_stop(controller)
    install(controller, model)
    seen = start(controller, old)
    controller.done(
        "commit",
        unit=UNIT,
        revision=revision(model),
        text=unit(model)[0],
        invocation=seen["props"]["InvocationID"],
        applied={"commit": "abc"},
        gate=None,
        saved_sha=None,
    )


def test_a_rollout_its_revert_and_the_guard_on_a_real_systemd(lab_host: SystemdHost) -> None:
    """Two revisions go out; a third is left behind and the host's own tick brings the second back."""
    controller = LabController(lab_host)
    enrolled = controller.enrol()
    assert enrolled["digest"] == build.digest()
    assert enrolled["baselines"]
    deploy(controller, "first")
    seen = controller.see()
    assert seen["props"]["FragmentPath"] == f"/etc/systemd/system/{UNIT}"
    assert seen["props"]["UnitFileState"] == "enabled"
    assert seen["command"]["known"]["argv"] == unit("first")[1]
    deploy(controller, "second")
    second = controller.see()["props"]

    # A third revision is started, and its controller is gone: the lease is short, the deadline near.
    controller.claim(20)
    controller.done("record", name="attempted", content={"revision": revision("third")})
    old = disarm_and_stop(controller, deadline_s=25)
    install(controller, "third")
    start(controller, old)
    assert controller.see()["props"]["FragmentPath"].startswith("/run/systemd/system.control/")
    back = controller.until(
        lambda s: (
            s["props"]["ActiveState"] == "active"
            and s["props"]["FragmentPath"] == f"/etc/systemd/system/{UNIT}"
            and s["records"]["known"]["deadline"] is None
        ),
        limit_s=90,
    )
    assert back["permanent"]["known"]["text"] == unit("second")[0]
    assert back["props"]["InvocationID"] not in ("", second["InvocationID"])
    assert back["history"]["known"][-1]["by"] == "host-revert"
    assert [r["revision"] for r in back["records"]["known"]["rejected"]] == [revision("third")]
    assert controller.ask("deadline", after_s=None, grace_s=0)["reason"] == "StaleFence"


def test_the_guard_keeps_a_start_off_a_held_gpu(lab_host: SystemdHost) -> None:
    """A stranger on the GPU: the unit stays inactive, and comes up by the tick when the stranger has gone."""
    controller = LabController(lab_host)
    controller.enrol()
    deploy(controller, "first")
    controller.done("claim", holder="lab", ttl_s=0, takeover=False)
    lab_host.check(["systemctl", "stop", UNIT])
    lab_host.check(["systemd-run", "--unit=stranger", HOLD, "--gpu", "0", "--mib", "500"])
    controller.until(lambda s: bool(s["holders"]["known"]["holders"]))
    lab_host.check(["systemctl", "start", "--no-block", UNIT])
    # While it judges, the record already says refused: a guard that is killed then has refused.
    refused = controller.until(
        lambda s: (
            "foreign" in str((s["records"]["known"]["guard"] or {}).get("reason"))
            and s["props"]["ActiveState"] == "inactive"
        )
    )
    assert refused["records"]["known"]["guard"]["outcome"] == "refused"
    lab_host.check(["systemctl", "stop", "stranger"])
    controller.until(lambda s: s["props"]["ActiveState"] == "active", limit_s=60)


def test_an_operators_drop_in_is_not_effective_for_us(lab_host: SystemdHost) -> None:
    """A later drop-in in /etc wins against ours: disarming says so and takes itself back."""
    controller = LabController(lab_host)
    controller.enrol()
    deploy(controller, "first")
    controller.claim()
    folder = f"/etc/systemd/system/{UNIT}.d"
    text = base64.b64encode(b"[Service]\nTimeoutStopSec=7s\n").decode()
    lab_host.check(
        ["sh", "-c", f"mkdir -p {folder} && echo {text} | base64 -d > {folder}/zzz-operator.conf"]
    )
    answer = controller.ask("disarm", unit=UNIT, stop_timeout_s=20, deadline_s=600, grace_s=30)
    assert (answer["outcome"], answer["reason"]) == ("refused", "NotEffective")
    seen = controller.see()
    assert seen["records"]["known"]["disarmed"] is False
    assert seen["props"]["ActiveState"] == "active"
    assert seen["props"]["Restart"] == "on-failure"


def test_enrolling_again_upgrades_and_unenrolling_takes_all_away(lab_host: SystemdHost) -> None:
    """A repeat changes nothing that matters; unenrol is refused while a lease stands and while a unit needs the guard."""
    controller = LabController(lab_host)
    controller.enrol()
    first = controller.enrol()
    assert first["digest"] == build.digest()
    assert "reconciler-tick.timer" in str(lab_host.check(["systemctl", "list-timers", "--all"]))
    controller.claim()

    def unenrol() -> dict[str, Any]:
        args = {"keep_records": False}
        return controller.send(
            {"format": 1, "nonce": secrets.token_hex(16), "verb": "unenrol", "args": args},
            carried=True,
        )

    assert unenrol()["reason"] == "LeaseHeld"
    controller.done("claim", holder="lab", ttl_s=0, takeover=False)
    assert unenrol()["outcome"] == "done"
    assert "reconciler" not in str(lab_host.check(["ls", "/etc/systemd/system"]))
    assert str(lab_host.check(["find", "/usr/local/lib/reconciler", "-type", "f"])).strip() == ""
