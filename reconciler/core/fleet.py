"""From the bytes of all spec files to a fleet: profiles merged, every document judged, all against each other.

Nothing raises for what a user wrote. Every problem comes out with the place where it can be mended (inside the
profile, where that is where the value stands), and whatever is wrong holds back only its own: the servers of a
file with a problem, or the servers that clash, are `held` and stay as they are on their hosts. A caller may
read a server's absence as its removal only when the fleet is `complete` (S13).

`effects/load.py` and the command line call this with what a source read.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from reconciler.core import yaml_text
from reconciler.core.errors import Problem
from reconciler.core.findings import (
    Finding,
    partial_problems,
    read_host,
    read_server,
    split_path,
)
from reconciler.core.grammar import Loc, gpu_key, nearest
from reconciler.core.policy import Policy
from reconciler.core.relations import relation_problems
from reconciler.core.sealed import (
    NotSealedError,
    Sealed,
    SealedFiles,
    is_sealed,
    secrets_of,
    with_secrets,
)
from reconciler.core.spec import API_VERSION, EngineRules, Host, Secret, Server
from reconciler.core.yaml_text import Key, Node, Scalar, without_secret
from reconciler.core.yaml_text import Mapping as Tree

KINDS: Final = ("Server", "Host", "Profile")
_HEAD: Final = frozenset({"apiVersion", "kind", "extends"})
MAX_CHAIN: Final = 8
"""Of profiles that extend each other. Two are common; a reader loses track at four."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands, from line 1 and column 1."""

    file: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """What should run everywhere, and what is wrong with how it was written.

    `servers` may be acted on. `held` names those that may not: they are wrong themselves, stand in a file that
    is wrong, lean on a profile or host that is, or clash with another. `warnings` are the engines' remarks on
    servers that may be acted on.
    """

    servers: tuple[Server, ...] = ()
    hosts: tuple[Host, ...] = ()
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()
    held: frozenset[str] = frozenset()
    places: Mapping[str, Place] = field(default_factory=dict)
    sealed: Mapping[str, Sealed] = field(default_factory=dict)
    """The encrypted secrets of `servers`, by digest."""

    @property
    def complete(self) -> bool:
        """Say whether everything was understood, so that a server that is not here was removed."""
        return not self.problems

    def host(self, name: str) -> Host:
        """Give a host by name; every server in `servers` has one."""
        return next(host for host in self.hosts if host.name == name)


def load_fleet(
    files: Mapping[str, bytes],
    *,
    engines: Mapping[str, EngineRules],
    policy: Policy | None = None,
    root: str = "",
    unread: Sequence[Problem] = (),
) -> Fleet:
    """Read all files and judge them together.

    Args:
        files: Content by the path under which problems are shown.
        engines: The rules of each engine, by name.
        policy: What the operator allows; None allows everything (a check without settings).
        root: The folder that the paths begin with; grants speak of paths below it.
        unread: What the source found and would not read; the fleet is not complete then.
    """
    below = root.rstrip("/") + "/" if root else ""
    reading = _Reading(engines, policy, below, SealedFiles(files, below))
    with _no_collections():
        reading.problems.extend(unread)
        for file in sorted(files):
            if not is_sealed(file):
                reading.read(file, files[file])
        if reading.is_empty and not reading.problems:
            message = "no specs found; nothing is planned, and nothing is removed"
            reading.problems.append(Problem(root or "specs", 0, 0, message))
        reading.judge_profiles()
        reading.judge_hosts()
        reading.judge_servers()
        reading.judge_claims()
        reading.judge_relations()
        return reading.fleet()


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep the cycle collector from walking a growing million of nodes again and again (a third of the time).

    Nothing here makes cycles; what is no longer needed goes by its count. What is left at the end is handed to the oldest generation
    unwalked: freezing and thawing does no more than that.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.unfreeze()
            gc.enable()


@dataclass(frozen=True, slots=True)
class _Document:
    kind: str
    name: str
    tree: Tree

    @property
    def file(self) -> str:
        return self.tree.file


@dataclass(frozen=True, slots=True)
class _Claim:
    """One thing of a host that a server needs for itself; equal `kind` and `key` are one thing."""

    kind: str
    key: str
    shown: str
    loc: Loc
    place: Place


@dataclass(frozen=True, slots=True)
class _ReadServer:
    """A server that is right by itself."""

    server: Server
    host_place: Place
    claims: tuple[_Claim, ...]
    warnings: tuple[Problem, ...]


_PLACEHOLDER: Final = re.compile(r"\$\{[^{}\s]{1,80}\}")


def _placeholders(value: Any, loc: Loc) -> Iterator[Finding]:
    """Find values that hold `${X}`: they are served as they stand, and whoever wrote one thinks otherwise."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _placeholders(item, (*loc, key))
    elif isinstance(value, tuple | list):
        for at, item in enumerate(value):
            yield from _placeholders(item, (*loc, at))
    elif isinstance(value, str):
        found = _PLACEHOLDER.search(value)
        if found:
            message = f"`{found[0]}` stays as it stands, since nothing is filled in in specs; write the value, or share it by a Profile"
            yield Finding(loc, "warning", message)


class _Reading:
    """One load under way. Each `judge_…` leans on those before it."""

    def __init__(
        self,
        engines: Mapping[str, EngineRules],
        policy: Policy | None,
        root: str,
        sealed: SealedFiles,
    ) -> None:
        self.problems: list[Problem] = []
        self._engines = engines
        self._policy = policy
        self._root = root
        self._sealed_files = sealed
        self._has_placeholders = False
        self._sealed: dict[str, Sealed] = {}
        self._documents: dict[str, dict[str, _Document]] = {kind: {} for kind in KINDS}
        self._bad_files: set[str] = set()
        self._held: set[str] = set()
        self._clashing: set[str] = set()
        self._bases: dict[str, Tree | None] = {}
        self._bad_profiles: set[str] = set()
        self._bad_hosts: set[str] = set()
        self._hosts: dict[str, Host] = {}
        self._servers: dict[str, _ReadServer] = {}

    @property
    def is_empty(self) -> bool:
        return not any(self._documents.values())

    # -- files and documents

    def read(self, file: str, content: bytes) -> None:
        """Parse one file and sort its documents in."""
        self._has_placeholders = self._has_placeholders or b"${" in content
        parsed = yaml_text.parse(content, file)
        if parsed.problems:
            self.problems.extend(parsed.problems)
            self._bad_files.add(file)
            self._held.update(_names_in(content))
        for document in parsed.documents:
            if not isinstance(document.root, Tree):
                if document.sound:
                    self._wrong_file(
                        document.root, "a document is a map that begins with apiVersion and kind"
                    )
                continue
            self._sort_in(document.root, sound=document.sound)

    def _sort_in(self, tree: Tree, *, sound: bool) -> None:
        document = _Document(_text(tree, "kind"), _text(tree, "name"), tree)
        if not sound:
            if document.kind == "Profile":
                self._bad_profiles.add(document.name)
            return
        if not self._head_is_right(document):
            self._held.add(document.name)
            return
        known = self._documents[document.kind]
        earlier = known.setdefault(document.name, document)
        if earlier is not document:
            first = f"{earlier.file}:{earlier.tree.line}"
            message = f"another {document.kind} has the name `{document.name}`: {first}"
            self._say(tree.entries["name"][1], message, document)
            self._doubt(document)
        elif document.kind == "Server" and "extends" not in tree.entries:
            self._judge_server(document)

    def _head_is_right(self, document: _Document) -> bool:
        """Check apiVersion, kind and name, without which nothing else can be said."""
        tree, before = document.tree, len(self.problems)
        version, kind, name = (tree.get(key) for key in ("apiVersion", "kind", "name"))
        if version is None:
            self._wrong_file(tree, f"`apiVersion` is missing; write `apiVersion: {API_VERSION}`")
        elif _text(tree, "apiVersion") != API_VERSION:
            self._wrong_file(version, f"`apiVersion`: must be {API_VERSION}")
        if kind is None:
            self._wrong_file(tree, "`kind` is missing; it is Server, Host or Profile")
        elif document.kind not in KINDS:
            hint = nearest(document.kind, KINDS)
            self._wrong_file(kind, f"`kind`: must be Server, Host or Profile{hint}")
        if name is None or (isinstance(name, Scalar) and name.value is None):
            self._wrong_file(name or tree, "`name` is missing")
        elif not document.name:
            self._wrong_file(name, "`name`: expected text; put it in quotes")
        return len(self.problems) == before

    # -- problems

    def _wrong_file(self, place: Node, message: str) -> None:
        self.problems.append(Problem(place.file, place.line, place.column, message))
        self._bad_files.add(place.file)

    def _say(self, place: Place | Key | Node, message: str, document: _Document) -> None:
        server = document.name if document.kind == "Server" else None
        self.problems.append(Problem(place.file, place.line, place.column, message, server))

    def _doubt(self, document: _Document) -> None:
        """Hold back what this one document stands for, and not the others of its file."""
        match document.kind:
            case "Profile":
                self._bad_profiles.add(document.name)
            case "Host":
                self._bad_hosts.add(document.name)
            case _:
                self._held.add(document.name)

    def _report(self, document: _Document, tree: Tree, findings: Sequence[Finding]) -> None:
        """Give each finding its place, and its file a bad name."""
        for finding in findings:
            self._say(place_of(tree, finding), worded(finding), document)
        if findings:
            self._bad_files.add(document.file)
            self._doubt(document)

    # -- profiles

    def judge_profiles(self) -> None:
        """Merge every chain of profiles, and judge each by itself: also one that no server extends."""
        for name, document in self._documents["Profile"].items():
            tree = self._base(name, ())
            if tree is None:
                self._bad_profiles.add(name)
                continue
            findings = partial_problems(_fields(tree), self._engines)
            for finding in findings:
                self._say(place_of(tree, finding), worded(finding), document)
            if findings:
                self._bad_profiles.add(name)
                self._bad_files.add(document.file)

    def _base(self, name: str, chain: tuple[str, ...]) -> Tree | None:
        """Give a profile merged with what it extends; None where that cannot be had, which is then said."""
        if name in self._bases:
            return self._bases[name]
        document = self._documents["Profile"][name]
        merged = self._with_base(document, (*chain, name))
        self._bases[name] = merged
        return merged

    def _with_base(self, document: _Document, chain: tuple[str, ...] = ()) -> Tree | None:
        own = _without_head(document.tree, drop_name=document.kind == "Profile")
        extends = document.tree.get("extends")
        if extends is None or (isinstance(extends, Scalar) and extends.value is None):
            return own
        name = extends.value if isinstance(extends, Scalar) else None
        if not isinstance(name, str):
            why = "`extends`: expected the name of a profile"
        elif name in chain:
            why = f"`extends`: the profiles extend each other in a circle: {' → '.join((*chain, name))}"
        elif len(chain) >= MAX_CHAIN:
            why = f"`extends`: more than {MAX_CHAIN} profiles in a row"
        elif name in self._documents["Profile"]:
            base = self._base(name, chain)
            return merge(base, own) if base is not None else None
        elif name in self._bad_profiles:
            return None
        else:
            why = f"`extends`: there is no profile `{name}`{nearest(name, self._documents['Profile'])}"
        self._say(extends, why, document)
        self._bad_files.add(document.file)
        return None

    # -- hosts and servers

    def judge_hosts(self) -> None:
        """Read every host."""
        for name, document in self._documents["Host"].items():
            tree = _without_head(document.tree)
            host, findings = read_host(_fields(tree))
            extends = document.tree.entries.get("extends")
            if extends:
                findings = [
                    *findings,
                    Finding(("extends",), "extra_forbidden", "unknown key `extends`"),
                ]
            self._report(document, document.tree, findings)
            if host is None or findings:
                continue
            refusal = (
                self._policy.refuses_host(host, self._below_root(document))
                if self._policy
                else None
            )
            if refusal:
                self._say(document.tree.entries["name"][1], f"`name`: {refusal}", document)
                continue
            self._hosts[name] = host

    def judge_servers(self) -> None:
        """Merge and read every server that was not read on sight, and find each one's host."""
        for document in list(self._documents["Server"].values()):
            if "extends" in document.tree.entries:
                self._judge_server(document)
        for name, read in self._servers.items():
            self._check_host(self._documents["Server"][name], read)

    def _judge_server(self, document: _Document) -> None:
        tree = self._with_base(document)
        if tree is None or _text(document.tree, "extends") in self._bad_profiles:
            self._held.add(document.name)
        if tree is None:
            return
        server, findings = read_server(_fields(tree), self._engines)
        self._report(document, tree, findings)
        if server is None:
            return
        self._check_policy(document, server, tree)
        server = self._with_digests(document, server, tree)
        host_place = place_of(tree, Finding(("host",), "host", ""))
        self._servers[document.name] = _ReadServer(
            server, host_place, _claims(server, tree), self._warnings(server, tree)
        )
        # A large fleet's trees take more room than all else; from here on only places are asked for.
        empty = Tree({}, document.file, document.tree.line, document.tree.column)
        self._documents["Server"][document.name] = replace(document, tree=empty)

    def _warnings(self, server: Server, tree: Tree) -> tuple[Problem, ...]:
        """Ask the engine what is accepted and still worth a look, and say what looks like a variable to fill in."""
        found = []
        findings = [
            Finding(split_path(_fields(tree), path), "warning", message)
            for path, message in self._engines[server.engine.name].warnings(server)
        ]
        if self._has_placeholders:
            findings += _placeholders(_fields(tree), ())
        for finding in findings:
            at, text = place_of(tree, finding), worded(finding)
            found.append(Problem(at.file, at.line, at.column, text, server.name))
        return tuple(found)

    def _with_digests(self, document: _Document, server: Server, tree: Tree) -> Server:
        """Find each encrypted secret, and write into the server which one it is."""
        known: dict[str, Secret] = {}
        for path, secret in secrets_of(server).items():
            if not secret.in_repository:
                continue
            field = "age" if secret.age is not None else "sops"
            try:
                digest, sealed = self._sealed_files.find(secret)
            except NotSealedError as error:
                message = str(error)
            else:
                if secret.sha256 in {None, digest}:
                    self._sealed[digest] = sealed
                    known[path] = secret.model_copy(update={"sha256": digest})
                    continue
                field, message = "sha256", f"is not that of what is encrypted there, {digest}"
            finding = Finding(split_path(_fields(tree), f"{path}.{field}"), "sealed", message)
            self._say(place_of(tree, finding), worded(finding), document)
            self._held.add(server.name)
        return with_secrets(server, known) if known else server

    def _check_policy(self, document: _Document, server: Server, tree: Tree) -> None:
        refused = self._policy.refusals(server, self._below_root(document)) if self._policy else []
        for path, message in refused:
            finding = Finding(split_path(_fields(tree), path), "policy", message)
            self._say(place_of(tree, finding), worded(finding), document)
            self._held.add(server.name)

    def _check_host(self, document: _Document, read: _ReadServer) -> None:
        host = read.server.host
        if host in self._hosts:
            return
        self._held.add(document.name)
        if host not in self._documents["Host"]:
            message = f"`host`: there is no host `{host}`{nearest(host, self._hosts)}"
            self._say(read.host_place, message, document)

    def _below_root(self, document: _Document) -> str:
        return document.file.removeprefix(self._root)

    # -- servers against each other

    def judge_claims(self) -> None:
        """Find what two servers of one host claim both: a GPU, a port, a unit."""
        first_by_claim: dict[tuple[str, str, str], str] = {}
        for name in sorted(self._servers, key=self._order):
            read = self._servers[name]
            for claim in read.claims:
                key = (read.server.host, claim.kind, claim.key)
                first = first_by_claim.setdefault(key, name)
                if first != name:
                    self._clash(name, first, claim)

    def judge_relations(self) -> None:
        """Find dependencies and groups that cannot be; only who says so is held back."""
        servers = {name: read.server for name, read in self._servers.items()}
        if not any(s.depends_on or s.group for s in servers.values()):
            return
        names = {*self._documents["Server"], *self._held}
        for name, path, message in relation_problems(servers, names):
            document = self._documents["Server"][name]
            self._say(document.tree, f"`{path}`: {message}", document)
            self._held.add(name)

    def _order(self, name: str) -> tuple[str, int, str]:
        tree = self._documents["Server"][name].tree
        return (tree.file, tree.line, name)

    def _clash(self, name: str, first: str, claim: _Claim) -> None:
        document, other = self._documents["Server"][name], self._documents["Server"][first]
        what = f"{claim.kind} {claim.shown} of host `{self._servers[name].server.host}`"
        where = f"{other.file}:{other.tree.line}"
        message = f"`{path_text(claim.loc)}`: {what} is claimed by server `{first}` too ({where})"
        self._say(claim.place, message, document)
        # Beside a server that is held for another reason the other may go on: only it claims anything now.
        if not self._is_held(name) and not self._is_held(first):
            self._clashing.update((name, first))

    def _is_held(self, name: str) -> bool:
        """Say whether a server is held by itself, its file or its host; clashes apart."""
        if name in self._held or self._documents["Server"][name].file in self._bad_files:
            return True
        read = self._servers.get(name)
        host = self._documents["Host"].get(read.server.host) if read else None
        return host is not None and (host.name in self._bad_hosts or host.file in self._bad_files)

    # -- the end

    def fleet(self) -> Fleet:
        """Put the result together, sorted."""
        held = (
            self._held
            | self._clashing
            | {name for name in self._documents["Server"] if self._is_held(name)}
        )
        problems: dict[tuple[Any, ...], Problem] = {}
        for problem in self.problems:
            problems.setdefault(
                (problem.file, problem.line, problem.column, problem.message), problem
            )
        free = [name for name in sorted(self._servers) if name not in held]
        return Fleet(
            servers=tuple(self._servers[name].server for name in free),
            warnings=tuple(
                sorted((w for name in free for w in self._servers[name].warnings), key=_by_place)
            ),
            hosts=tuple(self._hosts[name] for name in sorted(self._hosts)),
            problems=tuple(sorted(problems.values(), key=_by_place)),
            held=frozenset(held - {""}),
            places={
                name: Place(document.file, document.tree.line, document.tree.column)
                for name, document in sorted(self._documents["Server"].items())
            },
            sealed=self._sealed,
        )


def _by_place(problem: Problem) -> tuple[str, int, int, str]:
    return (problem.file, problem.line, problem.column, problem.message)


# -- trees -----------------------------------------------------------------------------------------------


def merge(base: Tree, over: Tree) -> Tree:
    """Lay one map over another: maps merge deep, all else replaces, null stays to remove what it covers."""
    entries = dict(base.entries)
    for key, (place, node) in over.entries.items():
        below = base.get(key)
        if isinstance(node, Tree) and isinstance(below, Tree):
            entries[key] = (place, merge(below, node))
        else:
            entries[key] = (place, node)
    return Tree(entries, over.file, over.line, over.column)


def _without_head(tree: Tree, *, drop_name: bool = False) -> Tree:
    """Leave the document's own keys out, and write `engine: NAME` in full so that it merges as a map."""
    entries = {
        key: entry
        for key, entry in tree.entries.items()
        if key not in _HEAD and not (drop_name and key == "name")
    }
    engine = entries.get("engine")
    if engine is not None and isinstance(engine[1], Scalar) and isinstance(engine[1].value, str):
        key, node = engine
        entries["engine"] = (key, Tree({"name": (key, node)}, node.file, node.line, node.column))
    return Tree(entries, tree.file, tree.line, tree.column)


def _fields(tree: Tree) -> dict[str, Any]:
    plain = yaml_text.plain(tree)
    assert isinstance(plain, dict)
    return plain


def _text(tree: Tree, key: str) -> str:
    """Give a text value, or nothing."""
    node = tree.get(key)
    return node.value if isinstance(node, Scalar) and isinstance(node.value, str) else ""


_NAME_LINE: Final = re.compile(rb"^name:[ ]+[\"']?([a-z0-9][a-z0-9-]{0,62})\b", re.MULTILINE)


def _names_in(content: bytes) -> list[str]:
    """Guess which servers a file that cannot be read is about: they are held, not gone."""
    return [name.decode() for name in _NAME_LINE.findall(content[: yaml_text.MAX_BYTES])]


# -- places ----------------------------------------------------------------------------------------------


def place_of(tree: Tree, finding: Finding) -> Place:
    """Find where a field stands; where it does not, the nearest thing around it that does."""
    node: Node = tree
    at: Key | Node = tree
    key: Key | None = None
    loc = finding.loc
    if loc[:1] == ("unit",) and "unit" not in tree.entries:
        loc = ("name",)  # It follows from the name.
    for part in loc:
        if isinstance(node, Tree) and part in node.entries:
            key, node = node.entries[str(part)]
            at = key if not isinstance(node, Scalar) and node.line != key.line else node
        elif (
            isinstance(node, yaml_text.Sequence)
            and isinstance(part, int)
            and part < len(node.items)
        ):
            at = node = node.items[part]
        elif part == "[key]" and key is not None:
            at = key
    if finding.kind == "extra_forbidden" and key is not None:
        at = key
    return Place(at.file, at.line, at.column)


def path_text(loc: Loc) -> str:
    """Write a field's path as people do: `gate.runs[0].max_tokens`."""
    parts = [
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc if part != "[key]"
    ]
    return "".join(parts).removeprefix(".")


def worded(finding: Finding) -> str:
    """Begin with the field, except where the sentence names the key itself."""
    if finding.kind == "extra_forbidden" or not finding.loc:
        return finding.message
    if finding.kind == "missing":
        inside = without_secret(path_text(finding.loc[:-1]))
        return f"{finding.message} in `{inside}`" if inside else finding.message
    return f"`{without_secret(path_text(finding.loc))}`: {finding.message}"


def _claims(server: Server, tree: Tree) -> tuple[_Claim, ...]:
    """List what a server needs for itself. Stopped, it needs only its unit."""
    port, unit = str(server.listen.port), server.unit
    claims: list[tuple[str, str, str, Loc]] = [("unit", unit, f"`{unit}`", ("unit",))]
    if server.state == "running":
        claims += [("GPU", gpu_key(g), str(g), ("gpus", i)) for i, g in enumerate(server.gpus)]
        claims.append(("port", port, port, ("listen", "port")))
    return tuple(
        _Claim(kind, key, shown, loc, place_of(tree, Finding(loc, "claim", "")))
        for kind, key, shown, loc in claims
    )
