"""See and steer: status, history, show, logs; rollback, retry, suspend, resume, restart."""

from __future__ import annotations

import getpass
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconciler.cli.context import (
    HERE,
    Format,
    Output,
    PassOutput,
    SpecsAt,
    guarded,
    load_snapshot,
    load_specs,
    one_server,
    out,
    out_markup,
    placed,
    say_problems,
    settings,
    stoppable,
    terminal_width,
)
from reconciler.core.errors import ReconcilerError, UsageError

if TYPE_CHECKING:
    from reconciler.core.live import LiveServer, Records
    from reconciler.core.spec import Host, Server
    from reconciler.effects.ports import HostPort
    from reconciler.settings import Settings

ServerName = Annotated[str, typer.Argument(help="A server of the specs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
RunFormat = Annotated[
    Output, typer.Option("--output", "-o", help="text, or json: NDJSON as of a run.")
]


def register(app: typer.Typer) -> None:
    """Mount the commands."""
    _register_seeing(app)
    _register_steering(app)


def _register_seeing(app: typer.Typer) -> None:
    @app.command()
    @placed
    def status(
        servers: Annotated[list[str] | None, typer.Argument(help="Only these servers.")] = None,
        specs: SpecsAt = HERE,
        output: Format = Output.TEXT,
        export: Annotated[
            str,
            typer.Option(
                "--export",
                metavar="FILE",
                help="Save the state for `--dry-run --against`; - prints it, branch:NAME pushes it.",
            ),
        ] = "",
    ) -> None:
        """Show how every server stands against its spec, and its GPUs. Changes nothing.

        Examples:
            reconcile status
            reconcile status qwen -o json
            reconcile status --export state.json     for builds that may not reach the hosts
        """
        guarded(lambda: _status(tuple(servers or ()), specs, output, export))

    @app.command()
    @placed
    def history(server: ServerName, specs: SpecsAt = HERE, output: Format = Output.TEXT) -> None:
        """Show the last rollouts of a server, as its host recorded them.

        Example:
            reconcile history qwen
        """
        guarded(lambda: _history(server, specs, output))

    @app.command()
    @placed
    def show(
        server: ServerName,
        revision: Annotated[
            str, typer.Argument(help="The first digits of a revision; the applied one if left out.")
        ] = "",
        specs: SpecsAt = HERE,
        output: Format = Output.TEXT,
        resolved: Annotated[
            bool,
            typer.Option(
                "--resolved",
                help="Show the merged spec instead, and where each value was written; asks no host.",
            ),
        ] = False,
    ) -> None:
        """Show a revision that the host keeps: its unit, its spec, what its gate measured.

        Examples:
            reconcile show qwen
            reconcile show qwen 3f1c9a -o json
            reconcile show qwen --resolved
        """
        if resolved:
            guarded(lambda: _resolved(server, revision, specs, output))
        guarded(lambda: _show(server, revision, specs, output))

    @app.command()
    @placed
    def logs(
        server: ServerName,
        lines: Annotated[
            int, typer.Option("--lines", "-n", min=1, max=500, help="How many.")
        ] = 100,
        specs: SpecsAt = HERE,
        output: Annotated[
            Output, typer.Option("--output", "-o", help="text, or json: one object a line.")
        ] = Output.TEXT,
    ) -> None:
        """Show the last lines that a server's unit wrote to the journal.

        Examples:
            reconcile logs qwen -n 30
            reconcile logs qwen -o json | jq -r .message
        """
        guarded(lambda: _logs(server, lines, specs, output))


def _register_steering(app: typer.Typer) -> None:
    @app.command()
    @placed
    def suspend(
        server: ServerName,
        reason: Annotated[str, typer.Option("--reason", help="Why, for whoever finds it.")] = "",
        lasting: Annotated[
            str | None,
            typer.Option("--for", metavar="4h", help="How long it binds; then it only reminds."),
        ] = None,
        until: Annotated[
            str | None,
            typer.Option(
                "--until", metavar="TIME", help="Until when it binds, such as 2026-12-04T18:00."
            ),
        ] = None,
        specs: SpecsAt = HERE,
    ) -> None:
        """Leave a server alone until `resume`, or for some time: it is observed and not touched. Kept on its host.

        A hold that has run out binds nobody any more; it is shown as a reminder until `resume`.

        Examples:
            reconcile suspend qwen --reason "profiling" --for 2d
            reconcile suspend qwen --reason "demo" --until 2026-12-04T18:00
        """
        guarded(lambda: _suspend(server, reason, end_of_hold(lasting, until, time.time()), specs))

    @app.command()
    @placed
    def resume(server: ServerName, specs: SpecsAt = HERE) -> None:
        """End a hold on a server.

        Example:
            reconcile resume qwen
        """
        guarded(lambda: _write(server, specs, [("hold", None)], f"{server}: the hold is gone"))

    @app.command()
    @placed
    def retry(
        server: ServerName,
        token: Annotated[
            str | None,
            typer.Option(
                "--token", help="Name this request: the pass that answers it says so on the host."
            ),
        ] = None,
        wait: Annotated[
            bool,
            typer.Option(
                "--wait", help="Wait until a pass has answered this request, and end as it ended."
            ),
        ] = False,
        timeout: Annotated[str, typer.Option("--timeout", help="How long to wait.")] = "30m",
        specs: SpecsAt = HERE,
    ) -> None:
        """Forget that revisions of a server failed here, so that they are tried again by the next pass.

        Examples:
            reconcile retry qwen && reconcile --server qwen
            reconcile retry qwen --wait --timeout 20m      with a daemon at work: until it has tried
        """
        guarded(lambda: _retry(server, token, specs, wait_s=seconds_of(timeout) if wait else None))

    @app.command()
    @placed
    def rollback(
        server: ServerName,
        to: Annotated[
            str,
            typer.Option(
                "--to", metavar="REV", help="The first digits of a revision that the host keeps."
            ),
        ] = "",
        specs: SpecsAt = HERE,
        yes: Yes = False,
        output: RunFormat = Output.TEXT,
    ) -> None:
        """Bring back the good revision before the applied one, from what the host keeps; git is not needed.

        The revision that is left is remembered as rejected, so that the next pass does not bring it back.

        Examples:
            reconcile rollback qwen
            reconcile rollback qwen --to 3f1c9a
        """
        guarded(lambda: _rollback(server, to, specs, output, yes=yes))

    @app.command()
    @placed
    def restart(
        server: ServerName,
        specs: SpecsAt = HERE,
        yes: Yes = False,
        output: RunFormat = Output.TEXT,
    ) -> None:
        """Restart a server by the whole rollout: drained, proven free, measured, applied again.

        Example:
            reconcile restart qwen
        """
        guarded(lambda: _restart(server, specs, output, yes=yes))


# -- seeing ------------------------------------------------------------------------------------------------


def _status(names: tuple[str, ...], specs: SpecsAt, output: Output, export: str = "") -> int:
    from reconciler.cli.run import check_names
    from reconciler.core.held import why_held
    from reconciler.held_back import with_held
    from reconciler.reconcile import survey
    from reconciler.views.status import nowhere_lines, quarantine_lines, status_json, status_lines
    from reconciler.wiring import RealClock, world

    setup = settings()
    fleet, snapshot = load_snapshot(specs, setup)
    check_names(fleet, names)
    controller, only = world(setup, RealClock()), frozenset(names)
    held = with_held(fleet, survey(fleet, controller, only=only), controller, only)
    found = held.found
    if export:
        from reconciler.cli.saved import export_state
        from reconciler.cli.watch import state_branch
        from reconciler.sources.revision_files import head_of

        commit = snapshot.commit.id if snapshot.commit is not None else head_of(specs.path)
        export_state(
            found,
            export,
            commit,
            lambda name: state_branch(setup, specs.git, name),
            spec_wrong=why_held(fleet),
        )
    elif output is Output.JSON:
        out(json.dumps(status_json(found, held.nowhere), indent=2))
    else:
        out_markup(status_lines(found, terminal_width()))
        out_markup(nowhere_lines(held.nowhere))
        out_markup(quarantine_lines(found))
    say_problems(fleet.problems)
    from reconciler.core.conditions import LOCAL, SPEC_ERROR, UNKNOWN, Reason

    if any(p.reason is Reason.LOCAL_STATE for h in found.hosts for p in h.plans):
        return LOCAL.code  # As in a pass: it outranks wrong specs, and those a host that is silent.
    if fleet.problems:
        return SPEC_ERROR.code
    return UNKNOWN.code if any(h.silence for h in found.hosts) else 0


@contextmanager
def _connected(name: str, specs: SpecsAt) -> Iterator[tuple[Server, Host, HostPort, Settings]]:
    from reconciler.wiring import connected_host

    setup = settings()
    server, host = one_server(load_specs(specs, setup), name)
    connected = connected_host(host, Path(setup.state_dir), setup.ssh_config)
    try:
        yield server, host, connected, setup
    finally:
        connected.close()


def _found(server: Server, port: HostPort) -> LiveServer:
    from reconciler.effects.perform import observe
    from reconciler.reconcile import OBSERVE_DEADLINE_S, observe_args

    return observe(port, observe_args([server]), deadline_s=OBSERVE_DEADLINE_S).server(server.name)


def _records_of(found: LiveServer) -> Records:
    from reconciler.core.errors import CommandFailedError

    if found.known_records is None:
        why = getattr(found.records, "reason", "no answer")
        raise CommandFailedError(found.server, f"the host's records cannot be read: {why}")
    return found.known_records


def _history(name: str, specs: SpecsAt, output: Output) -> int:
    from reconciler.views.status import history_lines

    with _connected(name, specs) as (server, _, port, _setup):
        found = _found(server, port)
    _records_of(found)
    if output is Output.JSON:
        out(
            json.dumps(
                {
                    "format_version": "1.0",
                    "server": name,
                    "rollouts": [dict(h) for h in found.history],
                },
                indent=2,
            )
        )
    else:
        out_markup(history_lines(name, found.history))
    return 0


def _show(name: str, prefix: str, specs: SpecsAt, output: Output) -> int:
    from reconciler.effects.ports import Request

    with _connected(name, specs) as (server, _, port, _setup):
        records = _records_of(_found(server, port))
        applied = records.applied.revision if records.applied else ""
        revision = kept_revision(name, prefix or applied, records.revisions)
        answer = port.call(
            Request("read-record", {"server": name, "name": f"revisions/{revision}"}),
            deadline_s=30.0,
        )
    content = answer.data.get("content") or {}
    if output is Output.JSON:
        out(
            json.dumps(
                {
                    "format_version": "1.0",
                    "server": name,
                    "revision": revision,
                    "applied": revision == applied,
                    **content,
                },
                indent=2,
            )
        )
        return 0
    out(f"# {name}, revision {revision}{' (applied)' if revision == applied else ''}")
    out(str(content.get("text") or ""))
    document = (content.get("server") or {}).get("spec")
    out(f"# spec: {json.dumps(document, sort_keys=True)}")
    gate = content.get("gate")
    out(f"# gate: {gate.get('message') if isinstance(gate, Mapping) else 'none recorded'}")
    return 0


def _resolved(name: str, revision: str, specs: SpecsAt, output: Output) -> int:
    from reconciler.core.origin import resolved, resolved_json
    from reconciler.core.revision import revision as revision_of
    from reconciler.views.resolved import resolved_lines

    if revision:
        message = "--resolved shows what the specs say now, which is no revision that a host keeps"
        raise UsageError(message)
    fleet, snapshot = load_snapshot(specs, settings())
    server, _ = one_server(fleet, name)
    values = resolved(snapshot.files, fleet, name)
    if output is Output.JSON:
        out(json.dumps(resolved_json(name, revision_of(server), values), indent=2))
    else:
        out_markup(resolved_lines(name, revision_of(server), values))
    return 0


def kept_revision(name: str, prefix: str, kept: tuple[str, ...]) -> str:
    """Find the one revision that begins with `prefix`.

    Raises:
        UsageError: None or several do.
    """
    matches = [r for r in kept if r.startswith(prefix)] if prefix else []
    if len(matches) == 1:
        return matches[0]
    known = ", ".join(r[:12] for r in kept) or "none"
    message = (
        f"{len(matches) or 'no'} revision of {name} begins with {prefix!r}; the host keeps: {known}"
    )
    raise UsageError(message)


def _logs(name: str, lines: int, specs: SpecsAt, output: Output) -> int:
    from reconciler.effects.steer import journal_of
    from reconciler.views.machine import log_json
    from reconciler.views.terminal import log_line

    with _connected(name, specs) as (server, _, port, _setup):
        found = journal_of(port, server.unit, lines)
    shown = log_json if output is Output.JSON else log_line
    for at, text in found:
        out(shown(name, at, text))
    return 0


# -- steering --------------------------------------------------------------------------------------------------


def _write(
    name: str,
    specs: SpecsAt,
    records: list[tuple[str, Mapping[str, Any] | None]],
    said: str,
    *,
    talk: bool = False,
) -> int:
    from reconciler.effects.steer import write_records
    from reconciler.wiring import holder

    with _connected(name, specs) as (server, _, port, setup):
        write_records(port, server.name, holder(setup), records)
    if talk:
        sys.stderr.write(f"reconcile: {said}\n")
    else:
        out(said)
    return 0


def _suspend(name: str, reason: str, until: float | None, specs: SpecsAt) -> int:
    owner = f"{getpass.getuser()}@{socket.gethostname()}"
    hold = {"version": 1, "owner": owner, "reason": reason, "at": time.time(), "until": until}
    ends = "" if until is None else time.strftime(" until %Y-%m-%dT%H:%MZ", time.gmtime(until))
    said = f"{name}: held by {owner}{ends}; `reconcile resume {name}` ends it"
    return _write(name, specs, [("hold", hold)], said)


def seconds_of(text: str) -> float:
    """Read a duration of the command line.

    Raises:
        UsageError: It is none.
    """
    from reconciler.core.units_of_measure import duration

    try:
        return duration(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def end_of_hold(lasting: str | None, until: str | None, now: float) -> float | None:
    """Say when a hold runs out, in seconds since the epoch; None: never.

    Raises:
        UsageError: Both were given, or one that cannot be read or lies in the past.
    """
    from datetime import datetime

    if lasting is not None and until is not None:
        message = "--for and --until say the same thing; give one of them"
        raise UsageError(message)
    if lasting is not None:
        return now + seconds_of(lasting)
    if until is None:
        return None
    try:
        at = datetime.fromisoformat(until).timestamp()  # Without a zone: this machine's own time.
    except ValueError as error:
        message = f"--until {until!r} is no time; write 2026-12-04T18:00 or 2026-12-04T18:00+01:00"
        raise UsageError(message) from error
    if at <= now:
        message = f"--until {until} is past"
        raise UsageError(message)
    return at


def _retry(name: str, token: str | None, specs: SpecsAt, *, wait_s: float | None) -> int:
    from reconciler.effects.pace_file import PaceFile

    with _connected(name, specs) as (server, _, port, setup):
        rejected = _records_of(_found(server, port)).rejected
    PaceFile(Path(setup.state_dir)).ask(name)  # A daemon of this installation stops waiting.
    asked = token is not None or wait_s is not None
    if not rejected and not asked:
        out(f"{name}: no revision is rejected")
        return 0
    rows: list[tuple[str, Mapping[str, Any] | None]] = [
        (f"rejected/{r.revision}", None) for r in rejected
    ]
    said = f"{name}: {len(rows)} rejected revisions may be tried again"
    if not asked:
        return _write(name, specs, rows, said)
    named = token or secrets.token_hex(8)
    rows.append(("request", {"version": 1, "token": named, "at": time.time()}))
    code = _write(name, specs, rows, f"{said}; request {named}")
    return code if wait_s is None else _answer_to(name, named, wait_s, specs)


POLL_ANSWER_S = 2.0


def _answer_to(name: str, token: str, wait_s: float, specs: SpecsAt) -> int:
    """Wait until a pass has answered a request, and give the exit code of its outcome."""
    from reconciler.core.conditions import WAITING, Outcome, Reason, ServerResult, exit_of

    until = time.monotonic() + wait_s
    with _connected(name, specs) as (server, _, port, _setup):
        while True:
            handled = _records_of(_found(server, port)).handled or {}
            if handled.get("token") == token:
                break
            if time.monotonic() >= until:
                why = f"not answered after {wait_s:g} s; is a daemon at work?"
                out(f"{name}: request {token} is {why}")
                return WAITING.code
            time.sleep(POLL_ANSWER_S)
    outcome, sentence = str(handled.get("outcome")), str(handled.get("sentence") or "")
    out(f"{name}: {outcome}: {sentence}")
    reason = Reason(str(handled.get("reason") or ""))
    return exit_of(ServerResult(name, Outcome(outcome), reason, sentence)).code


History = Sequence[Mapping[str, Any]]


def _rollback(name: str, to: str, specs: SpecsAt, output: Output, *, yes: bool) -> int:
    from reconciler.core.going_back import good_before

    def choose(records: Records, history: History) -> str:
        if to:
            return kept_revision(name, to, records.revisions)
        before = good_before(records, history)
        if not before:
            kept = ", ".join(r[:12] for r in records.revisions) or "none"
            message = (
                f"no good revision of {name} before the applied one is known on its host (kept: {kept}); nothing was "
                "changed. `--to REVISION` names one"
            )
            raise ReconcilerError(message)
        return before

    left: list[str] = []

    def choose_and_note(records: Records, history: History) -> str:
        left.append(records.applied.revision if records.applied else "")
        return choose(records, history)

    asked = ("rollback", name, "--to", to) if to else ("rollback", name)
    code = _pinned(
        asked, specs, output, yes=yes, choose=choose_and_note, sentence="a person asked for it"
    )
    if code == 0 and left and left[0]:
        content = {
            "version": 1,
            "revision": left[0],
            "reason": "RolledBackByHand",
            "sentence": "a person went back from it",
            "at": time.time(),
        }
        return _write(
            name,
            specs,
            [(f"rejected/{left[0]}", content)],
            f"{name}: {left[0][:12]} is not tried again; `reconcile retry {name}` allows it",
            talk=output is Output.JSON,
        )
    return code


def _restart(name: str, specs: SpecsAt, output: Output, *, yes: bool) -> int:
    def choose(records: Records, _history: History) -> str:
        if records.applied is None:
            message = f"nothing is applied on the host of {name}: run `reconcile` to deploy it"
            raise UsageError(message)
        return str(records.applied.revision)

    sentence = "a person asked for a restart"
    return _pinned(("restart", name), specs, output, yes=yes, choose=choose, sentence=sentence)


def _pinned(
    asked: tuple[str, ...],
    specs: SpecsAt,
    output: Output,
    *,
    yes: bool,
    choose: Callable[[Records, History], str],
    sentence: str,
) -> int:
    """Roll out a revision that the host keeps, whatever the specs say by now; `asked` is the command, then the server."""
    from reconciler.cli.run import PassOptions, carry_out
    from reconciler.reconcile import pinned_survey
    from reconciler.wiring import RealClock, world

    setup = settings()
    fleet = load_specs(specs, setup)
    name = asked[1]
    server, _ = one_server(fleet, name)
    clock = RealClock()
    controller = world(setup, clock)
    with stoppable(clock):
        found = pinned_survey(fleet, server, controller, choose, sentence)
        options = PassOptions(
            asked=asked,
            specs=specs.path,
            git=specs.git,
            servers=(name,),
            yes=yes,
            output=PassOutput(output.value),
        )
        return carry_out(found, fleet, controller, options)
