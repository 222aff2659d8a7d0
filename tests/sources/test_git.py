"""Specs from git: what is accepted, what is held, and that nothing of a repository is ever acted on. With the real git binary."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from git_repository import ENVIRONMENT, LINK, SUBMODULE, Repository

from reconciler.core.errors import SpecError, StoreError, UsageError
from reconciler.core.yaml_text import MAX_BYTES
from reconciler.sources import git as git_module
from reconciler.sources import git_binary
from reconciler.sources.git import GitSource, git_source
from reconciler.sources.git_binary import (
    Credentials,
    GitError,
    checked_branch,
    checked_path,
    checked_url,
)

A, B = {"specs/a.yaml": b"a"}, {"specs/a.yaml": b"b"}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository.new(tmp_path / "remote.git")


def source(repository: Repository, folder: Path, **more: object) -> GitSource:
    """Give a source for `specs` of the branch `main`."""
    options = {"state_dir": folder / "state", "credentials": Credentials(), **more}
    return git_source(str(repository.path), "main", "specs", **options)  # type: ignore[arg-type]


def test_the_specs_of_a_commit_are_read_from_its_tree(
    repository: Repository, tmp_path: Path
) -> None:
    """Specs at any depth below the path, nothing else; and whose commit it is."""
    commit = repository.commit(
        {
            "specs/a.yaml": b"a",
            "specs/deep/b.yml": b"b",
            "specs/.hidden.yaml": b"h",
            "specs/.github/c.yaml": b"c",
            "specs/README.md": b"r",
            "elsewhere/d.yaml": b"d",
        },
        message="first\n\nbody",
    )
    found = source(repository, tmp_path).snapshot()
    assert dict(found.files) == {"specs/a.yaml": b"a", "specs/deep/b.yml": b"b"}
    assert (found.root, found.unread, found.stale) == ("specs", (), "")
    assert found.commit is not None
    assert (found.commit.id, found.commit.author, found.commit.subject, found.commit.branch) == (
        commit, "Ada <ada@example.org>", "first", "main",
    )  # fmt: skip
    assert list((tmp_path / "state").rglob("*.yaml")) == []


def test_descendants_are_accepted_also_by_the_next_process(
    repository: Repository, tmp_path: Path
) -> None:
    """S14: forward is the only way that needs nobody; the accepted commit survives the process."""
    first = repository.commit(A)
    assert source(repository, tmp_path).snapshot().commit.id == first  # type: ignore[union-attr]
    second = repository.commit(B)
    again = source(repository, tmp_path)
    assert dict(again.snapshot().files) == {"specs/a.yaml": b"b"}
    assert source(repository, tmp_path).accepted() == second


@pytest.mark.parametrize("how", ["rewound", "pushed by force", "rewritten"])
def test_a_branch_that_did_not_move_forward_is_held_until_a_person_accepts_it(
    repository: Repository, tmp_path: Path, how: str
) -> None:
    """S14, F24: the accepted commit stays in force; `accept` takes exactly the commit that is held, and no other."""
    first = repository.commit(A)
    second = repository.commit(B)
    reader = source(repository, tmp_path)
    reader.snapshot()
    if how == "rewound":
        repository.point(first)
    else:
        first = repository.commit({"specs/a.yaml": b"c"}, "", message="other")
    if how == "rewritten":
        shutil.rmtree(reader.git.mirror)
        repository.git("reflog", "expire", "--expire=now", "--all")
        repository.git("gc", "--quiet", "--prune=now")
        reader = source(repository, tmp_path)
        with pytest.raises(SpecError, match="its history was rewritten"):
            reader.snapshot()
    else:
        stale = reader.snapshot()
        assert dict(stale.files) == {"specs/a.yaml": b"b"}
        assert f"commit {first[:12]} is held" in stale.stale
        assert how in stale.stale
        assert f"reconcile accept {first} --git {repository.path.as_uri()}" in stale.stale
    with pytest.raises(UsageError, match="nothing was accepted"):
        reader.acknowledge(second if how == "rewound" else "0" * 40)
    reader.acknowledge(first)
    accepted = reader.snapshot()
    assert accepted.commit is not None
    assert (accepted.commit.id, accepted.stale, reader.held()) == (first, "", None)


@pytest.mark.parametrize("trouble", ["away", "no branch", "no specs", "path gone", "broken object"])
def test_a_fetch_that_brings_nothing_usable_changes_nothing(
    repository: Repository, tmp_path: Path, trouble: str
) -> None:
    """S13, F22: git away, the branch gone, an empty tree, an incomplete repository: the last accepted commit, said to be stale."""
    repository.commit(A)
    reader = source(repository, tmp_path)
    reader.snapshot()
    match trouble:
        case "away":
            shutil.rmtree(repository.path)
        case "no branch":
            repository.git("update-ref", "-d", "refs/heads/main")
        case "no specs":
            repository.commit({"specs/README.md": b"r"})
        case "path gone":
            repository.commit({"other/a.yaml": b"a"})
        case _:
            repository.commit(B)
            at = repository.blob(b"b")
            (repository.path / "objects" / at[:2] / at[2:]).unlink()
    found = reader.snapshot()
    assert dict(found.files) == {"specs/a.yaml": b"a"}
    assert found.stale.endswith("stays in force")
    held = reader.held()
    assert held is None or not held.acknowledge
    with pytest.raises(SpecError):
        source(repository, tmp_path / "new").snapshot()


def test_links_submodules_and_odd_names_are_refused_by_name(
    repository: Repository, tmp_path: Path
) -> None:
    """S19, T02: what could lead elsewhere is said, never followed; a README that is a link inside is nobody's business."""
    outside = repository.blob(b"/etc/passwd")
    repository.commit(
        {
            "specs/ok.yaml": b"ok",
            "specs/link.yaml": (LINK, outside),
            "specs/folder": (LINK, repository.blob(b"deep")),
            "specs/up": (LINK, repository.blob(b"../../x")),
            "specs/fine.md": (LINK, repository.blob(b"README.md")),
            "specs/README.md": b"r",
            "specs/deep/x.yaml": b"x",
            "specs/module": (SUBMODULE, "1" * 40),
            "specs/big.yaml": b"x" * (MAX_BYTES + 1),
            "specs/-rf.yaml": b"plain",
            "specs/$(touch x).yaml": b"plain",
            "specs/new\nline.yaml": b"x",
            "specs/\udcff.yaml": b"x",
        }
    )
    found = source(repository, tmp_path).snapshot()
    assert sorted(found.files) == [
        "specs/$(touch x).yaml", "specs/-rf.yaml", "specs/deep/x.yaml", "specs/ok.yaml",
    ]  # fmt: skip
    link = "is a link, which is not followed; put the file itself here"
    odd = "has a name with characters that cannot be shown; rename it"
    assert {str(p) for p in found.unread} == {
        f"specs/link.yaml: {link}",
        f"specs/folder: {link}",
        f"specs/up: {link}",
        "specs/module: is a submodule, which is not followed; put the files themselves here",
        f"specs/big.yaml: has {MAX_BYTES + 1} bytes, more than the {MAX_BYTES} that a spec file may have; it was not read",
        f"specs/new?line.yaml: {odd}",
        f"specs/?.yaml: {odd}",
    }


@pytest.mark.parametrize("mode", [LINK, SUBMODULE])
def test_the_path_itself_may_be_no_link(repository: Repository, tmp_path: Path, mode: str) -> None:
    """S19: `--path` is the operator's, what stands there is the repository's."""
    at = repository.blob(b"/etc") if mode == LINK else "1" * 40
    repository.commit({"specs": (mode, at), "x/a.yaml": b"a"})
    with pytest.raises(SpecError, match="is a link or a submodule"):
        source(repository, tmp_path).snapshot()


def test_nothing_in_a_repository_or_a_home_is_run(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T02, T03: hooks, filters, fsmonitor, aliases, helpers, templates: of the repository, the mirror, the user and the environment."""
    canary = tmp_path / "canary"
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\ntouch {canary}\n")
    script.chmod(0o755)
    home = tmp_path / "home"
    (home / "template/hooks").mkdir(parents=True)
    text = (
        f"[core]\nhooksPath={tmp_path}/hooks\nfsmonitor={script}\nsshCommand={script}\nattributesFile={home}/attributes\n"
        f'[alias]\nfetch=!{script}\nls-tree=!{script}\n[filter "x"]\nsmudge={script}\nclean={script}\n[init]\ntemplateDir={home}/template\n'
        f'[credential]\nhelper=!{script}\n[url "ext::{script}"]\ninsteadOf=file://\n[gpg]\nprogram={script}\n[protocol]\nallow=always\n'
    )
    (home / ".gitconfig").write_text(text)
    (tmp_path / "hooks").mkdir()
    for name in ("post-checkout", "reference-transaction", "post-index-change", "pre-auto-gc"):
        for folder in (tmp_path / "hooks", home / "template/hooks"):
            shutil.copy(script, folder / name)
    for name in ("GIT_SSH", "GIT_SSH_COMMAND", "GIT_ASKPASS", "GIT_EXTERNAL_DIFF", "GIT_PROXY_COMMAND"):  # fmt: skip
        monkeypatch.setenv(name, str(script))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(home))
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", f"'core.fsmonitor={script}'")
    repository.commit(
        {
            "specs/a.yaml": b"a",
            ".gitattributes": b"* filter=x\n",
            "specs/.gitattributes": b"* filter=x\n",
        }
    )
    reader = source(repository, tmp_path)
    assert dict(reader.snapshot().files) == {"specs/a.yaml": b"a"}
    repository.commit(B)
    assert dict(reader.snapshot().files) == {"specs/a.yaml": b"b"}
    assert not canary.exists()
    assert not (reader.git.mirror / "hooks").exists()


def test_a_malformed_tree_is_not_taken_into_the_mirror(
    repository: Repository, tmp_path: Path
) -> None:
    """T02: a submodule with an option for a URL and a folder named .git are refused at the door."""
    repository.commit(A)
    reader = source(repository, tmp_path)
    reader.snapshot()
    modules = b'[submodule "x"]\n\tpath = x\n\turl = --upload-pack=touch canary\n'
    repository.commit({**B, ".gitmodules": modules, "x": (SUBMODULE, "1" * 40)})
    found = reader.snapshot()
    assert "git fetch failed" in found.stale
    assert dict(found.files) == {"specs/a.yaml": b"a"}


OPTIONS = (
    "-x", "--upload-pack=touch canary", "-oProxyCommand=touch canary", "--", "@{-1}", "a..b", "a b", "a\nb", "a\0b", "", ".", "..", "a/../b",
    "refs/heads/x.lock", ".hidden", "a//b", "a/", "$(touch canary)", "`touch canary`", "a;b", "a|b", "a~1", "a^", "a:b", "a*", "a?", "a[b", "a\\b", "é",
)  # fmt: skip


@pytest.mark.parametrize("word", OPTIONS)
def test_a_branch_that_could_mean_something_else_is_refused(word: str) -> None:
    """T01: no name reaches git's command line that it could read as an option, a range or a pattern."""
    with pytest.raises(UsageError):
        checked_branch(word)


@pytest.mark.parametrize(
    "url",
    [
        "-u", "--upload-pack=x", "ext::sh -c touch% canary", "ext::x", "fd::3", "git://h/r", "ftp://h/r", "http://example.org/r", "https://",
        "https://user:pass@h/r", "https://token@h/r", "ssh://-oProxyCommand=x/r", "ssh://-x@h/r", "-h:r", "h:r r", "h:r\nx", "https://h:0x/r", "relative/path",
        "file:///a\0b", "ssh://h/r\n", "user@-h:r", "h::r", "https://h:99999/r",
    ],
)  # fmt: skip
def test_a_url_that_could_mean_something_else_is_refused(url: str) -> None:
    """T01, T12: only https, ssh, file, and http on this machine; no user and password; nothing like an option."""
    with pytest.raises(UsageError):
        checked_url(url)


@pytest.mark.parametrize(
    ("url", "used"),
    [
        ("/srv/r.git", "file:///srv/r.git"),
        ("git@example.org:team/r.git", "git@example.org:team/r.git"),
        ("https://example.org/r", "https://example.org/r"),
        ("ssh://git@example.org:22/r", "ssh://git@example.org:22/r"),
        ("http://127.0.0.1:80/r", "http://127.0.0.1:80/r"),
    ],
)
def test_a_url_reaches_git_as_it_was_written(url: str, used: str) -> None:
    """T03: nothing is expanded."""
    assert checked_url(url) == used


@pytest.mark.parametrize("path", ["../x", "a/../b", ".git/x", "a/.git", "-x", ":(top)x", "a\nb", "a//b"])  # fmt: skip
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    """T01, S19: a path is inside the tree, and no pathspec magic."""
    with pytest.raises(UsageError):
        checked_path(path)


def test_a_fetch_that_is_too_large_ends_and_leaves_the_accepted_commit(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T06: what one fetch may write is bounded, whatever is in it."""
    monkeypatch.setattr(git_binary, "MAX_FETCH_BYTES", 2**20)
    repository.commit(A)
    reader = source(repository, tmp_path)
    reader.snapshot()
    repository.commit({**B, "model.bin": os.urandom(4 * 2**20)})
    found = reader.snapshot()
    assert "git fetch" in found.stale
    assert dict(found.files) == {"specs/a.yaml": b"a"}
    repository.point(repository.git("rev-parse", "main~1"))
    assert reader.snapshot().stale == ""
    assert list(reader.git.mirror.glob("objects/pack/tmp_*")) == []


def test_a_tree_that_unfolds_without_end_stops_at_a_bound(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T06: ten trees of ten entries each are ten thousand million files; what git prints is bounded."""
    monkeypatch.setattr(git_binary, "MAX_OUTPUT_BYTES", 2**20)
    tree = repository.tree({"a.yaml": b"a"})
    for _ in range(9):
        tree = repository.tree({f"f{n}": ("040000", tree) for n in range(10)})
    repository.commit({"specs": ("040000", tree)})
    with pytest.raises(SpecError, match="git ls-tree printed more than 1 MiB"):
        source(repository, tmp_path).snapshot()


@pytest.mark.nightly
def test_a_blob_of_a_gigabyte_is_neither_unfolded_nor_read(
    repository: Repository, tmp_path: Path
) -> None:
    """T06: a gigabyte of zeros in a spec's place is refused by the size that the tree tells."""
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(2**30)
    at = repository.git("-c", "core.compression=1", "hash-object", "-w", str(big))
    repository.commit({**A, "specs/big.yaml": ("100644", at)})
    found = source(repository, tmp_path).snapshot()
    assert dict(found.files) == {"specs/a.yaml": b"a"}
    assert "1073741824 bytes" in str(found.unread[0])


def test_ten_thousand_specs_are_one_listing_and_one_reading(
    repository: Repository, tmp_path: Path
) -> None:
    """The largest fleet comes in whole; one file more is refused, and nothing is taken for removed."""
    repository.many(10_000, "{n}")
    reader = source(repository, tmp_path)
    found = reader.snapshot()
    assert len(found.files) == 10_000
    assert found.files["specs/1234.yaml"] == b"1234"
    repository.many(10_001, "{n}")
    with pytest.raises(SpecError, match="more than 10000 spec files"):
        source(repository, tmp_path / "new").snapshot()


def test_a_dry_run_accepts_nothing(repository: Repository, tmp_path: Path) -> None:
    """S20: it reads the commit that would be accepted, and leaves the record as it was."""
    first = repository.commit(A)
    source(repository, tmp_path).snapshot()
    repository.commit(B)
    looking = source(repository, tmp_path, accept=False)
    assert dict(looking.snapshot().files) == {"specs/a.yaml": b"b"}
    assert looking.accepted() == first


def test_a_record_that_cannot_be_read_is_never_the_first_time(
    repository: Repository, tmp_path: Path
) -> None:
    """S14, F10: not knowing what was accepted, nothing is."""
    repository.commit(A)
    reader = source(repository, tmp_path)
    reader.snapshot()
    (reader.folder / "accepted.json").write_text('{"version": 2}')
    with pytest.raises(StoreError, match="no record that this version understands"):
        reader.snapshot()


# -- signatures -------------------------------------------------------------------------------------------------


def ssh_key(folder: Path, name: str) -> Path:
    """Make a key."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / name)],
        check=True,
    )
    return folder / name


def by_ssh(key: Path) -> tuple[str, ...]:
    """Sign with a key."""
    return ("gpg.format=ssh", f"user.signingkey={key}", "-S")


def test_every_commit_on_the_way_is_signed_by_a_key_of_the_operator(
    repository: Repository, tmp_path: Path
) -> None:
    """An unsigned commit in the middle holds, and so does one by another key; the first commit needs a signature too."""
    ours, theirs = ssh_key(tmp_path, "ours"), ssh_key(tmp_path, "theirs")
    keys = (f"{ours}.pub",)
    repository.commit(A)
    with pytest.raises(SpecError, match="it has no signature"):
        source(repository, tmp_path / "first", signing_keys=keys).snapshot()
    first = repository.commit(A, sign=by_ssh(ours))
    reader = source(repository, tmp_path, signing_keys=keys)
    assert reader.snapshot().stale == ""
    middle = repository.commit(B)
    tip = repository.commit({"specs/a.yaml": b"c"}, sign=by_ssh(ours))
    found = reader.snapshot()
    assert (
        f"commit {middle[:12]} is not signed by a key of the operator: it has no signature"
        in found.stale
    )
    assert found.commit is not None
    assert found.commit.id == first
    reader.acknowledge(tip)
    repository.commit(B, sign=by_ssh(theirs))
    assert "signed by a key that is not the operator's" in reader.snapshot().stale
    side = repository.commit({"specs/x.yaml": b"x"}, first, branch="side")
    repository.commit(B, tip, side, sign=by_ssh(ours))
    assert f"commit {side[:12]} is not signed" in reader.snapshot().stale


def test_openpgp_keys_count_as_well(
    repository: Repository, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A key that the operator exported is enough; another key in the same ring of the author is not."""
    home = Path("/tmp") / f"gpg-{os.getpid()}"
    home.mkdir(mode=0o700)
    env = {"GNUPGHOME": str(home)}

    def gpg(*words: str) -> bytes:
        done = subprocess.run(
            ["gpg", "--batch", "--quiet", "--pinentry-mode=loopback", "--passphrase=", *words],
            env={**ENVIRONMENT, **env},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        for name in ("ours", "theirs"):
            gpg("--quick-generate-key", f"{name}@example.org", "ed25519", "sign", "never")
        key = tmp_path / "ours.asc"
        key.write_bytes(gpg("--armor", "--export", "ours@example.org"))
        sign = ("user.signingkey=ours@example.org", "-S")
        first = repository.commit(A, sign=sign, env=env)
        reader = source(repository, tmp_path, signing_keys=(str(key),))
        assert reader.snapshot().commit.id == first  # type: ignore[union-attr]
        repository.commit(B, sign=("user.signingkey=theirs@example.org", "-S"), env=env)
        assert "signed by a key that is not the operator's" in reader.snapshot().stale
    finally:
        subprocess.run(["gpgconf", "--kill", "all"], env={**ENVIRONMENT, **env}, check=False)
        shutil.rmtree(home, ignore_errors=True)


def test_a_signing_key_that_cannot_be_read_accepts_nothing(
    repository: Repository, tmp_path: Path
) -> None:
    """Fail closed: without the key nobody can say who signed."""
    repository.commit(A)
    (tmp_path / "empty.pub").write_text("# nothing\n")
    for key in (tmp_path / "gone.pub", tmp_path / "empty.pub"):
        with pytest.raises(SpecError, match=r"cannot be read|holds no key"):
            source(repository, tmp_path / key.stem, signing_keys=(str(key),)).snapshot()


# -- credentials --------------------------------------------------------------------------------------------------


@contextmanager
def served(folder: Path, seen: list[str]) -> Iterator[str]:
    """Serve a repository by http on loopback, noting who says who they are."""

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            super().do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/remote.git"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_token_reaches_the_server_and_nothing_else(
    repository: Repository, tmp_path: Path
) -> None:
    """S17: from a file that only its owner reads, to the origin, and not on a command line or in a message."""
    repository.commit(A)
    repository.git("update-server-info")
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o600)
    argv = tmp_path / "argv"
    program = tmp_path / "git"
    program.write_text(f'#!/bin/sh\necho "$@" >> {argv}\nexec git "$@"\n')
    program.chmod(0o755)
    seen: list[str] = []
    with served(repository.path.parent, seen) as url:
        reader = git_source(
            url,
            "main",
            "specs",
            state_dir=tmp_path / "state",
            credentials=Credentials(token_file=token),
        )
        reader.git = git_binary.Git(reader.git.mirror, reader.git.credentials, str(program))
        assert dict(reader.snapshot().files) == {"specs/a.yaml": b"a"}
    basic = base64.b64encode(b"x-access-token:s3cret").decode()
    assert f"Basic {basic}" in seen
    stale = reader.snapshot().stale
    shown = argv.read_text() + stale
    assert stale
    assert "s3cret" not in shown
    assert basic not in shown
    left = [p for p in tmp_path.rglob("*") if p.is_file() and p != token]
    assert all(
        b"s3cret" not in p.read_bytes() and basic.encode() not in p.read_bytes() for p in left
    )


@pytest.mark.parametrize("content", ["", "two\nlines", "x" * 9000])
def test_a_token_file_holds_one_line_of_text(tmp_path: Path, content: str) -> None:
    """T08: a line break in a header would begin another header."""
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(GitError, match="no single line"):
        git_binary.read_secret(path)


def test_a_token_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """S17: a token that others can read is no credential."""
    path = tmp_path / "token"
    path.write_text("x")
    path.chmod(0o644)
    with pytest.raises(GitError, match="others may read it"):
        git_binary.read_secret(path)


def test_a_git_that_hangs_is_ended_with_everything_it_started(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6: every step has a deadline, and nothing of it is left running."""
    repository.commit(A)
    reader = source(repository, tmp_path)
    reader.snapshot()
    program = tmp_path / "git"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *fetch*) sleep 600 & echo $! > {tmp_path}/pid; wait;; *) exec git "$@";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(git_binary, "FETCH_LIMIT_S", 0.3)
    reader.git = git_binary.Git(reader.git.mirror, program=str(program))
    assert "took longer than 0.3 s" in reader.snapshot().stale
    pid = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_the_bounds_are_those_of_the_product() -> None:
    """A switch that a test turns must not be left turned."""
    assert git_binary.MAX_FETCH_BYTES == 512 * 2**20
    assert git_module.MAX_PATH_COMMITS == 5_000
