"""A controller for tests of the helper: sends requests as the protocol wants them, one after another."""

from __future__ import annotations

import hashlib
from typing import Any

from reconciler.lab.simulated import SimulatedHost, World, add_host

SERVER = "qwen"
UNIT = "qwen.service"
ARGV = [
    "/opt/sglang/bin/python",
    "-m",
    "sglang.launch_server",
    "--model-path",
    "qwen",
    "--port",
    "30000",
]


def unit_text(
    model: str = "qwen", *, guard: bool = True, environment: str = "", more: str = ""
) -> str:
    """Return a unit as the product renders it, in short."""
    argv = " ".join(f'"{word}"' for word in argv_for(model))
    needs = (
        "Requires=reconciler-guard@qwen.service\nAfter=reconciler-guard@qwen.service\n"
        if guard
        else ""
    )
    return (
        f"[Unit]\nDescription={model}\n{needs}StartLimitIntervalSec=600\nStartLimitBurst=3\n[Service]\nType=exec\n"
        f"User=sglang\nSupplementaryGroups=60706\nExecStart={argv}\n"
        f'Environment="RECONCILER_SERVER=qwen"\nEnvironment="SPT_NOENV=1"\n{environment}'
        f"PrivateMounts=yes\nRestart=on-failure\nRestartSec=5s\nTimeoutStopSec=60s\n{more}"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def argv_for(model: str) -> list[str]:
    """Return the argv of `unit_text(model)`."""
    return [model if word == "qwen" else word for word in ARGV]


def revision_of(model: str) -> str:
    """Return a revision for a model's name."""
    return hashlib.sha256(model.encode()).hexdigest()


class Controller:
    """Speaks to one simulated host, holds its lease, and keeps what the answers said."""

    def __init__(self, host: SimulatedHost, server: str = SERVER, holder: str = "tester") -> None:
        self.host = host
        self.server = server
        self.holder = holder
        self.fence: dict[str, Any] | None = None
        self.boot_id = ""
        self.sent: list[dict[str, Any]] = []

    def request(self, verb: str, **args: Any) -> dict[str, Any]:
        """Return a request with the current fence."""
        machine = self.host.machine()
        request: dict[str, Any] = {
            "format": 1,
            "nonce": self.host.world.hex(32),
            "verb": verb,
            "args": args,
            "server": self.server,
            "boot_id": self.boot_id or machine.boot_id(),
            "not_after": machine.boottime() + 30.0,
        }
        if self.fence is not None:
            request["fence"] = self.fence
        return request

    def ask(
        self, verb: str, *, intent: dict[str, Any] | None = None, **args: Any
    ) -> dict[str, Any]:
        """Send a request and return the answer."""
        request = self.request(verb, **args)
        if intent is not None:
            request["intent"] = intent
        self.sent.append(request)
        return self.host.call(request)

    def done(
        self, verb: str, *, intent: dict[str, Any] | None = None, **args: Any
    ) -> dict[str, Any]:
        """Send a request that must succeed and return its data."""
        answer = self.ask(verb, intent=intent, **args)
        assert answer["outcome"] == "done", answer
        data: dict[str, Any] = answer["data"]
        return data

    def refused(self, verb: str, **args: Any) -> str:
        """Send a request that must be refused and return the reason."""
        answer = self.ask(verb, **args)
        assert answer["outcome"] == "refused", answer
        reason: str = answer["reason"]
        return reason

    def claim(self, ttl_s: float = 300.0, *, takeover: bool = False) -> dict[str, Any]:
        """Claim the server."""
        self.fence = None
        data = self.done("claim", holder=self.holder, ttl_s=ttl_s, takeover=takeover)
        self.fence, self.boot_id = data["fence"], data["boot_id"]
        return data

    def bind(self, gpus: int = 2) -> None:
        """Bind the server to the host's first GPUs."""
        uuids = [gpu.uuid for gpu in self.host.host.gpus[:gpus]]
        self.done(
            "record",
            name="bindings",
            content={"unit": UNIT, "gpus": uuids, "gid": 60706, "uid": 990},
        )

    def props(self) -> dict[str, Any]:
        """Return the unit's properties."""
        reading = self.host.machine().unit(UNIT)
        known: dict[str, Any] = reading["known"]
        return known

    def disarm(self, deadline_s: float = 600.0) -> dict[str, Any]:
        """Disarm the unit."""
        return self.done("disarm", unit=UNIT, stop_timeout_s=60, deadline_s=deadline_s, grace_s=60)

    def install_args(
        self, model: str = "qwen", place: str = "trial", **other: Any
    ) -> dict[str, Any]:
        """Return the arguments of an install."""
        args: dict[str, Any] = {
            "unit": UNIT,
            "place": place,
            "revision": revision_of(model),
            "text": unit_text(model),
            "argv": argv_for(model),
            "environment": ["RECONCILER_SERVER=qwen", "SPT_NOENV=1"],
            "server_json": {"name": "qwen", "model": model},
            "secrets": [],
            "saved_sha": None,
        }
        args.update(other)
        return args

    def start(self, previous: str | None = None) -> dict[str, Any]:
        """Start the unit and let it come up."""
        data = self.done("start", unit=UNIT, previous_invocation=previous)
        self.host.world.advance(2.0)
        return data

    def commit_args(self, model: str = "qwen", **other: Any) -> dict[str, Any]:
        """Return the arguments of a commit of what runs."""
        args: dict[str, Any] = {
            "unit": UNIT,
            "revision": revision_of(model),
            "text": unit_text(model),
            "invocation": self.props()["InvocationID"],
            "applied": {"commit": "abc"},
            "gate": {"verdict": "pass"},
            "saved_sha": None,
        }
        args.update(other)
        return args

    def deploy(self, model: str = "qwen") -> None:
        """Roll one revision out, from claim to commit."""
        self.claim(takeover=True)
        self.bind()
        self.done("record", name="attempted", content={"revision": revision_of(model)})
        before = self.props()
        self.disarm()
        if before["ActiveState"] == "active":
            self.done("stop", unit=UNIT, invocation=before["InvocationID"])
            self.host.world.advance(2.0)
        self.done(
            "install",
            intent={"step": "install", "revision": revision_of(model)},
            **self.install_args(model),
        )
        self.start(before["InvocationID"] or None)
        self.host.world.advance(6.0)
        self.done("commit", **self.commit_args(model))

    def read(self, name: str) -> Any:
        """Return the bytes of a file in the server's state directory."""
        return self.host.host.files.data.get(f"/var/lib/reconciler/{self.server}/{name}")


def new_controller(seed: int = 0) -> Controller:
    """Return a controller of a new host with four GPUs."""
    return Controller(add_host(World(seed), "gpu-one"))
