"""From a spec to bytes: which cards its GPUs are, and the unit that would run. Pure.

Called by `reconcile.py` with what was observed; nothing is decided here about whether to act.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reconciler import takeover
from reconciler.core.applied import Applied
from reconciler.core.conditions import Reason
from reconciler.core.demands import load as load_demands
from reconciler.core.desired import Budgets, SecretsFile, Target, text_sha256
from reconciler.core.diff import Divergence, Excuse, RunningWith
from reconciler.core.live import Gpu, Known, LiveHost, LiveServer
from reconciler.core.plan import Wish
from reconciler.core.release import strangers_on
from reconciler.core.revision import (
    Change,
    canonical,
    changes,
    policy_digest,
    restored,
    revision,
    whole,
)
from reconciler.core.spec import Server
from reconciler.core.steps import group_number
from reconciler.engines.base import Engine, Launch, host_credentials, secrets_env_path
from reconciler.engines.catalogue import flag_history
from reconciler.engines.told import differences, equal, flattened, shown, written
from reconciler.systemd import (
    ServerUnit,
    UnitTextError,
    carried_over,
    same_but_for,
    server_unit,
    unit_environment,
)


class UnresolvedError(Exception):
    """The spec cannot be turned into bytes for this host; `reason` and the sentence say why. Never leaves this module."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


def wish_of(server: Server, engine: Engine, live: LiveHost) -> Wish:
    """Resolve one server against its host. What cannot be resolved is said in the wish, and nothing is planned."""
    found = live.servers.get(server.name)
    target: Target | None = None
    problem: tuple[Reason, str] | None = None
    if server.state == "running":
        try:
            uuids = bind_gpus(server, live, _bound_names(found))
            target = target_of(server, engine, uuids)
        except UnresolvedError as error:
            problem = (error.reason, str(error))
        except UnitTextError as error:
            problem = (Reason.SPEC_INVALID, str(error))
    applied = found.known_records.applied if found is not None and found.known_records else None
    return Wish(
        server=server.name,
        host=server.host,
        unit=server.unit,
        target=target,
        budgets=budgets_of(server),
        port=server.listen.port,
        gated=server.gate is not None,
        on_failure=server.on_failure,
        on_inconclusive=server.gate.on_inconclusive if server.gate else "ask",
        drift=server.drift,
        suspend=server.suspend,
        policy_digest=policy_digest(server),
        waivers=tuple(sorted(server.preflight.waive.items())),
        running_with=running_with(applied, server, engine, found),
        changes=_changes(applied, server),
        warnings=tuple(
            f"{path}: {text}" if path else text for path, text in engine.warnings(server)
        ),
        problem=problem,
        protect=server.protect,
        excuse=Excuse(tuple(sorted(server.drift_ignore.items()))),
        strangers=_strangers(server, target, found, live),
        stranger_differs=_stranger_differs(server, engine, target, live),
    )


def _strangers(
    server: Server, target: Target | None, found: LiveServer | None, live: LiveHost
) -> tuple[str, ...]:
    """Say who else has a card of a server open that serves; before a start that is preflight's to refuse."""
    records = found.known_records if found is not None else None
    if target is None or found is None or records is None or records.applied is None:
        return ()
    if records.applied.revision != target.revision:
        return ()  # Other cards may be wanted by now, and rightly in use.
    if found.phase != "running" or records.intent is not None:
        return ()
    return strangers_on(live, server.name, server.unit, found.context, target.gpu_uuids)


def excused(wish: Wish, found: LiveServer, recorded: Target | None) -> Wish:
    """Let an edit of keys that are not ours to keep be none: it is carried over into whatever is installed next.

    `recorded` is the applied revision as its host keeps it. An edit of anything beside those keys stays an edit.
    """
    live = found.permanent.value if isinstance(found.permanent, Known) else None
    keys, records = wish.excuse.keys, found.known_records
    if live is None or not keys or records is None or records.applied is None:
        return wish
    as_applied = text_sha256(live) == records.applied.unit_sha256
    if not as_applied and (recorded is None or not same_but_for(live, recorded.unit_text, keys)):
        return wish
    target = wish.target and carried(wish.target, live, keys)
    return replace(wish, excuse=replace(wish.excuse, unit=not as_applied), target=target)


def carried(target: Target, live: str, keys: frozenset[str]) -> Target:
    """Give a target whose unit has some keys as the host has them now."""
    return replace(target, unit_text=carried_over(target.unit_text, live, keys))


def _stranger_differs(
    server: Server, engine: Engine, target: Target | None, live: LiveHost
) -> tuple[str, ...] | None:
    """Compare a server that runs and was never applied here with what is wanted; None where there is none."""
    found = live.servers.get(server.name)
    records = found.known_records if found is not None else None
    if found is None or records is None or records.applied is not None or target is None:
        return None
    on_trial = not isinstance(found.trial, Known) or found.trial.value is not None
    if found.phase != "running" or on_trial or records.intent is not None:
        return None
    return takeover.differences(server, engine, target, live)


def running_with(
    applied: Applied | None, server: Server, engine: Engine, found: LiveServer | None
) -> RunningWith:
    """Say what a running server does otherwise than the revision that is applied here asks: by its argv, and by its own words."""
    if found is None or applied is None or found.phase != "running":
        return RunningWith()
    if applied.revision != revision(server):
        recorded = (
            restored(json.loads(applied.spec), {engine.name: engine}) if applied.spec else None
        )
        if recorded is None or recorded.engine.name != engine.name:
            return RunningWith(unknown="this version cannot read the spec that is applied")
        server = recorded
    version = server.engine.version
    loaded = found.argv.value if isinstance(found.argv, Known) else ()
    other, started_alike = _by_argv(engine, loaded, found.main_argv, version)
    unasked = list(_by_environment(server, engine, found, other))
    told = engine.about(server, found.told) if found.told else "it was not asked"
    started = engine.startup_told(server, found.started_with)
    if isinstance(told, str) and not started:
        asks = bool(engine.about_requests(server))
        return RunningWith(tuple(other), tuple(unasked), unknown=told if asks else "")
    told = (*(() if isinstance(told, str) else told), *started)
    asked = written(server)
    refused: list[Divergence] = unasked
    fields = {d.field for d in other}
    for word in told:
        for path, wanted, granted in differences(asked, word):
            if path in fields:
                continue
            fields.add(path)
            row = Divergence(path, shown(wanted), shown(granted), word.source)
            ours = path in word.asked and equal(wanted, word.asked[path])
            (refused if ours or started_alike else other).append(row)
    return RunningWith(tuple(other), tuple(refused), source=told[0].source if told else "")


ENVIRONMENT_VALUE_MAX = 4096
"""As much of a variable as a host tells."""


def _by_environment(
    server: Server, engine: Engine, found: LiveServer, other: list[Divergence]
) -> Iterator[Divergence]:
    """Compare what the main process was started with, with its unit's `Environment=`, for what the spec sets.

    Another value than the unit has is a process that was started otherwise: it goes to `other`. What this engine heeds and
    neither the spec nor the unit sets came from elsewhere (the service manager's own environment, a wrapper) and is given.
    """
    if not isinstance(found.runs_with, Known) or not isinstance(found.environment, Known):
        return
    unit = dict(pair.split("=", 1) for pair in found.environment.value if "=" in pair)
    runs = found.runs_with.value
    for name in ("CUDA_VISIBLE_DEVICES", *sorted(server.env)):
        wanted, given = unit.get(name), runs.get(name)
        if name == "CUDA_VISIBLE_DEVICES" and not str(given).startswith(("GPU-", "MIG-")):
            continue  # A unit that was taken over named its cards by number; the take-over has compared them.
        if wanted is None or given is None or "[redacted]" in given:
            continue
        if given != wanted[: max(len(given), ENVIRONMENT_VALUE_MAX)]:
            row = Divergence(f"env.{name}", shown(wanted), shown(given), "its environment")
            other.append(row)
    for name, value in sorted(runs.items()):
        if name.startswith(tuple(engine.variables)) and name not in {*server.env, *unit}:
            yield Divergence(f"env.{name}", "(not given)", shown(value), "its environment")


def _by_argv(
    engine: Engine, loaded: Sequence[str], running: Sequence[str], version: str | None
) -> tuple[list[Divergence], bool]:
    """Compare the main process's command line with its unit's, and say whether they are the same."""
    if not loaded or not running:
        return [], False
    if tuple(running[-len(loaded) :]) == tuple(loaded):
        return [], True  # Perhaps behind the interpreter of a script.
    before = flattened(engine.read_argv(loaded, {}, version=version))
    after = flattened(engine.read_argv(running, {}, version=version))
    if not after or not before or set(after).isdisjoint(before):
        return (
            [],
            False,
        )  # It renamed itself, or is another program altogether: nothing is known of its flags.
    rows = [
        Divergence(
            path,
            shown(before.get(path, "(not given)")),
            shown(after.get(path, "(not given)")),
            "its command line",
        )
        for path in sorted({*before, *after})
        if path not in before or path not in after or not equal(before[path], after[path])
    ]
    return rows, not rows


def budgets_of(server: Server) -> Budgets:
    """Give the waits of a rollout in seconds."""
    t = server.timeouts
    return Budgets(
        drain_s=t.drain,
        stop_s=t.stop,
        release_s=t.release,
        settle_s=t.settle,
        ready_s=t.ready,
        gate_s=t.gate,
    )


def bind_gpus(server: Server, live: LiveHost, bound: Mapping[str, str]) -> tuple[str, ...]:
    """Give the UUID of each GPU of the spec, in its order.

    A name that this host has bound before must still lead to the same card: a card that drops off renumbers the rest,
    and a server must never move to a neighbour's GPU by itself.

    Raises:
        UnresolvedError: Unreadable, missing, or bound to another card.
    """
    if not server.gpus:
        return ()
    if not isinstance(live.gpus, Known):
        raise UnresolvedError(
            Reason.UNREADABLE, f"the GPUs of {server.host} cannot be read: {live.gpus.reason}"
        )
    uuids = []
    for name in server.gpus:
        card = card_named(name, live.gpus.value)
        before = bound.get(str(name))
        if card is None:
            known = ", ".join(f"{g.index} ({g.uuid})" for g in live.gpus.value) or "none"
            raise UnresolvedError(
                Reason.QUARANTINED, f"{server.host} has no GPU {name}; it has {known}"
            )
        if before is not None and before != card.uuid:
            raise UnresolvedError(
                Reason.BINDING_CHANGED,
                f"GPU {name} of {server.host} was {before} and is now {card.uuid}: the cards were renumbered or one was exchanged. "
                f"Name the GPUs by UUID, or run `reconcile enrol {server.host}` to bind them anew",
            )
        uuids.append(card.uuid)
    return tuple(uuids)


def card_named(name: int | str, cards: Sequence[Gpu]) -> Gpu | None:
    """Find a card by index, UUID or PCI bus id."""
    for card in cards:
        if name == card.index or str(name) == card.uuid or _bus(str(name)) == _bus(card.bus_id):
            return card
    return None


def _bus(address: str) -> str:
    """Give a PCI address in one form: nvidia-smi writes the domain with eight digits, lspci with four or none."""
    parts = address.lower().split(":")
    return (
        ":".join([parts[0][-4:].rjust(4, "0"), *parts[1:]])
        if len(parts) == 3
        else f"0000:{address.lower()}"
    )


def _bound_names(found: LiveServer | None) -> Mapping[str, str]:
    bindings = found.known_records.bindings if found is not None and found.known_records else None
    names = (bindings or {}).get("names")
    return {str(k): str(v) for k, v in names.items()} if isinstance(names, Mapping) else {}


def target_of(server: Server, engine: Engine, uuids: Sequence[str]) -> Target:
    """Render one server for the cards it is bound to.

    Raises:
        UnitTextError: A value cannot be written so that systemd reads exactly it.
    """
    launch = engine.render(server, uuids)
    unit = ServerUnit(
        server=server.name,
        unit=server.unit,
        revision=revision(server),
        description=f"{server.name}: {server.model or server.engine.name} by {server.engine.name}",
        argv=launch.argv,
        environment=launch.environment,
        stop_s=server.timeouts.stop + engine.stop_extra_s,
        ready_s=server.timeouts.ready,
        user=server.runtime.user,
        working_directory=server.runtime.working_directory,
        environment_file=secrets_env_path(server.name) if launch.secret_env else None,
        credentials={**launch.credentials, **host_credentials(server)} or None,
        group_id=group_number(server.name),
        no_new_privileges=launch.no_new_privileges,
    )
    return Target(
        revision=revision(server),
        unit_text=server_unit(unit),
        argv=launch.argv,
        environment=unit_environment(unit),
        secrets=_secrets(server, launch),
        spec=canonical(whole(server)),
        gpu_uuids=tuple(uuids),
        port=server.listen.port,
        user=server.runtime.user,
        paths=launch.paths,
        flags=launch.flags_to_check,
        flag_history=tuple(
            (flag, told)
            for flag in launch.flags_to_check
            if (told := flag_history(engine.name, flag)) is not None
        ),
        check_argv=launch.check_argv or (),
        demands=launch.demands,
    )


def _secrets(server: Server, launch: Launch) -> tuple[SecretsFile, ...]:
    user = server.runtime.user or "root"
    files = []
    if launch.secret_env:
        files.append(SecretsFile("env", tuple(sorted(launch.secret_env.items())), user))
    if launch.secret_config:
        files.append(SecretsFile("yaml", tuple(sorted(launch.secret_config.items())), user))
    return tuple(files)


def _changes(applied: Applied | None, server: Server) -> tuple[Change, ...]:
    if applied is None or not applied.spec:
        return ()
    try:
        before = json.loads(applied.spec)
    except ValueError:
        return ()
    return tuple(c for c in changes(before, whole(server)) if c.path not in {"host", "state"})


def recorded_target(content: Mapping[str, Any], unit_text: str) -> Target | None:
    """Read a revision back from what a host keeps of it; None when it is not complete."""
    try:
        spec = content.get("spec")
        return Target(
            revision=str(content["revision"]),
            unit_text=unit_text,
            argv=tuple(content["argv"]),
            environment=tuple(content["environment"]),
            secrets=tuple(
                SecretsFile(
                    str(s["form"]), tuple((str(k), str(v)) for k, v in s["entries"]), str(s["user"])
                )
                for s in content["secrets"]
            ),
            spec=canonical(spec) if spec else "",
            gpu_uuids=tuple(content["gpu_uuids"]),
            port=content["port"],
            user=content["user"],
            paths=tuple(content["paths"]),
            flags=tuple(content["flags"]),
            check_argv=tuple(content["check_argv"]),
            demands=load_demands(content.get("demands")),
        )
    except (KeyError, TypeError, ValueError):
        return None


__all__ = [
    "UnresolvedError",
    "bind_gpus",
    "budgets_of",
    "card_named",
    "recorded_target",
    "target_of",
    "wish_of",
]
