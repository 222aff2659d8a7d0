"""The OpenSSH configuration is read as `ssh` itself reads it."""

from __future__ import annotations

import getpass
import shutil
import subprocess
from pathlib import Path

import pytest

from reconciler.transports.ssh_config import SshConfigError, resolve

CASES = {
    "host-block": "Host gpu\n HostName 192.0.2.7\n User deploy\n Port 2222\n",
    "first-value-wins": "Host gpu\n Port 1\nHost *\n Port 2\n User u\n",
    "wildcards": "Host g?u\n Port 11\nHost *.example\n Port 12\n",
    "several-patterns": "Host other gpu third\n Port 21\n",
    "negated": "Host * !gpu\n Port 31\nHost *\n Port 32\n",
    "keywords-in-any-case": "HOST gpu\n hostname X.Example\n pORT 41\n",
    "equals-sign": "Host=gpu\n Port=51\n User = eve\n",
    "quotes": 'Host "gpu"\n User "a user"\n IdentityFile "/keys/with space"\n',
    "comments": "# first\n\nHost gpu # the big one\n   # indented\n Port 61 # not 22\n",
    "before-any-host": "Port 71\nHost gpu\n Port 72\n",
    "several-identities": "Host gpu\n IdentityFile /keys/a\n IdentityFile /keys/b\nHost *\n IdentityFile /keys/c\n",
    "identities-only": "Host gpu\n IdentitiesOnly yes\n IdentityFile ~/.ssh/special\n",
    "jump": "Host gpu\n ProxyJump deploy@jump:2200,second\n",
    "no-jump": "Host gpu\n ProxyJump none\nHost *\n ProxyJump jump\n",
    "jump-before-command": "Host gpu\n ProxyJump jump\n ProxyCommand nc %h %p\n",
    "command-before-jump": "Host gpu\n ProxyCommand nc target 22\n ProxyJump jump\n",
    "host-name-token": "Host gpu\n HostName %h.cluster.example\n",
    "host-key-alias": "Host gpu\n HostKeyAlias the-gpu\n",
    "known-hosts": 'Host gpu\n UserKnownHostsFile /k/a "/k/b c"\n UserKnownHostsFile /k/d\nHost *\n UserKnownHostsFile /k/e\n',
    "known-hosts-none": "UserKnownHostsFile none\n",
    "connect-timeout": "Host gpu\n ConnectTimeout 7\n",
    "connect-timeout-units": "Host gpu\n ConnectTimeout 1m30s\n",
    "match-original-host": "Match originalhost gpu\n Port 81\n",
    "match-host-after-host-name": "Host gpu\n HostName real\nMatch host real\n Port 82\nMatch host gpu\n Port 83\n",
    "match-user": "Host gpu\n User bob\nMatch user bob\n Port 84\n",
    "match-local-user": f"Match localuser {getpass.getuser()}\n Port 85\n",
    "match-two-criteria": "Match originalhost gpu user nobody-here\n Port 86\nMatch all\n Port 87\n",
    "match-negated": "Match !originalhost gpu\n Port 88\nMatch !user nobody-here\n Port 89\n",
    "match-final": "Match final originalhost gpu\n Port 90\n",
    "match-canonical": "Match canonical all\n Port 91\n",
    "match-pattern-list": "Match originalhost other,g*,!nothing\n Port 92\n",
    "include": "Include {dir}/more-*\nHost gpu\n Port 93\n",
    "include-in-a-block": "Host gpu\n Include {dir}/more-*\nHost *\n Port 94\n",
    "include-in-a-block-of-others": "Host other\n Include {dir}/more-*\nHost *\n Port 95\n",
    "include-of-nothing": "Include {dir}/none-*\nHost gpu\n Port 96\n",
    "block-ends-with-the-included-file": "Host gpu\n Include {dir}/more-*\n Port 97\n",
}
INCLUDED = {
    "more-1": "Host unrelated\n Port 1001\nHost gpu\n User included\n",
    "more-2": "Port 1002\nMatch originalhost gpu\n IdentityFile /keys/included\n",
}


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs the ssh client")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["gpu", "GPU", "some.example", "other"])
def test_as_ssh_reads_it(case: str, name: str, tmp_path: Path) -> None:
    """What `ssh -G` finds for a host is what is found here."""
    for file, text in INCLUDED.items():
        (tmp_path / file).write_text(text)
    config = tmp_path / "config"
    config.write_text(CASES[case].replace("{dir}", str(tmp_path)))
    assert found(name, config) == as_ssh_finds(name, config)


def found(name: str, config: Path) -> dict[str, object]:
    host = resolve(name, path=config)
    return {
        "hostname": host.host_name.lower(),
        "user": host.user or getpass.getuser(),
        "port": host.port or 22,
        "identities": [str(file) for file in host.identity_files],
        "identitiesonly": host.identities_only,
        "proxyjump": host.proxy_jump,
        "proxycommand": host.proxy_command,
        "connecttimeout": host.connect_timeout_s,
        "hostkeyalias": host.host_key_alias,
        "knownhosts": None
        if host.known_hosts_files is None
        else [str(file) for file in host.known_hosts_files],
    }


def as_ssh_finds(name: str, config: Path) -> dict[str, object]:
    printed = subprocess.run(
        ["ssh", "-G", "-F", config, name], check=True, capture_output=True, text=True
    ).stdout
    lines = [line.partition(" ")[::2] for line in printed.splitlines()]
    first = dict(reversed(lines))
    defaults = {"/.ssh/id_rsa", "/.ssh/id_ecdsa", "/.ssh/id_ecdsa_sk", "/.ssh/id_ed25519"}
    defaults |= {"/.ssh/id_ed25519_sk", "/.ssh/id_xmss", "/.ssh/id_dsa"}
    identities = [value for keyword, value in lines if keyword == "identityfile"]
    given = [v for v in identities if v.removeprefix("~") not in defaults]
    timeout = first.get("connecttimeout", "none")
    return {
        "hostname": first["hostname"].lower(),
        "user": first["user"],
        "port": int(first["port"]),
        "identities": [str(Path(v).expanduser()) for v in given],
        "identitiesonly": first["identitiesonly"] == "yes",
        "proxyjump": first.get("proxyjump"),
        "proxycommand": first.get("proxycommand"),
        "connecttimeout": None if timeout == "none" else float(timeout),
        "hostkeyalias": first.get("hostkeyalias"),
        "knownhosts": known_hosts(first["userknownhostsfile"]),
    }


def known_hosts(printed: str) -> list[str] | None:
    """Read what ssh prints of UserKnownHostsFile: names side by side, without quotes; its default where none was given."""
    if "/.ssh/known_hosts2" in printed:
        return None
    return [f"/k/{name}".rstrip() for name in printed.split("/k/")[1:]]


def test_no_file(tmp_path: Path) -> None:
    """No file, and a file that is not there, say nothing."""
    for path in (None, tmp_path / "absent"):
        host = resolve("gpu", path=path)
        assert (host.host_name, host.user, host.port) == ("gpu", None, None)


def test_what_is_asked_for_wins(tmp_path: Path) -> None:
    """A user and a port of the Host document win over the file, also in its Match lines."""
    config = tmp_path / "config"
    config.write_text("Match user deploy\n ConnectTimeout 3\nHost *\n User bob\n Port 1\n")
    host = resolve("gpu", path=config, user="deploy", port=2)
    assert (host.user, host.port, host.connect_timeout_s) == ("deploy", 2, 3.0)


def test_tokens_of_identity_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, variables and a leading tilde are expanded in a key's path; a tilde inside is not."""
    monkeypatch.setenv("KEYS", "/keys")
    config = tmp_path / "config"
    config.write_text(
        "Host gpu\n HostName real\n User bob\n Port 3\n"
        " IdentityFile ${KEYS}/%h-%n-%r-%p-%%\n IdentityFile ~/a~b\n IdentityFile %d/c\n"
    )
    assert resolve("gpu", path=config).identity_files == (
        Path("/keys/real-gpu-bob-3-%"),
        Path.home() / "a~b",
        Path.home() / "c",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Match exec true\n Port 1\n", ":1: Match exec runs a shell"),
        ("Match originalhost gpu exec true\n Port 1\n", "Match exec"),
        ("Match tagged x\n Port 1\n", "Match tagged is not supported"),
        ("Match host\n", "needs a value"),
        ("Port twenty\n", "Port 'twenty' is not a number"),
        ("ConnectTimeout soon\n", "is not a time"),
        ("IdentityFile %Z\n", "%Z"),
        ("Host gpu\n\n???\n", ":3: not a keyword"),
    ],
)
def test_what_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """What cannot be honoured is refused with its line: skipping it might skip the jump host."""
    config = tmp_path / "config"
    config.write_text(text)
    with pytest.raises(SshConfigError) as caught:
        resolve("gpu", path=config)
    assert message in str(caught.value)


def test_match_exec_that_is_not_reached(tmp_path: Path) -> None:
    """A Match exec for other hosts is no concern of this one, and is never run."""
    config = tmp_path / "config"
    config.write_text(
        f'Match originalhost other exec "touch {tmp_path}/ran"\n Port 1\nHost *\n Port 2\n'
    )
    assert resolve("gpu", path=config).port == 2
    assert not (tmp_path / "ran").exists()


def test_include_of_itself(tmp_path: Path) -> None:
    """A file that includes itself is refused."""
    config = tmp_path / "config"
    config.write_text(f"Include {config}\n")
    with pytest.raises(SshConfigError, match="nested"):
        resolve("gpu", path=config)


def test_tokens_of_known_hosts_files(tmp_path: Path) -> None:
    """A file per host, as people keep them, is found: `~`, `%h` and the alias by `%k`."""
    config = tmp_path / "config"
    config.write_text("Host gpu\n HostName real\n UserKnownHostsFile ~/.ssh/known.d/%k %d/%h\n")
    home = Path.home()
    assert resolve("gpu", path=config).known_hosts_files == (
        home / ".ssh/known.d/gpu",
        home / "real",
    )
    config.write_text("Host gpu\n HostKeyAlias one\n UserKnownHostsFile /k/%k\n")
    assert resolve("gpu", path=config).known_hosts_files == (Path("/k/one"),)
