"""Secrets in the repository: what is refused, what identifies one, and that the real programs open it and nothing tells it.

`age` and `sops` are the real programs where they are installed (RECONCILER_TEST_AGE_DIR names a folder with them); tests
that need one are skipped where there is none. A program that misbehaves is a script.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import traceback
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from steering_stage import ENGINES, Stage

from reconciler.core.conditions import Outcome, Reason
from reconciler.core.event import StepStarted
from reconciler.core.fleet import Fleet, load_fleet
from reconciler.core.policy import Grant, Policy
from reconciler.core.revision import changes, revision, whole
from reconciler.core.sealed import MAX_BYTES, Sealed
from reconciler.engines import custom
from reconciler.helper.records import is_sealed
from reconciler.lab.simulated import server_on
from reconciler.offline import base_of
from reconciler.reconcile import Unseal, act, survey
from reconciler.resolve import target_of
from reconciler.sources.directory import Directory
from reconciler.sources.unseal import Unsealer, UnsealError

CANARY = "canary-7c1e55aa0b"
OTHER = "canary-d00d2f9911"
AGE_HEAD = b"age-encryption.org/v1\n"
FOLDER = os.environ.get("RECONCILER_TEST_AGE_DIR", "")


def program(name: str) -> str:
    """Give the real program, or skip."""
    found = shutil.which(name, path=f"{FOLDER}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@dataclass
class Keys:
    """One age key of an operator, and the programs."""

    file: Path
    recipient: str

    def age(self, secret: str) -> bytes:
        """Encrypt one secret as an age file."""
        argv = [program("age"), "--encrypt", "--recipient", self.recipient]
        return subprocess.run(argv, input=secret.encode(), capture_output=True, check=True).stdout

    def sops(self, text: str) -> bytes:
        """Encrypt a YAML file by SOPS."""
        argv = [
            program("sops"), "--encrypt", "--age", self.recipient, "--input-type", "yaml", "--output-type", "yaml", "/dev/stdin",
        ]  # fmt: skip
        return subprocess.run(argv, input=text.encode(), capture_output=True, check=True).stdout

    @property
    def opens(self) -> Unsealer:
        """Give what opens with this key."""
        sops = shutil.which("sops", path=f"{FOLDER}:{os.environ['PATH']}")
        return Unsealer(self.file, age=program("age"), sops=sops or "sops")


def made(folder: Path, name: str) -> Keys:
    """Make a key."""
    file = folder / name
    subprocess.run([program("age-keygen"), "-o", str(file)], capture_output=True, check=True)
    file.chmod(0o600)
    argv = [program("age-keygen"), "-y", str(file)]
    return Keys(file, subprocess.run(argv, capture_output=True, check=True).stdout.decode().strip())


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Give an operator's key."""
    return made(tmp_path, "age.key")


def fleet_with(secret: str, files: dict[str, bytes], policy: Policy | None = None) -> Fleet:
    """Load one server that has this under `secrets.TOKEN`."""
    text = Stage().text(chat=f"one 0 1\nsecrets: {{TOKEN: {secret}}}")
    spec = {"specs/team/fleet.yaml": text.encode()}
    return load_fleet({**spec, **files}, engines=ENGINES, root="specs", policy=policy)


def only_problem(fleet: Fleet) -> str:
    """Give the one thing that is wrong; the server is held, and others would not be."""
    assert fleet.servers == ()
    assert fleet.held == {"chat"}
    (problem,) = fleet.problems
    assert problem.line > 0
    return problem.message


# -- what the specs may say ------------------------------------------------------------------------------------

SOPS_FILE = b"""hf:
    token: ENC[AES256_GCM,data:AAAA,iv:AAAA,tag:AAAA,type:str]
    plain: hello
sops:
    age:
        - recipient: age1xyz
          enc: x
    mac: ENC[AES256_GCM,data:AAAA,iv:AAAA,tag:AAAA,type:str]
    version: 3.11.0
"""


@pytest.mark.parametrize(
    ("secret", "files", "said"),
    [
        ("{}", {}, "names one of `file`, `credential`, `age` and `sops`"),
        ("{file: /etc/reconciler/a, age: a.age}", {}, "a secret lies in one place"),
        ("{sops: a.sops.yaml}", {}, "needs `key`"),
        ("{age: a.age, key: b}", {}, "is the key in a SOPS file"),
        ("{age: ../a.age}", {}, "without `..`"),
        ("{age: /etc/a.age}", {}, "without `..`"),
        ("{age: x/../../a.age}", {}, "without `..`"),
        ("{age: .git/a.age}", {}, "without `..`"),
        ("{age: a.txt}", {}, "ending in .age"),
        ("{sops: a.sops.yaml, key: sops.mac}", {}, "keys of the file"),
        ('{sops: a.sops.yaml, key: "a\\"]b"}', {}, "keys of the file"),
        ("{file: /var/lib/reconciler/other/sealed/x}", {}, "which no spec may name"),
        ("{age: a.age}", {}, "there is no file `a.age`"),
        ("{age: a.age}", {"specs/a.age": CANARY.encode()}, "is not encrypted by age"),
        ("{age: a.age}", {"specs/a.age": AGE_HEAD + bytes(MAX_BYTES)}, "the most that a file with secrets"),
        ("{age: a.age, sha256: " + "a" * 64 + "}", {"specs/a.age": AGE_HEAD}, "is not that of what is encrypted"),
        ("{sops: a.sops.yaml, key: hf.token}", {"specs/a.sops.yaml": b"hf: {token: canary-7c1e55aa0b}\n"}, "not a file that SOPS encrypted"),
        ("{sops: a.sops.yaml, key: hf.other}", {"specs/a.sops.yaml": SOPS_FILE}, "holds no `hf.other`"),
        ("{sops: a.sops.yaml, key: hf.plain}", {"specs/a.sops.yaml": SOPS_FILE}, "is not encrypted"),
        ("{sops: a.sops.yaml, key: hf}", {"specs/a.sops.yaml": SOPS_FILE}, "is not one value"),
        (
            "{sops: a.sops.yaml, key: hf.token}",
            {"specs/a.sops.yaml": SOPS_FILE.replace(b"sops:\n", b"sops:\n    hc_vault: [{vault_address: http://169.254.169.254}]\n")},
            "not encrypted for age alone (hc_vault)",
        ),
    ],
)  # fmt: skip
def test_a_reference_that_cannot_be_followed_is_refused_when_specs_are_read(
    secret: str, files: dict[str, bytes], said: str
) -> None:
    """Wrong, missing, unencrypted, oversized and outside references hold the server back, with the place and without the value."""
    message = only_problem(fleet_with(secret, files))
    assert said in message
    assert CANARY not in message


def test_the_key_that_clients_send_cannot_be_a_credential() -> None:
    """We must send the key as well, and never read a credential."""
    text = (
        Stage()
        .text(chat="one 0 1")
        .replace("port: 30000}", "port: 30000, api_key: {credential: k}}")
    )
    fleet = load_fleet({"fleet.yaml": text.encode()}, engines=ENGINES)
    assert "cannot be read by this tool" in fleet.problems[0].message


def test_a_grant_covers_the_secrets_of_its_own_path_alone() -> None:
    """S19: whoever may write specs in one folder cannot have another team's secret opened on their server."""
    policy = Policy((Grant("team/**"),))
    theirs = {"specs/other/a.age": AGE_HEAD + b"x"}
    assert "this file" in only_problem(fleet_with("{age: other/a.age}", theirs, policy))
    ours = {"specs/team/a.age": AGE_HEAD + b"x"}
    assert fleet_with("{age: team/a.age}", ours, policy).problems == ()


def test_a_link_in_a_secrets_place_is_not_followed(tmp_path: Path) -> None:
    """S19: a link to a file elsewhere is refused, and the secret counts as missing."""
    (tmp_path / "outside").write_bytes(AGE_HEAD + b"x")
    specs = tmp_path / "specs"
    specs.mkdir()
    (specs / "a.age").symlink_to(tmp_path / "outside")
    text = Stage().text(chat="one 0 1\nsecrets: {TOKEN: {age: a.age}}")
    (specs / "fleet.yaml").write_text(text)
    found = Directory(specs).snapshot()
    fleet = load_fleet(found.files, engines=ENGINES, root=found.root, unread=found.unread)
    said = "\n".join(str(p) for p in fleet.problems)
    assert "a.age: is a link, which is not followed" in said
    assert "there is no file `a.age`" in said
    assert fleet.servers == ()


def test_a_changed_secret_is_a_change_of_the_server_that_uses_it() -> None:
    """Other ciphertext is another revision, said in one row without any value; a neighbour in a SOPS file is none."""
    one = fleet_with("{age: a.age}", {"specs/a.age": AGE_HEAD + b"one"}).servers[0]
    two = fleet_with("{age: a.age}", {"specs/a.age": AGE_HEAD + b"two"}).servers[0]
    assert revision(one) != revision(two)
    assert one.secrets["TOKEN"].sha256 == sha256(AGE_HEAD + b"one").hexdigest()
    (change,) = changes(whole(one), whole(two))
    assert change.path == "secrets.TOKEN"
    assert str(change.old).startswith("the secret encrypted as ")
    key = "{sops: a.sops.yaml, key: hf.token}"
    before = fleet_with(key, {"specs/a.sops.yaml": SOPS_FILE}).servers[0]
    after = fleet_with(key, {"specs/a.sops.yaml": SOPS_FILE.replace(b"hello", b"world")}).servers[0]
    assert revision(before) == revision(after)


def test_a_review_reads_the_servers_of_a_secret_that_moved() -> None:
    """A pull request that changes only an encrypted file shows the server whose secret it is."""
    text = Stage().text(chat="one 0 1\nsecrets: {TOKEN: {age: a.age}}").encode()
    base = {"specs/fleet.yaml": text, "specs/a.age": AGE_HEAD + b"one"}
    head = {**base, "specs/a.age": AGE_HEAD + b"two"}

    def load(files: Any) -> Fleet:
        return load_fleet(files, engines=ENGINES, root="specs")

    fleet, untouched = base_of(base, frozenset({"specs/fleet.yaml"}), head, load)
    assert [s.name for s in fleet.servers] == ["chat"]
    assert untouched == frozenset()


def test_a_credential_goes_into_the_unit_by_its_name_alone() -> None:
    """Systemd finds the credential; the variable holds the path of its file."""
    server = fleet_with("{credential: hf-token}", {}).servers[0]
    target = target_of(server, custom, ("GPU-1",))
    assert "\nLoadCredential=hf-token\n" in target.unit_text
    assert "TOKEN=/run/credentials/chat.service/hf-token" in target.environment
    assert target.secrets == ()


# -- opening ----------------------------------------------------------------------------------------------------


def test_the_real_programs_open_what_was_encrypted_for_the_operator(keys: Keys) -> None:
    """An age file and one value of a SOPS file come out as they went in."""
    sealed = Sealed("age", "a.age", keys.age(CANARY + "\n"))
    assert keys.opens(sealed) == CANARY
    content = keys.sops(f"hf:\n  token: {CANARY}\n")
    assert CANARY.encode() not in content
    assert keys.opens(Sealed("sops", "a.sops.yaml", content, ("hf", "token"))) == CANARY


def test_what_cannot_be_opened_says_why_and_nothing_else(keys: Keys, tmp_path: Path) -> None:
    """The wrong key, altered bytes, a missing key or program, a readable key: each its own sentence, none with the secret."""
    age = Sealed("age", "a.age", keys.age(CANARY))
    sops = Sealed("sops", "a.sops.yaml", keys.sops(f"hf: {CANARY}\n"), ("hf",))
    stranger = made(tmp_path, "other.key").opens
    altered = Sealed("age", "a.age", age.content[:-1] + bytes([age.content[-1] ^ 1]))
    moved = Sealed("sops", "a.sops.yaml", sops.content.replace(b"hf:", b"hg:"), ("hg",))
    several = Sealed("age", "a.age", keys.age(f"{CANARY}\nmore"))
    loose = tmp_path / "loose.key"
    loose.write_bytes(keys.file.read_bytes())
    loose.chmod(0o644)
    cases: list[tuple[Unsealer, Sealed, str]] = [
        (stranger, age, "encrypted for other keys"),
        (stranger, sops, "encrypted for other keys"),
        (keys.opens, altered, "altered"),
        (keys.opens, moved, "cannot be opened"),
        (keys.opens, several, "not one line of text"),
        (Unsealer(None), age, "no `age_key_file` is set"),
        (Unsealer(tmp_path / "gone"), age, "cannot be read"),
        (Unsealer(loose), age, "others may read the key"),
        (Unsealer(keys.file, age="no-such-program"), age, "cannot be run here"),
    ]
    for opens, sealed, said in cases:
        with pytest.raises(UnsealError) as raised:
            opens(sealed)
        whole_text = "".join(traceback.format_exception(raised.value)) + repr(sealed)
        assert said in str(raised.value)
        assert CANARY not in whole_text


def script(folder: Path, body: str) -> str:
    """Write a program that misbehaves."""
    file = folder / "program"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return str(file)


def test_a_program_that_hangs_or_talks_is_ended_and_not_repeated(tmp_path: Path) -> None:
    """The time is bounded, whatever it started ends with it, and its words are nobody's."""
    key = tmp_path / "key"
    key.touch(0o600)
    sealed = Sealed("age", "a.age", AGE_HEAD)
    with pytest.raises(UnsealError, match=r"took longer than 0\.2 s"):
        Unsealer(key, age=script(tmp_path, "exec sleep 60"), limit_s=0.2)(sealed)
    with pytest.raises(UnsealError, match="ended with status 3") as raised:
        Unsealer(key, age=script(tmp_path, f"echo {CANARY} >&2; exit 3"))(sealed)
    assert CANARY not in "".join(traceback.format_exception(raised.value))


# -- the whole way ----------------------------------------------------------------------------------------------


def files_of(stage: Stage) -> dict[str, bytes]:
    """Give all files of the simulated host."""
    return dict(stage.hosts["one"].host.files.data)


def passed(stage: Stage, files: dict[str, bytes], unseal: Unseal) -> tuple[Any, str]:
    """Make a pass, and give its result with everything that it said."""
    said: list[object] = []
    world = replace(stage.controller, unseal=unseal)
    fleet = load_fleet(files, engines=ENGINES, root="specs")
    found = survey(fleet, world)
    results = act(found, world, said.append)
    return {r.server: r for r in results}, repr((said, found, results))


def test_a_secret_reaches_its_host_and_no_record_output_or_log(
    keys: Keys, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """S17: after a rollout the value stands in the two files of root's that are for it, and nowhere else; a new one follows."""
    caplog.set_level(logging.DEBUG)
    stage = Stage()
    text = stage.text(chat="one 0 1\nsecrets: {TOKEN: {age: a.age}}").encode()
    files = {"specs/fleet.yaml": text, "specs/a.age": keys.age(CANARY)}
    results, said = passed(stage, files, keys.opens)
    assert results["chat"].outcome is Outcome.APPLIED
    there = {path for path, data in files_of(stage).items() if CANARY.encode() in data}
    digest = sha256(files["specs/a.age"]).hexdigest()
    sealed = f"/var/lib/reconciler/chat/sealed/{digest}"
    assert there == {sealed, "/var/lib/reconciler/chat/secrets.env"}
    assert {stage.hosts["one"].host.files.meta[path] for path in there} == {(0o600, 0, 0)}
    files["specs/a.age"] = keys.age(OTHER)
    results, more = passed(stage, files, keys.opens)
    assert results["chat"].outcome is Outcome.APPLIED
    assert OTHER.encode() in files_of(stage)["/var/lib/reconciler/chat/secrets.env"]
    # S5: a revision that fails goes back to one whose secret is on the host, whatever the repository holds by now.
    bad = {
        "specs/fleet.yaml": text.replace(b'--steps, "1"', b'--steps, "4"'),
        "specs/a.age": keys.age("third"),
    }
    results, last = passed(stage, bad, keys.opens)
    assert results["chat"].outcome is Outcome.ROLLED_BACK
    assert OTHER.encode() in files_of(stage)["/var/lib/reconciler/chat/secrets.env"]
    captured = capfd.readouterr()
    shown = said + more + last + caplog.text + captured.out + captured.err
    assert CANARY not in shown
    assert OTHER not in shown


def test_a_reboot_in_a_trial_starts_the_old_unit_with_the_old_secret(keys: Keys) -> None:
    """S5: what comes back by itself is the last good revision whole, its key with it."""
    stage = Stage()
    files = {
        "specs/fleet.yaml": stage.text(chat="one 0 1\nsecrets: {TOKEN: {age: a.age}}").encode(),
        "specs/a.age": keys.age(CANARY),
    }
    assert passed(stage, files, keys.opens)[0]["chat"].outcome is Outcome.APPLIED
    fleet = load_fleet({**files, "specs/a.age": keys.age(OTHER)}, engines=ENGINES, root="specs")
    world = replace(stage.controller, unseal=keys.opens)

    def strike(event: object) -> None:
        if isinstance(event, StepStarted) and event.step == "ready":
            stage.hosts["one"].reboot()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        act(survey(fleet, world), world, strike)
    assert OTHER.encode() in files_of(stage)["/var/lib/reconciler/chat/secrets.env"]
    stage.world.advance(60)
    assert server_on(stage.hosts["one"].host, 30000) is not None
    assert CANARY.encode() in files_of(stage)["/var/lib/reconciler/chat/secrets.env"]


def test_another_servers_secret_is_nobody_elses() -> None:
    """A path among the tool's own files is a secret of exactly one server: the host refuses it to others."""
    path = f"/var/lib/reconciler/chat/sealed/{'a' * 64}"
    assert is_sealed(path, "chat")
    assert not is_sealed(path, "other")
    assert not is_sealed(f"{path}/../x")
    assert not is_sealed("/var/lib/reconciler/chat/applied.json")


def test_a_secret_that_cannot_be_opened_stops_nothing() -> None:
    """Before anything is stopped the server is refused with the reason; what runs goes on."""
    stage = Stage()
    text = stage.text(chat="one 0 1")
    assert stage.apply(text)["chat"].outcome is Outcome.APPLIED
    secret = text.replace("model: qwen\n", "model: qwen\nsecrets: {TOKEN: {age: a.age}}\n").encode()
    files = {"specs/fleet.yaml": secret, "specs/a.age": AGE_HEAD + b"x"}
    results, _ = passed(stage, files, Unsealer(None))
    assert results["chat"].outcome is Outcome.REFUSED
    assert results["chat"].reason is Reason.PREFLIGHT
    assert "no `age_key_file` is set" in results["chat"].sentence
    assert stage.serving("chat")
