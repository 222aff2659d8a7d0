"""Whose key is trusted, as OpenSSH reads known_hosts; and how a key is pinned."""

from __future__ import annotations

import base64
import stat
import subprocess
from pathlib import Path

import pytest
from transports.loopback import Keys

from reconciler.core.errors import StoreError
from reconciler.transports.host_keys import HostKey, HostKeys, host_label, pin

A = HostKey("ssh-ed25519", b"\0\0\0\x0bssh-ed25519 key a")
B = HostKey("ssh-ed25519", b"\0\0\0\x0bssh-ed25519 key b")


def line(names: str, key: HostKey, marker: str = "") -> str:
    blob = base64.b64encode(key.blob).decode()
    return f"{marker}{names} {key.algorithm} {blob} a comment\n"


def store_with(tmp_path: Path, *lines: str, name: str = "store") -> Path:
    path = tmp_path / name
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize(
    ("names", "name", "port", "is_meant"),
    [
        ("gpu", "gpu", 22, True),
        ("gpu", "GPU", 22, True),
        ("gpu,192.0.2.7", "192.0.2.7", 22, True),
        ("gpu", "gpu", 2222, False),
        ("[gpu]:2222", "gpu", 2222, True),
        ("[gpu]:2222", "gpu", 22, False),
        ("*.example", "a.example", 22, True),
        ("*.example,!b.example", "b.example", 22, False),
        ("!b.example,*.example", "b.example", 22, False),
        ("g?u", "gpu", 22, True),
        ("[g]pu", "gpu", 22, False),
        ("gp", "gpu", 22, False),
        ("2001:db8::7", "2001:db8::7", 22, True),
    ],
)
def test_names(tmp_path: Path, names: str, name: str, port: int, is_meant: bool) -> None:
    """A line is about the hosts that it names, by patterns, ports and negation."""
    keys = HostKeys((store_with(tmp_path, line(names, A)),))
    assert (A in keys.lookup(name, port).keys) is is_meant


def test_hashed_names(tmp_path: Path) -> None:
    """A file that ssh-keygen has hashed is read like the one it was made from."""
    path = store_with(tmp_path, line("gpu,192.0.2.7", A), line("[gpu]:2222", B))
    subprocess.run(["ssh-keygen", "-H", "-f", path], check=True, capture_output=True)
    assert "gpu" not in path.read_text().replace("gpu key", "")
    keys = HostKeys((path,))
    assert keys.lookup("gpu", 22).keys == (A,)
    assert keys.lookup("192.0.2.7", 22).keys == (A,)
    assert keys.lookup("gpu", 2222).keys == (B,)
    assert keys.lookup("other", 22).keys == ()


def test_the_first_file_that_knows_the_host_decides(tmp_path: Path) -> None:
    """What was enrolled cannot be overruled by a user's own file; what was not comes from there."""
    store = store_with(tmp_path, line("gpu", A))
    known_hosts = store_with(tmp_path, line("gpu", B), line("other", B), name="known_hosts")
    keys = HostKeys((store, known_hosts))
    assert keys.lookup("gpu", 22).keys == (A,)
    assert keys.lookup("other", 22).keys == (B,)
    assert keys.lookup("other", 22).source == known_hosts


def test_revoked_anywhere(tmp_path: Path) -> None:
    """A revocation counts wherever it stands."""
    store = store_with(tmp_path, line("gpu", A))
    known_hosts = store_with(tmp_path, line("*", A, "@revoked "), name="known_hosts")
    assert HostKeys((store, known_hosts)).lookup("gpu", 22).revoked == (A,)


def test_authority_is_no_key(tmp_path: Path) -> None:
    """The key of a certificate authority is never taken for a host's."""
    found = HostKeys((store_with(tmp_path, line("*", A, "@cert-authority ")),)).lookup("gpu", 22)
    assert (found.keys, found.certified) == ((), True)


@pytest.mark.parametrize(
    "text",
    [
        "# gpu ssh-ed25519 AAAA\n",
        "gpu ssh-ed25519\n",
        "gpu ssh-ed25519 not*base64\n",
        "@unheard-of gpu ssh-ed25519 AAAA\n",
        "|1|bad gpu\n|1|a|b|c ssh-ed25519 AAAA\n",
        "\n \n",
        "\xff\xfe\n",
    ],
)
def test_lines_that_make_no_sense(tmp_path: Path, text: str) -> None:
    """A line that cannot be read trusts nobody and hides no other line."""
    path = store_with(tmp_path, text, line("gpu", B))
    assert HostKeys((path,)).lookup("gpu", 22).keys == (B,)


def test_no_file(tmp_path: Path) -> None:
    """Where there is no file, nobody is known."""
    assert HostKeys((tmp_path / "absent",)).lookup("gpu", 22).keys == ()


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A file that cannot be read is an error, not an empty file."""
    with pytest.raises(StoreError, match="could not be read"):
        HostKeys((tmp_path,)).lookup("gpu", 22)


def test_pin_replaces(tmp_path: Path) -> None:
    """Pinning makes these the only keys of that host and leaves all else as it was, comments included."""
    other = "# kept\n" + line("other,gpu", B) + line("gpu", B, "@revoked ") + line("[gpu]:2222", B)
    store = store_with(tmp_path, line("gpu", B), other)
    pin(store, "GPU", 22, [A])
    assert store.read_text().startswith(other)
    assert store.read_text().endswith(line("gpu", A).replace(" a comment", ""))
    assert A in HostKeys((store,)).lookup("gpu", 22).keys


def test_pin_makes_a_private_file(tmp_path: Path) -> None:
    """The store and its directory are made for their owner alone, and nothing else is left there (T22)."""
    store = tmp_path / "new" / "host_keys"
    pin(store, "gpu", 2222, [A, B])
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    assert [path.name for path in store.parent.iterdir()] == ["host_keys"]
    assert HostKeys((store,)).lookup("gpu", 2222).keys == (A, B)


def test_pin_that_fails(tmp_path: Path) -> None:
    """A store that cannot be written is said to be, with its path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        pin(tmp_path / "file" / "store", "gpu", 22, [A])


def test_openssh_reads_the_store(tmp_path: Path, keys: Keys) -> None:
    """ssh-keygen finds a pinned key by its name, and prints the fingerprint that we print."""
    public = keys.make("host").with_suffix(".pub")
    algorithm, blob = public.read_text().split()[:2]
    key = HostKey(algorithm, base64.b64decode(blob))
    store = tmp_path / "store"
    pin(store, "gpu", 2222, [key])
    found = subprocess.run(
        ["ssh-keygen", "-F", host_label("gpu", 2222), "-l", "-f", store],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert key.fingerprint in found


def test_the_configuration_names_the_users_file(tmp_path: Path) -> None:
    """Files that the configuration names take the place of the user's own and of nothing else: what was enrolled decides before them."""
    enrolled, own, named = tmp_path / "enrolled", tmp_path / "own", tmp_path / "named"
    own.write_text(line("gpu", A))
    named.write_text(line("gpu", B))
    known = HostKeys((enrolled,), (own,))
    assert known.lookup("gpu", 22).keys == (A,)
    assert known.lookup("gpu", 22, named=(named,)).keys == (B,)
    assert known.lookup("gpu", 22, named=()).keys == ()
    pin(enrolled, "gpu", 22, [A])
    assert known.lookup("gpu", 22, named=(named,)).keys == (A,)
    named.write_text(line("gpu", A, "@revoked "))
    assert known.lookup("gpu", 22, named=(named,)).revoked == (A,)
