"""`reconcile --watch`, `accept` and `install-daemon`: the daemon put together from what the operator says."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from reconciler.cli.context import guarded, out, settings
from reconciler.core.errors import UsageError

if TYPE_CHECKING:
    from reconciler.core.fleet import Fleet
    from reconciler.daemon import Daemon, Notice, Setup
    from reconciler.effects.service_manager import ServiceManager
    from reconciler.effects.state_branch import StateBranch
    from reconciler.effects.state_file import StateFile
    from reconciler.reporting.reporter import Reporter
    from reconciler.settings import Settings
    from reconciler.sources.base import Snapshot, Source
    from reconciler.sources.git_binary import Credentials
    from reconciler.sources.own_branch import OwnBranch
    from reconciler.web.listener import Listener
    from reconciler.wiring import RealClock

UNIT_PATH: Final = Path("/etc/systemd/system/reconciler.service")


@dataclass(frozen=True, slots=True)
class GitPlace:
    """Where in which repository the specs are."""

    url: str
    branch: str
    path: str


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What the command line says about a daemon."""

    specs: Path
    git: GitPlace | None
    servers: tuple[str, ...]
    interval_s: float
    listen: str
    json: bool


def source_of(git: GitPlace | None, specs: Path, setup: Settings, *, accept: bool = True) -> Source:
    """Give the source that the command line names."""
    if git is None:
        from reconciler.sources.directory import Directory

        return Directory(specs, whole=True)
    from reconciler.sources.git import git_source

    return git_source(
        git.url,
        git.branch,
        git.path,
        state_dir=Path(setup.state_dir),
        credentials=_credentials(setup),
        signing_keys=setup.signing_keys,
        accept=accept,
    )


def _credentials(setup: Settings) -> Credentials:
    from reconciler.sources.git_binary import Credentials

    def file(name: str) -> Path | None:
        return Path(name) if name else None

    return Credentials(file(setup.git_key), file(setup.git_known_hosts), file(setup.git_token_file))


def fleet_of(snapshot: Snapshot, setup: Settings) -> Fleet:
    """Read what a source gave."""
    from reconciler.core.fleet import load_fleet
    from reconciler.wiring import engines

    return load_fleet(
        snapshot.files,
        engines=engines(),
        policy=setup.spec_policy,
        root=snapshot.root,
        unread=snapshot.unread,
    )


def run_watch(options: WatchOptions) -> int:
    """Run the daemon until it is told to end, and give the exit code."""
    from reconciler.daemon import Daemon
    from reconciler.effects.pace_file import PaceFile
    from reconciler.effects.service_manager import ServiceManager
    from reconciler.wiring import RealClock

    clock = RealClock()
    setup = settings()
    manager = ServiceManager.of(os.environ)
    pushed = _pushed(setup, options)
    with ThreadPoolExecutor(max_workers=setup.hosts_at_once, thread_name_prefix="pass") as pool:
        reporter = _reporter(setup, options)
        daemon = Daemon(
            read_setup=lambda: _setup(options, settings(), clock),
            memory=PaceFile(Path(setup.state_dir)),
            pool=pool,
            wall=time.time,
            random=random.random,
            subscribers=[
                printer(as_json=options.json, manager=manager),
                *([reporter] if reporter is not None else []),
            ],
            published=_published(setup, pushed),
        )
        listener = _listener(options.listen, setup, daemon)
        ended = threading.Event()
        if options.git is None:
            from reconciler.sources.watch import watch_folder

            watch_folder(options.specs, daemon.trigger, ended)
        _signals(daemon, clock, manager)
        threading.Thread(target=_signs_of_life, args=(daemon, manager, ended), daemon=True).start()
        if reporter is not None:
            reporter.start()
        manager.ready("watching")
        try:
            daemon.run()
        finally:
            ended.set()
            if listener is not None:
                listener.stop()
            if pushed is not None:
                pushed.stop()
            if reporter is not None and not reporter.stop():
                sys.stderr.write("reconcile: not everything could be reported in time\n")
    return 0


def _published(setup: Settings, pushed: StateBranch | None) -> StateFile | None:
    """Give where the state of the hosts is kept for builds, as the settings ask for."""
    if not setup.state_file and pushed is None:
        return None
    from importlib.metadata import version

    from reconciler.effects.state_file import StateFile

    path = Path(setup.state_file) if setup.state_file else Path(setup.state_dir) / "state.json"
    found = StateFile(path, version("inference-reconciler"))
    if pushed is not None:
        found.also = pushed.offer
    return found


def _pushed(setup: Settings, options: WatchOptions) -> StateBranch | None:
    """Give whoever pushes that state to a branch, as the settings ask for."""
    if not setup.state_branch:
        return None
    from reconciler.effects.state_branch import StateBranch

    return StateBranch(state_branch(setup, options.git, setup.state_branch).write)


def state_branch(setup: Settings, git: GitPlace | None, branch: str) -> OwnBranch:
    """Give the branch that holds the state of the hosts.

    Raises:
        UsageError: No repository is named, or the branch is the one that specs are read from.
    """
    from reconciler.sources.own_branch import own_branch

    url = setup.state_url or (git.url if git is not None else "")
    if not url:
        message = f"the branch {branch} is in no repository: name it as `state_url` in the settings, or read the specs by --git"
        raise UsageError(message)
    if git is not None and branch == git.branch:
        message = (
            f"the specs are read from the branch {branch}; name one that is for the state alone"
        )
        raise UsageError(message)
    mirror = Path(setup.state_dir) / "published.git"
    return own_branch(mirror, _credentials(setup), url, branch, "state.json")


def _reporter(setup: Settings, options: WatchOptions) -> Reporter | None:
    """Give whoever tells a forge and people, as the settings ask for."""
    from reconciler.reporting.setup import ReportTo, reporter_of
    from reconciler.sources.git import GitSource

    def file(name: str) -> Path | None:
        return Path(name) if name else None

    source = source_of(options.git, options.specs, setup)
    if setup.report_notes and not isinstance(source, GitSource):
        message = "report_notes: notes are kept of commits, and so need --git"
        raise UsageError(message)

    status_url = setup.report_notes_url or (options.git.url if options.git is not None else "")
    if setup.report_branch and not status_url:
        message = "report_branch: the branch is in no repository; name it as `report_notes_url`"
        raise UsageError(message)
    if setup.report_branch and setup.report_branch in {
        setup.state_branch,
        options.git.branch if options.git is not None else "",
    }:
        message = f"report_branch: {setup.report_branch} is in use for something else"
        raise UsageError(message)

    return reporter_of(
        ReportTo(
            state_dir=Path(setup.state_dir),
            forge=setup.report_forge,
            api=setup.report_api,
            repository=setup.report_repository,
            token_file=file(setup.report_token_file),
            messages_file=file(setup.notify_file),
            url=setup.report_url,
            notes_mirror=source.git.mirror if setup.report_notes and isinstance(source, GitSource) else None,
            notes_url=setup.report_notes_url,
            status_branch=(status_url, setup.report_branch),
            credentials=_credentials(setup),
        )
    )  # fmt: skip


def _setup(options: WatchOptions, setup: Settings, clock: RealClock) -> Setup:
    from reconciler.core.pacing import Limits
    from reconciler.daemon import Setup
    from reconciler.wiring import world

    return Setup(
        source=source_of(options.git, options.specs, setup),
        load=lambda snapshot: fleet_of(snapshot, setup),
        world=world(setup, clock),
        limits=Limits(starts=setup.starts_per_hour, heals=setup.heals_per_hour),
        interval_s=options.interval_s,
        only=frozenset(options.servers),
        no_pidfd=setup.allow_no_pidfd,
        probe_every_s=setup.probe_every_s,
    )


def _listener(listen: str, setup: Settings, daemon: Daemon) -> Listener | None:
    """Listen where the operator says; a webhook only with a secret, which is read from a file."""
    if not listen:
        return None
    from reconciler.sources.git_binary import GitError, read_secret
    from reconciler.web.listener import Listener
    from reconciler.web.webhook import MIN_SECRET, Hooks

    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        message = f"{listen!r} is no address to listen on; write 127.0.0.1:9180"
        raise UsageError(message)
    hooks = None
    if setup.webhook_secret_file:
        try:
            secret = read_secret(Path(setup.webhook_secret_file))
        except GitError as error:
            raise UsageError(str(error)) from error
        if len(secret) < MIN_SECRET:
            message = f"{setup.webhook_secret_file}: a webhook's secret has at least {MIN_SECRET} characters"
            raise UsageError(message)
        hooks = Hooks(secret.encode())
    listener = Listener(
        host.strip("[]") or "127.0.0.1", int(port), daemon.health, daemon.trigger, hooks
    )
    where = listener.start()
    sys.stderr.write(
        f"reconcile: listening on {where[0]}:{where[1]} ({'/healthz and /hook' if hooks else '/healthz'})\n"
    )
    return listener


def _signals(daemon: Daemon, clock: RealClock, manager: ServiceManager) -> None:
    """SIGHUP reloads; the first SIGTERM hands over, the second goes back to what was, the third leaves at once."""
    asked = [0]

    def end(number: int, _frame: Any) -> None:
        asked[0] += 1
        manager.stopping()
        if asked[0] == 1:
            sys.stderr.write(
                "reconcile: stopping; rollouts that only wait are handed over, others are finished first\n"
            )
            daemon.stop()
        elif asked[0] == 2:
            clock.stop()
        else:
            os._exit(128 + number)

    def reload(_number: int, _frame: Any) -> None:
        manager.reloading()
        daemon.reload()
        manager.ready("settings reloaded")

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGHUP, reload)


def _signs_of_life(daemon: Daemon, manager: ServiceManager, ended: threading.Event) -> None:
    if manager.watchdog_s is None:
        return
    while not ended.wait(manager.watchdog_s / 3):
        if daemon.alive():
            manager.alive()


def printer(*, as_json: bool, manager: ServiceManager) -> Callable[[Notice], None]:
    """Give the reporter that prints: what happens, and what a server's pass says when it says something new."""
    from reconciler.cli.run import printer as event_printer
    from reconciler.core.event import OutcomeReached
    from reconciler.daemon import PassEvent, SourceRead

    show = event_printer(stream=as_json)
    lock = threading.Lock()
    last: dict[str, tuple[str, str]] = {}

    def told(notice: Notice) -> None:
        with lock:
            if isinstance(notice, SourceRead):
                _show_source(notice, manager)
            elif isinstance(notice, PassEvent):
                event = notice.event
                if isinstance(event, OutcomeReached):
                    key = (event.result.outcome.value, event.result.reason.value)
                    if last.get(event.result.server) == key:
                        return
                    last[event.result.server] = key
                show(event)

    return told


def _show_source(notice: Any, manager: ServiceManager) -> None:
    commit = notice.snapshot.commit if notice.snapshot else None
    name = f"commit {commit.id[:12]} by {commit.author}" if commit else "the specs"
    if notice.trouble:
        sys.stderr.write(f"reconcile: stale: {notice.trouble}\n")
        manager.status(f"stale: {notice.trouble}")
    else:
        count = len(notice.fleet.servers)
        what = f"{name}: {count} server{'' if count == 1 else 's'}"
        sys.stderr.write(f"reconcile: {what}\n")
        manager.status(what)
    for problem in notice.fleet.problems:
        sys.stderr.write(f"{problem}\n")


# -- commands -----------------------------------------------------------------------------------------------------


def register(app: typer.Typer) -> None:
    """Mount the commands."""

    @app.command()
    def accept(
        commit: Annotated[str, typer.Argument(help="The whole id of the commit that is held.")],
        git: Annotated[str, typer.Option("--git", metavar="URL", help="As the daemon has it.")],
        branch: Annotated[str, typer.Option("--branch", help="As the daemon has it.")] = "main",
        path: Annotated[str, typer.Option("--path", help="As the daemon has it.")] = "specs",
    ) -> None:
        """Accept a commit that is held, because the branch was rewound or pushed by force, or lacks a signature.

        Example:
            reconcile accept 3f1c9a5b0d6f5a93f1d3f51ce349d52d8fb5d001 --git git@example.org:team/models.git
        """
        guarded(lambda: _accept(commit, GitPlace(git, branch, path)))

    @app.command(name="install-daemon")
    def install_daemon(
        git: Annotated[str, typer.Option("--git", metavar="URL", help="Of the specs.")],
        branch: Annotated[str, typer.Option("--branch", help="Of the specs.")] = "main",
        path: Annotated[str, typer.Option("--path", help="Inside the repository.")] = "specs",
        interval: Annotated[str, typer.Option("--interval", help="Between passes.")] = "1m",
        listen: Annotated[
            str, typer.Option("--listen", metavar="ADDRESS:PORT", help="For /healthz and /hook.")
        ] = "127.0.0.1:9180",
        show: Annotated[
            bool, typer.Option("--print", help="Print the unit; change nothing.")
        ] = False,
    ) -> None:
        """Write a hardened unit that runs `reconcile --watch` as its own user, and say how to start it.

        Examples:
            reconcile install-daemon --git git@example.org:team/models.git --print
            sudo reconcile install-daemon --git git@example.org:team/models.git
        """
        guarded(lambda: _install(GitPlace(git, branch, path), interval, listen, show=show))


def _accept(commit: str, place: GitPlace) -> int:
    from reconciler.sources.git import GitSource

    source = source_of(place, Path(), settings())
    assert isinstance(source, GitSource), "a git place gives a git source"
    source.acknowledge(commit)
    out(f"{commit[:12]} is accepted; the next pass works with it")
    return 0


def _install(place: GitPlace, interval: str, listen: str, *, show: bool) -> int:
    from reconciler.core.units_of_measure import duration
    from reconciler.sources.git_binary import checked_branch, checked_path, checked_url
    from reconciler.views.daemon_unit import daemon_unit

    try:
        duration(interval)
    except ValueError as error:
        message = f"--interval {interval!r}: {error}"
        raise UsageError(message) from error
    place = replace(place, url=checked_url(place.url), branch=checked_branch(place.branch), path=checked_path(place.path))  # fmt: skip
    program = shutil.which("reconcile") or str(Path(sys.argv[0]).resolve())
    argv = [program, "--watch", "--git", place.url, "--branch", place.branch, "--path", place.path, "--interval", interval, "--listen", listen]  # fmt: skip
    text = daemon_unit(argv)
    if show:
        out(text.rstrip("\n"))
        return 0
    try:
        UNIT_PATH.write_text(text)
    except OSError as error:
        message = f"{UNIT_PATH}: cannot be written ({error.strerror}); run this as root, or use --print and install it yourself"
        raise UsageError(message) from error
    out(
        f"{UNIT_PATH} is written. Its state is /var/lib/reconciler-controller, its settings /etc/reconciler/settings.yaml.\n"
        "Put its ssh key where `git_key` says or into /var/lib/reconciler-controller/.ssh, then:\n"
        "  systemctl daemon-reload && systemctl enable --now reconciler"
    )
    return 0


# -- from the options of a pass ---------------------------------------------------------------------------------------


def git_place(url: str | None, branch: str | None, path: str | None) -> GitPlace | None:
    """Give the place in a repository that the options of a pass name; None for a folder.

    Raises:
        UsageError: A branch or path without a repository.
    """
    if url is None:
        if branch is not None or path is not None:
            message = "--branch and --path belong to --git"
            raise UsageError(message)
        return None
    return GitPlace(url, branch or "main", "specs" if path is None else path)


NOT_WATCHING: Final = (
    "dry_run", "detailed", "expect", "adopt", "overwrite", "offline", "base", "against", "out",
)  # fmt: skip


def watched(params: dict[str, Any], specs: Path, place: GitPlace | None) -> int:
    """Run the daemon as the options of a pass say.

    Raises:
        UsageError: An option that a daemon must not have: a permission that nobody looks at when it is used.
    """
    from reconciler.core.units_of_measure import duration

    wrong = [name for name in NOT_WATCHING if params.get(name)]
    if wrong:
        message = f"--{wrong[0].replace('_', '-')} does not go with --watch: it is for one pass that somebody looks at"
        raise UsageError(message)
    text = params.get("interval") or "1m"
    try:
        interval_s = duration(text)
    except ValueError as error:
        message = f"--interval {text!r}: {error}"
        raise UsageError(message) from error
    if not 5 <= interval_s <= 86_400:
        message = (
            f"--interval {text!r}: between 5s and 1d; a webhook makes it soon, not a short interval"
        )
        raise UsageError(message)
    return run_watch(
        WatchOptions(
            specs=specs,
            git=place,
            servers=tuple(params.get("server") or ()),
            interval_s=interval_s,
            listen=params.get("listen") or "",
            json=str(params.get("output")) == "json",
        )
    )
