"""Specs of a branch: fetched into a bare mirror, judged, and read from the accepted commit's own tree.

A commit is *accepted* when it descends from the one accepted before (S14), holds specs, and, where the operator named keys,
when every commit on the way to it is signed by one of them. Anything else leaves the accepted commit in force and says
why: git away, a branch that is gone or empty, a commit that was rewound or pushed by force (held until a person
acknowledges it). Nothing is ever checked out: sizes and kinds come from the tree, contents from the object store.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import os
import posixpath
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from reconciler.core.errors import Problem, SpecError, StoreError, UsageError, local_trouble, plain
from reconciler.core.yaml_text import MAX_BYTES
from reconciler.sources.base import Commit, Snapshot, version_of
from reconciler.sources.directory import MAX_FILES, MAX_TOTAL_BYTES, SUFFIXES
from reconciler.sources.git_binary import (
    Credentials,
    Git,
    GitError,
    checked_branch,
    checked_commit,
    checked_path,
    checked_url,
)
from reconciler.sources.git_signatures import Signers

FETCHED: Final = "refs/reconciler/fetched"
ACCEPTED: Final = "refs/reconciler/accepted"
MAX_PATH_COMMITS: Final = 5_000
"""Commits between two fetches whose signatures are checked one by one; a push of more is held for a person."""
LINK_BYTES: Final = 4096
NO_KEYS: Final = Signers(())


@dataclass(frozen=True, slots=True)
class Held:
    """A commit that is not accepted, and why. `acknowledge` says that a person may accept it."""

    commit: str
    reason: str
    acknowledge: bool


@dataclass
class GitSource:
    """The source for one path of one branch of one repository.

    `folder` keeps the mirror, which commit is accepted, and what is held. With `accept` off (a dry run) the tip is judged the
    same way and read, and nothing is recorded.
    """

    url: str
    branch: str
    path: str
    folder: Path
    git: Git
    signers: Signers = NO_KEYS
    accept: bool = True
    now: Callable[[], float] = time.time
    _last: Snapshot | None = field(default=None, repr=False)

    def snapshot(self) -> Snapshot:
        """Fetch, judge, and give the specs of the commit that is in force.

        Raises:
            SpecError: No commit was ever accepted, and none can be now.
        """
        with self._alone():
            accepted = self.accepted()
            try:
                tip = self._fetched()
            except GitError as error:
                return self._stay(accepted, f"{error}")
            if tip == accepted:
                self._forget_held()
                return self._at(tip)
            try:
                held = self._judged(tip, accepted)
                if held is None:
                    self._at(tip)
            except GitError as error:
                return self._stay(accepted, f"commit {tip[:12]} cannot be judged: {error}")
            except SpecError as error:
                held = Held(tip, str(error), acknowledge=False)
            if held is not None:
                return self._hold(held, accepted)
            if self.accept:
                self._accept(tip, "")
            return self._at(tip)

    def accepted(self) -> str | None:
        """Give the commit that is in force; None before the first."""
        record = self._read_record("accepted.json")
        return None if record is None else str(record["commit"])

    def held(self) -> Held | None:
        """Give the commit that waits for a person, if one does."""
        record = self._read_record("held.json")
        if record is None:
            return None
        return Held(str(record["commit"]), str(record["reason"]), bool(record["acknowledge"]))

    def acknowledge(self, commit: str) -> None:
        """Accept the commit that is held, because a person says so; only exactly that one.

        Raises:
            UsageError: Another commit is held, or none, or this one cannot be accepted by anybody.
        """
        with self._alone():
            held = self.held()
            if held is None or held.commit != checked_commit(commit):
                shown = (
                    "no commit is held"
                    if held is None
                    else f"the commit that is held is {held.commit} ({held.reason})"
                )
                message = f"{commit[:12]} is not held, and nothing was accepted: {shown}"
                raise UsageError(message)
            if not held.acknowledge:
                message = f"{commit[:12]} cannot be accepted: {held.reason}"
                raise UsageError(message)
            self._read(commit)
            self._accept(commit, getpass.getuser())

    # -- judging -----------------------------------------------------------------------------------------

    def _fetched(self) -> str:
        if not (self.git.mirror / "HEAD").exists():
            self.git.init()
        self.git.fetch(self.url, self.branch, FETCHED)
        return (
            self.git.read(
                "rev-parse", "--verify", "--quiet", "--end-of-options", f"{FETCHED}^{{commit}}"
            )
            .decode()
            .strip()
        )

    def _judged(self, tip: str, accepted: str | None) -> Held | None:
        """Say why the tip may not be accepted, or None where it may."""
        if accepted is not None:
            if not self._knows(accepted):
                why = f"the branch no longer holds {accepted[:12]}, the commit that is in force: its history was rewritten"
                return Held(tip, why, acknowledge=True)
            if not self._descends(tip, accepted):
                rewound = self._descends(accepted, tip)
                how = "was rewound to" if rewound else "was pushed by force to"
                why = f"the branch {how} {tip[:12]}, which does not descend from {accepted[:12]}, the commit that is in force"
                return Held(tip, why, acknowledge=True)
        unsigned = self._unsigned(tip, accepted)
        return Held(tip, unsigned, acknowledge=True) if unsigned else None

    def _knows(self, commit: str) -> bool:
        return self._says_yes("cat-file", "-e", f"{commit}^{{commit}}")

    def _descends(self, commit: str, ancestor: str) -> bool:
        return self._says_yes("merge-base", "--is-ancestor", ancestor, commit)

    def _says_yes(self, *words: str) -> bool:
        try:
            self.git.read(*words)
        except GitError:
            return False
        return True

    def _unsigned(self, tip: str, accepted: str | None) -> str:
        """Name the first commit on the way that no key of the operator signed; empty where there is none.

        Before the first acceptance there is no way: the tip alone must be signed, and vouches for what is below it.
        """
        if not self.signers.files:
            return ""
        way = (
            ["--max-count=1", "--end-of-options", tip]
            if accepted is None
            else ["--end-of-options", f"{accepted}..{tip}"]
        )
        count = int(self.git.read("rev-list", "--count", *way))
        if count > MAX_PATH_COMMITS:
            return f"{count} commits lead to {tip[:12]}; the signatures of at most {MAX_PATH_COMMITS} are checked at once"
        settings = self.signers.prepared(self.folder / "keys")
        listing = self.git.read(
            "log", "--format=%H %G?", *way, limit_s=120.0, extra=settings
        ).decode()
        wrong = [line.split(" ", 1) for line in listing.splitlines() if not line.endswith(" G")]
        if not wrong:
            return ""
        commit, letter = wrong[-1]
        word = SIGNATURES.get(letter, "its signature cannot be checked")
        more = f" ({len(wrong)} such commits on the way to {tip[:12]})" if len(wrong) > 1 else ""
        return f"commit {commit[:12]} is not signed by a key of the operator: {word}{more}"

    # -- staying ----------------------------------------------------------------------------------------------

    def _stay(self, accepted: str | None, why: str) -> Snapshot:
        """Keep to the accepted commit and say that it is stale."""
        if accepted is None:
            raise SpecError(
                [
                    Problem(
                        self.url,
                        0,
                        0,
                        f"{why}. No commit was accepted before, so nothing is planned",
                    )
                ]
            )
        try:
            snapshot = self._at(accepted)
        except GitError as error:
            raise SpecError(
                [Problem(self.url, 0, 0, f"{why}; and {accepted[:12]} cannot be read: {error}")]
            ) from error
        return Snapshot(
            snapshot.root,
            snapshot.files,
            snapshot.unread,
            snapshot.version,
            snapshot.commit,
            f"{why}. {accepted[:12]} stays in force",
        )

    def _hold(self, held: Held, accepted: str | None) -> Snapshot:
        if self.accept:
            self._write_record(
                "held.json",
                {"commit": held.commit, "reason": held.reason, "acknowledge": held.acknowledge},
            )
        way_out = f"; to accept it: {self.command(held.commit)}" if held.acknowledge else ""
        return self._stay(accepted, f"commit {held.commit[:12]} is held: {held.reason}{way_out}")

    def command(self, commit: str) -> str:
        """Give the command by which a person accepts a commit that is held."""
        words = ["reconcile", "accept", commit, "--git", self.url, "--branch", self.branch]
        return " ".join([*words, "--path", self.path] if self.path else words)

    def _accept(self, commit: str, by: str) -> None:
        self.git.read("update-ref", ACCEPTED, commit)
        self._write_record(
            "accepted.json", {"commit": commit, "at": self.now(), "acknowledged_by": by}
        )
        self._forget_held()
        self.git.read("gc", "--auto", "--quiet", "--prune=2.weeks.ago", limit_s=120.0)

    # -- reading ---------------------------------------------------------------------------------------------

    def _at(self, commit: str) -> Snapshot:
        if self._last is None or self._last.commit is None or self._last.commit.id != commit:
            self._last = self._read(commit)
        return self._last

    def _read(self, commit: str) -> Snapshot:
        entries = self._entries(commit)
        wanted: dict[str, str] = {}
        links: dict[str, str] = {}
        unread: list[Problem] = []
        total = 0
        for entry in entries:
            shown = posixpath.join(self.path, entry.name) if entry.name else self.path
            if entry.mode == "120000" and not _hidden(entry.name):
                links[shown] = entry.id
                continue
            refusal = _refusal(entry)
            if refusal is not None:
                unread.append(Problem(_visible(shown), 0, 0, refusal))
            elif _is_spec(entry):
                wanted[shown] = entry.id
                total += entry.size
        if len(wanted) > MAX_FILES:
            raise self._wrong(commit, f"holds more than {MAX_FILES} spec files")
        if total > MAX_TOTAL_BYTES:
            raise self._wrong(commit, f"holds more than {MAX_TOTAL_BYTES >> 20} MiB of specs")
        unread += self._refused_links(links, entries)
        if not wanted and not unread:
            raise self._wrong(
                commit, "holds no .yaml or .yml file; nothing is planned, and nothing is removed"
            )
        contents = self._contents(wanted.values())
        files = {shown: contents[found] for shown, found in wanted.items()}
        return Snapshot(
            self.path, files, tuple(unread), version_of(self.path, files), self._about(commit)
        )

    def _entries(self, commit: str) -> list[_Entry]:
        """List what is below the path in a commit's tree; never what a link leads to."""
        if not self.path:
            return _parsed(self.git.read("ls-tree", "-r", "-l", "-z", "--full-tree", commit))
        listed = _parsed(
            self.git.read("ls-tree", "-l", "-z", "--full-tree", commit, "--", self.path)
        )
        if not listed:
            raise self._wrong(commit, "is not in this commit")
        entry = listed[0]
        if entry.kind == "tree":
            return _parsed(
                self.git.read("ls-tree", "-r", "-l", "-z", "--full-tree", f"{commit}:{self.path}")
            )
        if entry.mode == "120000" or entry.kind != "blob":
            raise self._wrong(commit, "is a link or a submodule, which is not followed")
        return [_Entry(entry.mode, entry.kind, entry.id, entry.size, "")]

    def _refused_links(self, links: Mapping[str, str], entries: list[_Entry]) -> list[Problem]:
        """Refuse links in a spec's place, to folders, and out of the tree; others are nobody's business here."""
        if not links:
            return []
        folders = {
            posixpath.join(self.path, parent) for e in entries for parent in _parents(e.name)
        }
        sizes = {e.id: e.size for e in entries if e.mode == "120000"}
        targets = self._contents([i for i in links.values() if sizes[i] <= LINK_BYTES])
        found = []
        for shown, at in links.items():
            target = targets.get(at, b"/").decode("utf-8", "surrogateescape")
            leads = posixpath.normpath(posixpath.join(posixpath.dirname(shown), target))
            inside = (
                leads.startswith(f"{self.path}/")
                if self.path
                else not leads.startswith(("/", ".."))
            )
            if shown.endswith(SUFFIXES) or leads in folders or not inside:
                found.append(
                    Problem(
                        _visible(shown),
                        0,
                        0,
                        "is a link, which is not followed; put the file itself here",
                    )
                )
        return found

    def _contents(self, ids: Iterable[str]) -> dict[str, bytes]:
        """Read blobs, each once, all by one process."""
        wanted = list(dict.fromkeys(ids))
        if not wanted:
            return {}
        printed = self.git.read(
            "cat-file", "--batch", stdin="".join(f"{i}\n" for i in wanted).encode()
        )
        found: dict[str, bytes] = {}
        at = 0
        for identity in wanted:
            end = printed.index(b"\n", at)
            name, kind, size = [*printed[at:end].decode().split(" "), "", ""][:3]
            if name != identity or kind != "blob":
                raise GitError(f"{identity} cannot be read from the mirror ({kind or 'nothing'})")
            at = end + 1 + int(size)
            found[identity] = printed[end + 1 : at]
            at += 1
        return found

    def _about(self, commit: str) -> Commit:
        text = self.git.read(
            "log", "-1", "--format=%an <%ae>%x00%ct%x00%s", "--end-of-options", commit
        ).decode("utf-8", "replace")
        author, at, subject = text.rstrip("\n").split("\0", 2)
        return Commit(
            commit, _visible(author)[:200], float(at), _visible(subject)[:200], self.branch
        )

    def _wrong(self, commit: str, message: str) -> SpecError:
        return SpecError(
            [Problem(f"{self.path or 'the repository'} at {commit[:12]}", 0, 0, message)]
        )

    # -- records -----------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Be the only process that works on this mirror; it ends with the process."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = (self.folder / "lock").open("a")
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be written {local_trouble(error)}") from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read_record(self, name: str) -> dict[str, object] | None:
        path = self.folder / name
        try:
            record = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{path}: cannot be read ({plain(error)}); which commit is in force is not known, so nothing was done"
            ) from error
        if not isinstance(record, dict) or record.get("version") != 1 or "commit" not in record:
            raise StoreError(
                f"{path}: is no record that this version understands; nothing was done"
            )
        return record

    def _write_record(self, name: str, content: Mapping[str, object]) -> None:
        path = self.folder / name
        fresh = path.with_suffix(".new")
        try:
            with fresh.open("w") as file:
                json.dump({"version": 1, **content}, file)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError as error:
            raise StoreError(
                f"{path}: cannot be written {local_trouble(error)}. Nothing was accepted"
            ) from error

    def _forget_held(self) -> None:
        if self.accept:
            (self.folder / "held.json").unlink(missing_ok=True)


SIGNATURES: Final = {
    "N": "it has no signature",
    "B": "its signature is wrong",
    "U": "signed by a key that is not the operator's",
    "X": "its signature has expired",
    "Y": "signed by a key that has expired",
    "R": "signed by a key that was revoked",
    "E": "signed by a key that is not the operator's",
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line of a tree's listing; `name` is below the source's path."""

    mode: str
    kind: str
    id: str
    size: int
    name: str


def git_source(
    url: str,
    branch: str,
    path: str,
    *,
    state_dir: Path,
    credentials: Credentials,
    signing_keys: tuple[str, ...] = (),
    accept: bool = True,
) -> GitSource:
    """Give the source for what the command line names.

    Raises:
        UsageError: The URL, branch or path is none that is used.
    """
    url, branch, path = checked_url(url), checked_branch(branch), checked_path(path)
    name = hashlib.sha256(f"{url}\0{branch}\0{path}".encode()).hexdigest()[:16]
    folder = state_dir / "git" / name
    return GitSource(
        url,
        branch,
        path,
        folder,
        Git(folder / "mirror.git", credentials),
        Signers(tuple(Path(k) for k in signing_keys)),
        accept,
    )


def _parsed(listing: bytes) -> list[_Entry]:
    entries = []
    for line in listing.split(b"\0"):
        if line:
            facts, _, name = line.partition(b"\t")
            mode, kind, identity, size = facts.decode().split()
            entries.append(
                _Entry(
                    mode,
                    kind,
                    identity,
                    int(size) if size != "-" else 0,
                    name.decode("utf-8", "surrogateescape"),
                )
            )
    return entries


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _is_spec(entry: _Entry) -> bool:
    return not entry.name or (entry.name.endswith(SUFFIXES) and not _hidden(entry.name))


def _refusal(entry: _Entry) -> str | None:
    """Say why an entry that counts is not read."""
    if _hidden(entry.name):
        return None
    if entry.kind == "commit":
        return "is a submodule, which is not followed; put the files themselves here"
    if not _is_spec(entry):
        return None
    if not entry.name.isprintable() or any("\ud800" <= c <= "\udfff" for c in entry.name):
        return "has a name with characters that cannot be shown; rename it"
    if entry.size > MAX_BYTES:
        return f"has {entry.size} bytes, more than the {MAX_BYTES} that a spec file may have; it was not read"
    return None


def _parents(name: str) -> list[str]:
    parts = name.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def _visible(text: str) -> str:
    """Give a name or a line of a repository so that it can stand in a message."""
    return "".join(c if c.isprintable() else "?" for c in text)
