"""A real bare git repository for tests, written through plumbing, so that it can also hold what no honest tool would commit."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "Ada",
    "GIT_AUTHOR_EMAIL": "ada@example.org",
    "GIT_COMMITTER_NAME": "Ada",
    "GIT_COMMITTER_EMAIL": "ada@example.org",
}
FILE, LINK, SUBMODULE = "100644", "120000", "160000"


@dataclass(frozen=True, slots=True)
class Repository:
    """A bare repository, and the commits that a test puts into it."""

    path: Path

    @classmethod
    def new(cls, path: Path) -> Repository:
        """Make an empty one."""
        made = cls(path)
        subprocess.run(
            ["git", "init", "-q", "--bare", "-b", "main", str(path)], check=True, env=ENVIRONMENT
        )
        return made

    def git(self, *words: str, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> str:
        """Run git on it."""
        done = subprocess.run(
            ["git", f"--git-dir={self.path}", *words],
            input=stdin,
            capture_output=True,
            env={**ENVIRONMENT, **(env or {})},
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def blob(self, content: bytes) -> str:
        """Store a blob."""
        return self.git("hash-object", "-w", "--stdin", stdin=content)

    def tree(self, entries: Mapping[str, bytes | tuple[str, str]]) -> str:
        """Store a tree of paths; a value is a file's content, or (mode, object)."""
        folders: dict[str, dict[str, bytes | tuple[str, str]]] = {}
        lines = []
        for name, value in entries.items():
            first, slash, rest = name.partition("/")
            if slash:
                folders.setdefault(first, {})[rest] = value
                continue
            mode, at = (FILE, self.blob(value)) if isinstance(value, bytes) else value
            kind = {SUBMODULE: "commit", "040000": "tree"}.get(mode, "blob")
            lines.append(f"{mode} {kind} {at}\t{first}\0")
        lines += [f"040000 tree {self.tree(below)}\t{name}\0" for name, below in folders.items()]
        return self.git(
            "mktree", "-z", "--missing", stdin="".join(lines).encode("utf-8", "surrogateescape")
        )

    def commit(
        self,
        entries: Mapping[str, bytes | tuple[str, str]],
        *parents: str,
        branch: str = "main",
        sign: tuple[str, ...] = (),
        message: str = "a change",
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Store a commit and let the branch point to it. Without parents it follows the branch's tip, if there is one."""
        if not parents and self.git("for-each-ref", f"refs/heads/{branch}"):
            parents = (self.git("rev-parse", f"refs/heads/{branch}"),)
        if parents == ("",):
            parents = ()
        config = [w for w in sign if "=" in w]
        words = [w for w in sign if "=" not in w]
        found = self.git(
            *(p for c in config for p in ("-c", c)),
            "commit-tree",
            *words,
            *(p for parent in parents for p in ("-p", parent)),
            "-m",
            message,
            self.tree(entries),
            env=env,
        )
        self.point(found, branch)
        return found

    def point(self, commit: str, branch: str = "main") -> None:
        """Let the branch point to a commit, whatever it pointed to."""
        self.git("update-ref", f"refs/heads/{branch}", commit)

    def many(self, count: int, content: str) -> str:
        """Commit `count` files `specs/N.yaml` at once; `content` may hold `{n}`."""
        lines = [
            b"commit refs/heads/main\ncommitter Ada <ada@example.org> 1700000000 +0000\ndata 4\nmany\n"
        ]
        for n in range(count):
            text = content.replace("{n}", str(n)).encode()
            lines.append(
                f"M 100644 inline specs/{n}.yaml\ndata {len(text)}\n".encode() + text + b"\n"
            )
        self.git("fast-import", "--quiet", "--force", stdin=b"".join(lines))
        return self.git("rev-parse", "refs/heads/main")
