"""Carry out one effect and say what came of it. The only code that a rollout touches the world with.

It holds no opinions: what follows a reply is `core.rollout.step`'s to say. What it adds to an effect is what only the edge
knows: the nonce of a request, the host's own clock (`not_after`), the intent in bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from reconciler.core import checks
from reconciler.core.attempt import BARE, Attempt, Member, Phase, dump
from reconciler.core.desired import Target
from reconciler.core.effect import (
    LEASE_UNWRITTEN,
    Acted,
    CheckFlags,
    Claim,
    Claimed,
    Commit,
    Disarm,
    Done,
    Effect,
    Fence,
    GiveBack,
    Inspect,
    Install,
    Learn,
    Load,
    Look,
    Lost,
    Measure,
    Measured,
    Mutation,
    Observed,
    PollLoad,
    Probe,
    Probed,
    Quarantine,
    Record,
    Remove,
    Reply,
    SetAside,
    Settle,
    Signal,
    Start,
    Stop,
    Turned,
    Unreachable,
    Wait,
    Waited,
    deadline_s,
)
from reconciler.core.errors import (
    CommandFailedError,
    HostIdentityError,
    HostUnreachableError,
    OutcomeUnknownError,
)
from reconciler.core.live import LiveHost, join_layers, parse_live
from reconciler.core.revision import restored
from reconciler.core.sealed import digests_in
from reconciler.core.spec import Server
from reconciler.effects.channel import encode_body
from reconciler.effects.inspect import check_flags, inspect, known_flags
from reconciler.effects.ports import Answer, HostPort, LeftError, Ports, Request
from reconciler.engines.base import Engine, HttpRequest, NotYet, Ready, Wrong, secret_path

JOURNAL_LINES = 40
JOURNAL_DEEP = 500
"""As many as the helper gives: the first line that matters stands above a traceback of every rank."""
"""Of the current run, with each observation: enough to say why it died; `logs` shows more."""

PROBE_BODY_BYTES = 256 * 1024


@dataclass
class HostTime:
    """What the host's clock said last, and when we heard it: `not_after` is reckoned from this."""

    boottime: float = 0.0
    heard: float = 0.0

    def later(self, now: float, seconds: float) -> float:
        """Give the host's boot time `seconds` from now."""
        return self.boottime + (now - self.heard) + seconds


@dataclass
class Performer:
    """Carries out the effects of one attempt."""

    ports: Ports
    time: HostTime = field(default_factory=HostTime)
    specs: dict[str, Server | None] = field(default_factory=dict)

    def perform(self, state: Attempt, effect: Effect) -> Reply:
        """Carry out `effect` and give the reply. Host errors become replies; anything else is a bug and passes."""
        clock = self.ports.clock
        try:
            return self._perform(state, effect)
        except HostIdentityError as error:
            return Unreachable(clock.now(), str(error), identity=True)
        except (HostUnreachableError, CommandFailedError) as error:
            return Unreachable(clock.now(), str(error))
        except OutcomeUnknownError as error:
            return Lost(clock.now(), str(error))
        except LeftError as left:
            return left.leave

    def _perform(self, state: Attempt, effect: Effect) -> Reply:
        clock = self.ports.clock
        match effect:
            case Wait(seconds=seconds, why=why):
                self.ports.on_progress(why)
                clock.sleep(seconds)
                return Waited(clock.now())
            case Look():
                live = observe(
                    self.ports.host,
                    look_args(state, effect),
                    deadline_s=deadline_s(effect),
                    time=self.time,
                    clock=clock,
                )
                return Observed(clock.now(), live)
            case Claim():
                return self._claim(effect)
            case GiveBack(server=server, fence=fence):
                args = {
                    "server": server,
                    "holder": self.ports.holder,
                    "ttl_s": 0,
                    "takeover": False,
                }
                return self._ask(Request("claim", args, server=server, fence=_fence(fence)), effect)
            case Inspect():
                return self._read(inspect(self.ports.host, effect))
            case CheckFlags():
                if known_flags(self.ports.host, effect, self.ports.flags):
                    return Acted(clock.now(), checks.ALL_FLAGS)
                return self._read(check_flags(self.ports.host, effect, self.ports.flags))
            case PollLoad(target=target):
                return self._poll_load(target)
            case Probe(target=target):
                return self._probe(target)
            case Measure(server=server, target=target, deadline_s=limit):
                return self._measure(state, server, target, limit)
            case Done():
                raise AssertionError("a rollout that is done has nothing left to perform")
            case _:
                return self._mutate(state, effect)

    # -- requests to the helper -----------------------------------------------------------------------------

    def _ask(self, request: Request, effect: Effect) -> Reply:
        answer = self.ports.host.call(request, deadline_s=deadline_s(effect))
        return self._read(answer)

    def _read(self, answer: Answer) -> Reply:
        now = self.ports.clock.now()
        self._heard(answer, now)
        if answer.outcome == "done":
            return Acted(now, answer.data)
        return Turned(now, answer.reason or "Failed", answer.message, answer.data)

    def _heard(self, answer: Answer, now: float) -> None:
        self.time.boottime, self.time.heard = answer.boottime, now

    def _claim(self, effect: Claim) -> Reply:
        args = {
            "server": effect.server,
            "holder": self.ports.holder,
            "ttl_s": effect.ttl_s,
            "takeover": effect.takeover,
        }
        fence = _fence(effect.renew) if effect.renew is not None else None
        answer = self.ports.host.call(
            Request("claim", args, server=effect.server, fence=fence), deadline_s=deadline_s(effect)
        )
        now = self.ports.clock.now()
        self._heard(answer, now)
        if answer.outcome == "failed":
            return Turned(now, LEASE_UNWRITTEN, answer.message, answer.data)
        if answer.outcome != "done":
            return Turned(now, answer.reason or "Failed", answer.message, answer.data)
        given = answer.data["fence"]
        return Claimed(
            now,
            effect.server,
            Fence(int(given["epoch"]), str(given["nonce"])),
            effect.ttl_s,
            answer.boot_id,
        )

    def _mutate(self, state: Attempt, effect: Mutation) -> Reply:
        member = next(m for m in state.members if m.server == effect.server)
        if member.fence is None:
            raise AssertionError(f"{type(effect).__name__} of {effect.server} without a fence")
        verb, args = verb_of(effect)
        if isinstance(effect, Install):
            args = with_secrets(args, effect.target, self.ports.secrets)
        limit = deadline_s(effect)
        request = Request(
            verb,
            args,
            server=effect.server,
            fence=_fence(member.fence),
            boot_id=member.boot_id,
            not_after=self.time.later(self.ports.clock.now(), limit),
            intent=intent_of(state, member) if carries_intent(state) else None,
        )
        return self._ask(request, effect)

    # -- requests to the server ------------------------------------------------------------------------------

    def _poll_load(self, target: Target) -> Reply:
        spec = self.spec_of(target)
        request = spec[1].in_flight_request(spec[0]) if spec is not None else None
        if spec is None or request is None:
            return Load(self.ports.clock.now(), None)
        server, engine = spec
        status, body = self._fetch(server, request)
        return Load(self.ports.clock.now(), engine.in_flight(status, body))

    def _probe(self, target: Target) -> Reply:
        spec = self.spec_of(target)
        if spec is None:
            return Probed(
                self.ports.clock.now(), "not-yet", "this version cannot read the recorded spec"
            )
        server, engine = spec
        requests = engine.ready_requests(server)
        answer = engine.alive(server, *self._fetch(server, requests.alive))
        if isinstance(answer, Ready) and requests.generation is not None:
            answer = engine.generation_ok(server, *self._fetch(server, requests.generation))
        now = self.ports.clock.now()
        match answer:
            case Ready():
                return Probed(now, "ready", "a real generation was answered")
            case NotYet(why=why):
                return Probed(now, "not-yet", why)
            case Wrong(why=why):
                return Probed(now, "wrong", why)

    def _fetch(self, server: Server, request: HttpRequest) -> tuple[int | None, bytes]:
        """Ask the server over its own host's loopback; (None, b"") when no HTTP answer came."""
        answer = self.ports.host.call(
            Request("fetch", fetch_args(server, request)), deadline_s=20.0
        )
        self._heard(answer, self.ports.clock.now())
        known = answer.data.get("known") if answer.outcome == "done" else None
        if not isinstance(known, Mapping):
            return None, b""
        return int(known["status"]), base64.b64decode(str(known.get("body") or ""))

    def _measure(self, state: Attempt, server: str, target: Target, limit: float) -> Reply:
        spec = self.spec_of(target)
        if spec is None:
            message = "this version cannot read the recorded spec"
            return Measured(self.ports.clock.now(), "error", message, "{}")

        def on_progress(line: str) -> None:
            self.ports.on_progress(line)
            leave = self.ports.leaving(state, self.ports.clock.now())
            if leave is not None:
                raise LeftError(leave)

        report = self.ports.gate(
            target,
            spec[1],
            self.ports.host,
            self.ports.baselines.get(server),
            deadline_s=limit,
            on_progress=on_progress,
        )
        evidence = json.dumps({**report.evidence, "verdict": report.verdict}, sort_keys=True)
        return Measured(self.ports.clock.now(), report.verdict, report.message, evidence)

    def spec_of(self, target: Target) -> tuple[Server, Engine] | None:
        """Give the document and engine of a target, read once per revision; None where this version cannot read it."""
        if target.revision not in self.specs:
            self.specs[target.revision] = restored(json.loads(target.spec), self.ports.engines)
        server = self.specs[target.revision]
        return None if server is None else (server, self.ports.engines[server.engine.name])


def fetch_args(server: Server, request: HttpRequest) -> dict[str, Any]:
    """Phrase a request to a server over its own host's loopback; the key is read there."""
    key = server.listen.api_key
    return {
        "method": request.method,
        "address": "127.0.0.1"
        if server.listen.address in {"0.0.0.0", "::"}  # noqa: S104  (compared, not bound)
        else server.listen.address,
        "port": server.listen.port,
        "path": request.path,
        "headers": dict(request.headers),
        "body": encode_body(request.body),
        "timeout_s": min(request.timeout_s, 15.0),
        "max_bytes": PROBE_BODY_BYTES,
        "bearer_file": secret_path(server.name, key)
        if key is not None and request.authorized
        else None,
    }


def look_args(state: Attempt, effect: Look) -> dict[str, Any]:
    """Phrase an observation of the attempt's members."""
    lines = JOURNAL_DEEP if effect.deep else JOURNAL_LINES
    members = {m.server: m for m in state.members}
    return {
        "servers": [
            {
                "server": name,
                "unit": members[name].unit,
                "port": members[name].port,
                "invocation_lines": lines if effect.journal else 0,
            }
            for name in effect.servers
        ],
        "kernel_cursor": effect.kernel_cursor or None,
        "paths": list(effect.paths),
        "users": list(effect.users),
        "gpus": effect.gpus,
    }


def records_of(servers: Iterable[tuple[str, str]], *, gpus: bool = False) -> dict[str, Any]:
    """Phrase a look at servers, each with its unit, of which only the state and the records count."""
    asked = [
        {"server": name, "unit": unit, "port": None, "invocation_lines": 0}
        for name, unit in servers
    ]
    return {"servers": asked, "kernel_cursor": None, "paths": [], "users": [], "gpus": gpus}


def observe(
    host: HostPort,
    args: Mapping[str, Any],
    *,
    deadline_s: float,
    time: HostTime | None = None,
    clock: Any = None,
) -> LiveHost:
    """Observe both layers of a host and join what they saw."""
    answer = host.call(Request("observe", args), deadline_s=deadline_s)
    if time is not None and clock is not None:
        time.boottime, time.heard = answer.boottime, clock.now()
    if answer.outcome != "done":
        raise CommandFailedError(
            host.name, f"the helper would not observe: {answer.message or answer.reason}"
        )
    outer = (
        host.observe_outer({**args, "servers": []}, deadline_s=deadline_s) if args["gpus"] else None
    )
    data = dict(answer.data) if outer is None else join_layers(answer.data, outer)
    return parse_live(data)


def carries_intent(state: Attempt) -> bool:
    """Say whether what is done now would leave something to go on with: from disarm to commit, and not for a bare look."""
    return state.leg not in BARE and state.phase not in {Phase.ACQUIRE, Phase.FINISHED}


def intent_of(state: Attempt, member: Member) -> dict[str, Any]:
    """Give the state as the host keeps it: enough for anybody to go on from."""
    return {
        "version": 1,
        "state": dump(state),
        "revision": member.new.revision if member.new else "",
    }


def _fence(fence: Fence) -> dict[str, Any]:
    return {"epoch": fence.epoch, "nonce": fence.nonce}


def verb_of(effect: Mutation) -> tuple[str, dict[str, Any]]:
    """Phrase a mutation in the helper's words."""
    match effect:
        case Record(name=name, content=content, rebind=rebind):
            args = {"name": name, "content": None if content is None else json.loads(content)}
            return "record", {**args, "rebind": True} if rebind else args
        case Disarm():
            return "disarm", {
                "unit": effect.unit,
                "stop_timeout_s": effect.stop_timeout_s,
                "deadline_s": effect.deadline_s,
                "grace_s": effect.grace_s,
            }
        case Stop():
            return "stop", {"unit": effect.unit, "invocation": effect.invocation}
        case Signal():
            targets = [{"pid": pid, "start_ticks": ticks} for pid, ticks in effect.targets]
            return "signal", {
                "unit": effect.unit,
                "signal": effect.signal,
                "group": effect.group,
                "targets": targets,
            }
        case Install(target=target):
            return "install", {
                "unit": effect.unit,
                "place": effect.place,
                "revision": target.revision,
                "text": target.unit_text,
                "argv": list(target.argv),
                "environment": list(target.environment),
                "server_json": content_of(target),
                "secrets": [
                    {"form": s.form, "entries": dict(s.entries), "user": s.user}
                    for s in target.secrets
                ],
                "saved_sha": effect.saved_sha,
            }
        case SetAside():
            drop_ins = [{"path": path, "sha": sha} for path, sha in effect.drop_ins]
            return "set-aside", {"unit": effect.unit, "drop_ins": drop_ins}
        case Remove():
            return "remove", {"unit": effect.unit, "what": list(effect.what)}
        case Start():
            return "start", {"unit": effect.unit, "previous_invocation": effect.previous_invocation}
        case Commit(target=target):
            evidence = json.loads(effect.evidence)
            applied = {
                "version": 1,
                "revision": target.revision,
                "unit_sha256": target.text_sha256,
                "spec": target.spec,
                "evidence": {
                    k: evidence[k] for k in ("verdict", "kind", "message") if k in evidence
                },
            }
            return "commit", {
                "unit": effect.unit,
                "revision": target.revision,
                "text": target.unit_text,
                "invocation": effect.invocation,
                "applied": applied,
                "gate": None if evidence.get("kind") == "smoke" else evidence,
                "saved_sha": effect.saved_sha,
            }
        case Learn():
            return "learn", {}
        case Quarantine():
            return "quarantine", {
                "gpus": list(effect.gpus),
                "kind": effect.kind,
                "reasons": list(effect.reasons),
                "pids": list(effect.pids),
            }
        case Settle():
            return "settle", {"unit": effect.unit, "what": effect.what}


def with_secrets(args: dict[str, Any], target: Target, opened: Mapping[str, str]) -> dict[str, Any]:
    """Add the secrets that lie encrypted in the repository. One that is not opened here is on the host already, or its verb refuses."""
    sent = {d: opened[d] for d in sorted(digests_in(target.spec)) if d in opened}
    return {**args, "sealed": sent} if sent else args


def content_of(target: Target) -> dict[str, Any]:
    """Give what the host keeps of a revision beside its unit: enough to bring it up again with git away."""
    return {
        "version": 1,
        "revision": target.revision,
        "argv": list(target.argv),
        "environment": list(target.environment),
        "secrets": [
            {"form": s.form, "entries": [list(e) for e in s.entries], "user": s.user}
            for s in target.secrets
        ],
        "spec": json.loads(target.spec) if target.spec else None,
        "gpu_uuids": list(target.gpu_uuids),
        "port": target.port,
        "user": target.user,
        "paths": list(target.paths),
        "flags": list(target.flags),
        "check_argv": list(target.check_argv),
        **({"demands": asdict(target.demands)} if target.demands is not None else {}),
    }
