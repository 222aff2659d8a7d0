"""Simulated hosts, a fleet in text, and passes over them: what the tests of steering and pruning share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reconciler.core.conditions import ServerResult
from reconciler.core.fleet import Fleet, load_fleet
from reconciler.core.plan import Permissions, ServerPlan
from reconciler.core.pruning import Pruning
from reconciler.engines import custom
from reconciler.lab.schedule import BEHAVIOURS
from reconciler.lab.simulated import SimulatedHost, add_host
from reconciler.lab.simulated_ports import controller_world
from reconciler.lab.world import World
from reconciler.reconcile import act, survey

ENGINES = {"custom": custom}
HOST = "apiVersion: reconciler/v1\nkind: Host\nname: {name}\n"
SERVER = """---
apiVersion: reconciler/v1
kind: Server
name: {name}
host: {host}
gpus: [{gpu}]
engine: {{name: custom, command: [/usr/bin/serve, --port, "{port}", --steps, "{steps}"]}}
model: qwen
listen: {{address: 127.0.0.1, port: {port}}}
timeouts: {{drain: 1s, stop: 20s, release: 30s, ready: 60s, gate: 60s}}
gate: {{quality: "off", runs: [{{name: single, concurrency: 1, requests: 64, max_tokens: 64, min_decode_tps: 100}}]}}
"""


class Stage:
    """Hosts, each with GPUs of its own, and one controller of all."""

    def __init__(self, *hosts: str, pruning: Pruning | None = None) -> None:
        self.world = World(1)
        self.hosts: dict[str, SimulatedHost] = {}
        for name in hosts or ("one",):
            self.hosts[name] = add_host(self.world, name, gpus=4)
            self.hosts[name].host.paths["/usr/bin/serve"] = {
                "kind": "file", "size": 1, "mode": 0o755, "uid": 0, "gid": 0, "executable": True,
            }  # fmt: skip
            for steps, behaviour in BEHAVIOURS.items():
                self.hosts[name].host.behave(f"--steps {steps}", behaviour)
        self.controller = controller_world(
            self.world, self.hosts, ENGINES, pruning=pruning or Pruning()
        )

    def prune(self, pruning: Pruning) -> None:
        """Let the operator decide otherwise."""
        self.controller = replace(self.controller, pruning=pruning)

    def text(self, **servers: str) -> str:
        """Give the fleet's text: `name="host gpu steps"`, and more lines behind a newline."""
        parts = ["---\n".join(HOST.format(name=name) for name in self.hosts)]
        for at, (name, said) in enumerate(servers.items()):
            first, _, more = said.partition("\n")
            host, gpu, steps = first.split()
            rest = {"name": name.replace("_", "-"), "host": host, "gpu": gpu, "steps": steps}
            parts.append(SERVER.format(port=30000 + at, **rest) + (more + "\n" if more else ""))
        return "".join(parts)

    def fleet(self, text: str) -> Fleet:
        """Read it."""
        return load_fleet({"specs/fleet.yaml": text.encode()}, engines=ENGINES)

    def plans(self, text: str, **allow: object) -> Mapping[str, ServerPlan]:
        """Plan, and change nothing."""
        found = survey(self.fleet(text), self.controller, allow=Permissions(**allow))  # type: ignore[arg-type]
        return {p.wish.server: p for p in found.plan.servers}

    def apply(self, text: str, **allow: object) -> Mapping[str, ServerResult]:
        """Make one pass."""
        found = survey(self.fleet(text), self.controller, allow=Permissions(**allow))  # type: ignore[arg-type]
        return {r.server: r for r in act(found, self.controller, lambda _event: None)}

    def settle(self, text: str, passes: int = 8) -> Mapping[str, ServerResult]:
        """Make passes until nothing moves."""
        results: Mapping[str, ServerResult] = {}
        for _ in range(passes):
            results = self.apply(text)
        return results

    def serving(self, name: str, host: str = "one") -> bool:
        """Say whether a server's unit has a process, by the world's own truth."""
        return any(p.unit == f"{name}.service" for p in self.hosts[host].host.processes.values())
