"""Plans and states as files: `apply PLAN`, `--out`, `--against`, `status --export`."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reconciler.cli.context import Output, PassOutput, guarded, out, settings, stoppable
from reconciler.core.errors import StoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reconciler.cli.run import PassOptions
    from reconciler.core.saved_plan import SavedPlan
    from reconciler.core.saved_state import SavedState
    from reconciler.core.survey import Survey
    from reconciler.sources.own_branch import OwnBranch


def register(app: typer.Typer) -> None:
    """Mount the command."""

    @app.command()
    def apply(
        plan: Annotated[Path, typer.Argument(help="A file that `--dry-run --out` made.")],
        specs: Annotated[
            Path | None,
            typer.Option("--specs", help="Folder of specs, where it is not where it was."),
        ] = None,
        output: Annotated[
            Output, typer.Option("--output", "-o", help="json: NDJSON, as of a run.")
        ] = Output.TEXT,
    ) -> None:
        """Carry out a saved plan, exactly, without asking again.

        Refused with exit code 5, and nothing done, when the commit, the specs, a host, what is live there, or this
        tool's version is not what it was.

        Examples:
            reconcile --dry-run --out plan.json
            reconcile apply plan.json
        """
        guarded(lambda: _apply(plan, specs, output))


def _apply(path: Path, specs: Path | None, output: Output) -> int:
    from reconciler.cli.run import PassOptions, run_pass, specs_and_origin
    from reconciler.core.plan import Permissions
    from reconciler.core.saved_plan import read_plan
    from reconciler.wiring import RealClock, world

    saved = read_plan(read_file(path), str(path))
    options = PassOptions(
        specs=specs if specs is not None else Path(saved.specs),
        servers=saved.servers,
        yes=True,
        expect=saved.hash,
        adopt=saved.adopt,
        overwrite=saved.overwrite,
        output=PassOutput(output.value),
        saved=saved,
    )
    setup = settings()
    fleet, options = specs_and_origin(options, setup)
    allow = Permissions(adopt=saved.adopt, overwrite=saved.overwrite, no_pidfd=setup.allow_no_pidfd)
    clock = RealClock()
    with stoppable(clock):
        return run_pass(fleet, world(setup, clock), options, allow)


def plan_now(found: Survey, options: PassOptions) -> SavedPlan:
    """Give the plan as it would be saved now."""
    from importlib.metadata import version

    from reconciler.core.saved_plan import SavedPlan, identities
    from reconciler.views.machine import plan_json

    return SavedPlan(
        hash=found.plan.hash,
        tool_version=version("inference-reconciler"),
        created_at=time.time(),
        commit=options.commit,
        specs=options.specs.as_posix(),
        specs_version=options.specs_version,
        servers=options.servers,
        adopt=options.adopt,
        overwrite=options.overwrite,
        hosts=identities(found),
        plan=plan_json(found.plan),
    )


def save_plan(found: Survey, options: PassOptions, path: Path) -> None:
    """Write the plan that was shown to a file that only its owner reads."""
    from reconciler.core.saved_plan import plan_text

    write_file(path, plan_text(plan_now(found, options)), mode=0o600)


def read_state_file(path: Path) -> SavedState:
    """Read a saved state."""
    from reconciler.core.saved_state import read_state

    return read_state(read_file(path), str(path))


def export_state(
    found: Survey,
    target: str,
    commit: str,
    branch: Callable[[str], OwnBranch],
    *,
    spec_wrong: Mapping[str, str],
) -> None:
    """Write what was found to a file, to standard output for `-`, or to a branch for `branch:NAME`."""
    from importlib.metadata import version

    from reconciler.core.saved_state import state_of, state_text
    from reconciler.effects.state_branch import MESSAGE

    state = state_of(
        found,
        taken_at=time.time(),
        tool_version=version("inference-reconciler"),
        commit=commit,
        spec_wrong=spec_wrong,
    )
    text = state_text(state)
    if target.startswith("branch:"):
        pushed = branch(target.removeprefix("branch:")).write(text.encode(), MESSAGE)
        out(f"pushed {pushed[:12]} to {target.removeprefix('branch:')}")
    elif target == "-":
        out(text.rstrip("\n"))
    else:
        write_file(Path(target), text, mode=0o644)


def read_file(path: Path) -> bytes:
    """Read a file that the command line names.

    Raises:
        UsageError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        raise UsageError(message) from error


def write_file(path: Path, text: str, *, mode: int) -> None:
    """Write a file whole or not at all.

    Raises:
        StoreError: It cannot be written.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), mode)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        message = f"{path}: cannot be written ({error.strerror}); nothing was changed"
        raise StoreError(message) from error
