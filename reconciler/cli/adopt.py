"""`reconcile adopt HOST UNIT`: write the spec of a unit that somebody made by hand."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconciler.cli.context import (
    DEFAULT_SPECS,
    Format,
    Output,
    Specs,
    guarded,
    load_specs,
    out,
    out_markup,
    settings,
)
from reconciler.core.errors import CommandFailedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.adoption import Adoption
    from reconciler.core.live import LiveHost
    from reconciler.core.spec import Host
    from reconciler.effects.ports import HostPort
    from reconciler.engines.base import Engine

PLAIN_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}\.service")


def register(app: typer.Typer) -> None:
    """Mount the command."""

    @app.command()
    def adopt(
        host: Annotated[str, typer.Argument(help="A host of the specs.")],
        unit: Annotated[str, typer.Argument(help="A unit on it that was made by hand.")],
        write: Annotated[
            Path | None,
            typer.Option(
                "--write",
                metavar="FILE",
                help="Write the spec there; a file that is there is kept.",
            ),
        ] = None,
        name: Annotated[
            str | None, typer.Option("--name", help="What the server is to be called.")
        ] = None,
        specs: Specs = DEFAULT_SPECS,
        output: Format = Output.TEXT,
    ) -> None:
        """Write the spec of a hand-made unit: its drop-ins, its running command line, its environment. Changes nothing on the host.

        What no spec can say is listed, and no secret is ever written: a file on the host takes its place. `reconcile --adopt` then takes
        the unit over, without a restart where nothing that runs changes.

        Examples:
            reconcile adopt llm-two sglang-qwen.service
            reconcile adopt llm-two sglang-qwen.service --name qwen --write specs/qwen.yaml
        """
        guarded(lambda: _adopt(host, unit, name, write, specs, output))


def _adopt(
    host_name: str, unit: str, name: str | None, write: Path | None, specs: Path, output: Output
) -> int:
    from reconciler.wiring import connected_host, engines

    setup = settings()
    fleet = load_specs(specs, setup)
    host = next((h for h in fleet.hosts if h.name == host_name), None)
    if host is None:
        known = ", ".join(h.name for h in fleet.hosts) or "none"
        message = f"there is no host {host_name!r} in {specs}; there are: {known}"
        raise UsageError(message)
    taken = next((s for s in fleet.servers if (s.host, s.unit) == (host.name, unit)), None)
    if taken is not None:
        message = f"{unit} on {host.name} is server {taken.name!r} of the specs already"
        raise UsageError(message)
    connected = connected_host(host, Path(setup.state_dir), setup.ssh_config)
    try:
        adoption, text = drafted(host, unit, name, connected, engines())
    finally:
        connected.close()
    if write is not None:
        written(write, text)
    _show(adoption, text, write, specs, output)
    return 65 if adoption.problems else 0


def drafted(
    host: Host, unit: str, name: str | None, port: HostPort, engines: Mapping[str, Engine]
) -> tuple[Adoption, str]:
    """Look at a unit and draft its spec: the draft, and its text.

    Raises:
        UsageError: No unit that could be taken over has this name.
        HostError: The host cannot be asked.
    """
    from reconciler.adoption import adopt, ports_to_try, server_name, spec_text
    from reconciler.takeover import stranger_of

    if PLAIN_UNIT.fullmatch(unit) is None or unit.startswith("reconciler-"):
        why = (
            "an instance of a template shares its file with others; copy it to a plain unit first"
            if "@" in unit
            else "no service of this host that could be taken over has such a name"
        )
        message = f"{unit!r}: {why}"
        raise UsageError(message)
    chosen = name or server_name(unit)
    live = _look(port, chosen, unit, None)
    refuse(live, chosen, unit, host.name)
    asked = None
    for asked in ports_to_try(live, chosen, engines):
        live = _look(port, chosen, unit, asked)
        if stranger_of(live, chosen).addresses:
            break
    adoption = adopt(live, chosen, host.name, engines, asked)
    return adoption, spec_text(adoption)


def refuse(live: LiveHost, name: str, unit: str, host: str) -> None:
    """Refuse what is no hand-made unit: absent, masked, a link, a package's, or ours already."""
    from reconciler.core.live import Known
    from reconciler.core.preflight import unit_refusal

    found = live.server(name)
    if not isinstance(found.unit, Known) or not isinstance(found.files, Known):
        reason = getattr(found.unit, "reason", "") or getattr(found.files, "reason", "")
        raise CommandFailedError(host, f"{unit} cannot be read: {reason}")
    if found.unit.value.load_state == "not-found":
        message = f"there is no {unit} on {host}"
        raise UsageError(message)
    refusal = unit_refusal(found)
    package = found.files.value.package
    if refusal is not None or package:
        why = refusal.sentence if refusal is not None else f"it belongs to the package {package}"
        message = f"{unit} on {host} cannot be taken over: {why}"
        raise UsageError(message)
    owner = next((s for s, b in live.bound.items() if b.get("unit") == unit), None)
    if owner is not None:
        message = f"{unit} on {host} is made by this tool already, for server {owner!r}"
        raise UsageError(message)


def _look(port: HostPort, name: str, unit: str, number: int | None) -> LiveHost:
    from reconciler.effects.perform import observe
    from reconciler.reconcile import OBSERVE_DEADLINE_S

    asked = {"server": name, "unit": unit, "port": number, "invocation_lines": 0}
    args = {"servers": [asked], "kernel_cursor": None, "paths": [], "users": [], "gpus": True}
    return observe(port, args, deadline_s=OBSERVE_DEADLINE_S)


def written(path: Path, text: str) -> None:
    """Write the spec, and never over a file that is there."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        message = f"{path} is there already; nothing was written"
        raise UsageError(message) from None
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}"
        raise UsageError(message) from error


def _show(adoption: Adoption, text: str, write: Path | None, specs: Path, output: Output) -> None:
    from reconciler.views.adoption import adoption_json, adoption_lines

    if output is Output.JSON:
        out(json.dumps(adoption_json(as_document(adoption, text)), indent=2))
        return
    if write is None:
        out(text)
    else:
        sys.stderr.write(f"reconcile: the spec is in {write}\n")
    folder = "" if str(specs) == "specs" else f" --specs {specs}"
    lines = adoption_lines(
        unit=adoption.unit,
        diff=adoption.diff,
        differs=adoption.differs,
        unmapped=tuple((r.what, r.sentence) for r in adoption.unmapped),
        secrets=tuple((s.file, s.where) for s in adoption.secrets),
        problems=adoption.problems,
        command=f"reconcile{folder} --server {adoption.name} --adopt",
    )
    out_markup(lines, talk=write is None)


def as_document(adoption: Adoption, text: str) -> dict[str, Any]:
    """Give the draft as plain JSON."""
    return {
        "server": adoption.name,
        "unit": adoption.unit,
        "spec": dict(adoption.document),
        "text": text,
        "unit_diff": adoption.diff,
        "restarts": adoption.restarts,
        "differs": list(adoption.differs),
        "remarks": [{"field": r.path, "sentence": r.sentence} for r in adoption.remarks],
        "unmapped": [{"what": r.what, "sentence": r.sentence} for r in adoption.unmapped],
        "secrets": [{"name": s.name, "file": s.file, "where": s.where} for s in adoption.secrets],
        "problems": list(adoption.problems),
        "drop_ins": list(adoption.drop_ins),
    }
