"""Hosts as they should not be: each gets one clear sentence, the right exit code, and nothing on it is lost."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from live_controller import (
    RUN_LIMIT_S,
    TIMEOUTS,
    Controller,
    HostView,
    Run,
    fingerprint,
    requests_in_flight,
)

from reconciler.lab.faults import break_, heal
from reconciler.lab.hosts import SystemdHost

pytestmark = pytest.mark.lab

PERMANENT = "/etc/systemd/system/llm.service"

PACKAGED = r"""
unit=/usr/local/lib/systemd/system/llm.service
mkdir -p ${unit%/*} /var/lib/dpkg/info /var/lib/dpkg/updates
printf '[Service]\nExecStart=/bin/sleep 1d\n' >$unit
echo $unit >/var/lib/dpkg/info/llm.list
printf 'Package: llm\nStatus: install ok installed\nMaintainer: nobody\nArchitecture: all\nVersion: 1\nDescription: a test\n' >/var/lib/dpkg/status
"""
"""A unit that the host's package database knows."""


@contextmanager
def away(host: SystemdHost, path: str) -> Iterator[None]:
    """Have a host without one of its programs."""
    host.check(["mv", path, f"{path}.away"])
    try:
        yield
    finally:
        host.exec(["/usr/bin/mv", f"{path}.away", path])


def deployed(controller: Controller) -> Controller:
    """Have a server up before the host goes bad, and a change that waits to be carried out."""
    controller.commit("one")
    assert controller.apply().ended == (0, "Applied", "")
    controller.commit("two")
    return controller


def says(run: Run, *words: str) -> None:
    """Assert that the sentence of the outcome holds all of these words."""
    for word in words:
        assert word in run.outcome["sentence"], (word, run.outcome["sentence"])


# -- ssh ------------------------------------------------------------------------------------------------


def test_a_host_that_is_down_is_unknown_and_its_server_untouched(
    controller: Controller, view: HostView
) -> None:
    """Nobody listens on its port 22: exit 7, Unreachable, and when it is back the change goes through (S12)."""
    deployed(controller)
    old = view.server()
    view.host.check(["systemctl", "stop", "ssh"])
    refused = controller.apply()
    assert refused.ended == (7, "Unknown", "Unreachable"), refused.outcome["sentence"]
    assert controller.run("status").code == 7
    view.host.check(["systemctl", "start", "ssh"])
    assert view.server() == old
    assert controller.apply().ended == (0, "Applied", "")


def test_an_unknown_key_is_never_accepted_by_itself(stranger: Controller, view: HostView) -> None:
    """A host that was never seen: a pass ends with 7 and HostIdentity, enrolment asks for its fingerprint, and nothing is installed."""
    stranger.commit("one")
    refused = stranger.apply()
    assert refused.ended == (7, "Unknown", "HostIdentity"), refused.outcome["sentence"]
    asked = stranger.run("enrol", view.host.name)
    assert asked.code == 7
    assert fingerprint(view.host) in asked.err
    wrong = stranger.run("enrol", view.host.name, "--host-key", "SHA256:" + "A" * 43)
    assert wrong.code == 7
    assert view.host.exec(["ls", "/usr/local/lib/reconciler", "/var/lib/reconciler"]).stdout == b""


def test_a_changed_key_is_refused(controller: Controller, view: HostView, tmp_path: Path) -> None:
    """The host shows another key than the pinned one: exit 7 and HostIdentity, for a pass and for enrolment (F42)."""
    deployed(controller)
    before = (view.server(), view.mutations())
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True
    )
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    (pins,) = (controller.home / "state").rglob("known_hosts")
    pins.write_text(re.sub(r"ssh-ed25519 \S+", other, pins.read_text()))
    refused = controller.apply()
    assert refused.ended == (7, "Unknown", "HostIdentity"), refused.outcome["sentence"]
    assert controller.run("enrol", view.host.name).code == 7
    assert (view.server(), view.mutations()) == before


def test_a_wrong_user_or_key_is_unreachable(
    controller: Controller, view: HostView, tmp_path: Path
) -> None:
    """A login that the host does not accept: exit 7 and a sentence that names the user."""
    deployed(controller)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True
    )
    controller.ssh_config(f"Host *\n  IdentityFile {tmp_path / 'other'}\n  IdentitiesOnly yes\n")
    refused = controller.apply()
    assert refused.ended[:2] == (7, "Unknown"), refused.outcome["sentence"]
    says(refused, "root")
    controller.ssh_config(
        f"Host *\n  IdentityFile {view.host.key_path}\n  IdentitiesOnly yes\n  User ghost\n"
    )
    (controller.specs / "host.yaml").write_text(
        f"apiVersion: reconciler/v1\nkind: Host\nname: {view.host.name}\nssh: {{address: {view.host.ip}}}\n"
    )
    refused = controller.apply()
    assert refused.ended[:2] == (7, "Unknown"), refused.outcome["sentence"]
    says(refused, "ghost")


# -- an ordinary user -------------------------------------------------------------------------------------


@pytest.fixture
def ordinary(lab_host: SystemdHost, new_controller: Callable[..., Controller]) -> Controller:
    """Give a controller that logs in as a user who may do nothing as root."""
    if lab_host.exec(["test", "-x", "/usr/bin/sudo"]).exit_status != 0:
        pytest.skip("sudo is not installed on this machine")
    return new_controller("ordinary", user="deploy")


def as_printed(controller: Controller, text: str) -> None:
    """Run the commands that enrolment printed, word for word, with an OpenSSH that has the controller's configuration."""
    programs = controller.directory / "bin"
    programs.mkdir()
    known = f"-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -F {controller.home}/.ssh/config"
    for name in ("ssh", "scp"):
        (programs / name).write_text(f'#!/bin/sh\nexec /usr/bin/{name} {known} "$@"\n')
        (programs / name).chmod(0o755)
    commands = [line.strip() for line in text.splitlines() if line.startswith("  s")]
    assert [c.split()[0] for c in commands] == ["scp", "ssh"]
    for command in commands:
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr, done.stdout)


def test_an_ordinary_user_rolls_out_through_one_sudoers_line(
    ordinary: Controller, view: HostView
) -> None:
    """Enrolment prints what root must run once; from then on exactly one command is allowed, and a whole rollout goes through it (F44)."""
    host = view.host
    ordinary.commit("one")
    printed = ordinary.enrol()
    assert printed.code == 1
    assert host.exec(["ls", "/usr/local/lib/reconciler"]).stdout == b""
    host.check(
        [
            "bash",
            "-c",
            "echo 'deploy ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/person; chmod 440 /etc/sudoers.d/person",
        ]
    )
    as_printed(ordinary, printed.err)
    host.check(["rm", "/etc/sudoers.d/person"])
    enrolled = ordinary.enrol()
    assert enrolled.code == 0, enrolled.err
    (line,) = host.check(["cat", "/etc/sudoers.d/reconciler"]).splitlines()
    assert re.fullmatch(
        r"deploy ALL=\(root\) NOPASSWD: /usr/bin/python3 -I -S /usr/local/lib/reconciler/run-[0-9a-f]{12}\.py( \"\")?",
        line,
    )
    for command in (
        "id",
        "/usr/bin/python3 -I -S -",
        line.split("NOPASSWD: ")[1].removesuffix(' ""') + " tick",
    ):
        assert (
            host.exec(
                ["runuser", "-u", "deploy", "--", "bash", "-c", f"sudo -n -- {command}"]
            ).exit_status
            != 0
        ), command
    assert ordinary.apply().ended == (0, "Applied", "")
    view.serves("one")
    ordinary.commit("two")
    changed = ordinary.apply()
    assert changed.ended == (0, "Applied", ""), changed.outcome
    view.serves("two")
    old = view.server()
    host.check(["rm", "/etc/sudoers.d/reconciler"])
    ordinary.commit("three")
    refused = ordinary.apply()
    assert refused.ended[:2] == (7, "Unknown"), refused.outcome["sentence"]
    says(refused, "sudo", "reconcile enrol")
    assert view.server() == old


# -- programs that are missing --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "said"), [("/usr/bin/python3", "python3"), ("/usr/local/bin/nvidia-smi", "GPU")]
)
def test_a_host_without_a_program_is_unknown_and_untouched(
    controller: Controller, view: HostView, path: str, said: str
) -> None:
    """No python3, no nvidia-smi: exit 7, never taken for "nothing runs there" (S12)."""
    deployed(controller)
    before = (view.server(), view.mutations())
    with away(view.host, path):
        refused = controller.apply()
        dry = controller.run("--dry-run")
    assert refused.ended[:2] == (7, "Unknown"), refused.outcome["sentence"]
    says(refused, said)
    assert dry.code == 7
    assert (view.server(), view.mutations()) == before


def test_a_host_without_systemctl_keeps_its_server(controller: Controller, view: HostView) -> None:
    """No systemctl: refused with its name, the server untouched; with it again the change goes through."""
    deployed(controller)
    old = view.server()
    with away(view.host, "/usr/bin/systemctl"):
        refused = controller.apply()
    assert refused.ended[:2] == (1, "Refused"), refused.outcome["sentence"]
    says(refused, "systemctl")
    assert view.server() == old
    assert controller.apply().ended == (0, "Applied", "")
    view.serves("two")


# -- units that are not ours to replace -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("systemctl mask llm.service", "masked"),
        ("printf '[Service]\\nExecStart=/bin/sleep 1d\\n' >/root/llm.service; ln -s /root/llm.service /etc/systemd/system/llm.service", "symbolic link"),
        (
            PACKAGED,
            "package llm",
        ),
    ],
    ids=["masked", "symlinked", "packaged"],
)  # fmt: skip
def test_a_unit_that_is_not_a_plain_file_of_ours_is_refused(
    controller: Controller, view: HostView, made: str, said: str
) -> None:
    """A masked, a symlinked, a package's unit: exit 1 and NotOurs, also with --adopt, and it stays as it was (F63)."""
    view.host.check(["bash", "-ec", f"{made}\nsystemctl daemon-reload"])
    look = [
        "bash",
        "-c",
        "ls -l /etc/systemd/system/llm.service /usr/local/lib/systemd/system/llm.service; systemctl show llm -p LoadState,FragmentPath",
    ]
    before = view.host.exec(look).stdout
    controller.commit("one")
    for words in ((), ("--adopt",), ("--adopt", "--overwrite")):
        refused = controller.apply(*words)
        assert refused.ended == (1, "Refused", "NotOurs"), (words, refused.outcome)
    says(refused, said)
    assert view.host.exec(look).stdout == before


def test_a_unit_that_was_edited_by_hand_is_kept_until_a_person_says_so(
    controller: Controller, view: HostView
) -> None:
    """Edited on the host: a new commit is refused as Drifted; `--overwrite` replaces it and keeps its bytes (S7)."""
    deployed(controller)
    view.host.check(
        ["bash", "-c", f"echo '# somebody was here' >>{PERMANENT}; systemctl daemon-reload"]
    )
    edited, old = view.text(PERMANENT), view.server()
    refused = controller.apply()
    assert refused.ended == (1, "Refused", "Drifted"), refused.outcome["sentence"]
    says(refused, "--overwrite")
    assert (view.text(PERMANENT), view.server()) == (edited, old)
    replaced = controller.apply("--overwrite")
    assert replaced.ended == (0, "Applied", ""), replaced.outcome
    view.serves("two")
    kept = view.host.check(["grep", "-rl", "somebody was here", "/var/lib/reconciler/llm"])
    assert kept.strip()


# -- disks ------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_refused_before_anything_stops(
    controller: Controller, view: HostView
) -> None:
    """No room on the host: exit 1 from preflight, the server untouched; with room again the change goes through (F15, F61)."""
    deployed(controller)
    old = view.server()
    break_(view.host, "full-disk")
    refused = controller.apply()
    assert refused.ended == (1, "Refused", "Preflight"), refused.outcome["sentence"]
    says(refused, "free")
    assert view.server() == old
    heal(view.host)
    assert controller.apply().ended == (0, "Applied", "")
    view.serves("two")


def test_a_read_only_etc_is_refused_before_anything_stops(
    controller: Controller, view: HostView
) -> None:
    """/etc cannot be written: exit 1 from preflight, the server untouched; writable again the change goes through (F61)."""
    deployed(controller)
    old = view.server()
    break_(view.host, "read-only-etc")
    refused = controller.apply()
    assert refused.ended == (1, "Refused", "Preflight"), refused.outcome["sentence"]
    says(refused, "/etc")
    assert view.server() == old
    heal(view.host)
    assert controller.apply().ended == (0, "Applied", "")
    view.serves("two")


# -- in the middle of a rollout ---------------------------------------------------------------------------------


def test_a_network_that_is_cut_in_the_middle_only_delays(
    controller: Controller, view: HostView
) -> None:
    """Cut while the new server loads, healed when it answers on the host: Applied, one start (F36, F38)."""
    deployed(controller)
    controller.commit("two", "--load", "5")
    starts = view.starts()
    begun = controller.begin_apply()
    begun.wait_for("ready")
    break_(view.host, "cut")
    view.host.check(["python3", "-c", WAIT_UNTIL_UP])
    heal(view.host)
    done = begun.end()
    assert done.ended == (0, "Applied", ""), (done.outcome["sentence"], done.err)
    view.serves("two")
    assert view.starts() - starts == 1


WAIT_UNTIL_UP = """
import time, urllib.request
until = time.monotonic() + 60
while True:
    try:
        urllib.request.urlopen("http://127.0.0.1:30000/health", timeout=5)
        break
    except OSError:
        assert time.monotonic() < until
        time.sleep(0.1)
"""


def test_a_second_controller_is_told_who_is_at_work(
    controller: Controller, view: HostView, new_controller: Callable[..., Controller]
) -> None:
    """While one rolls out, another's pass ends with exit 6 and the holder's name, a second process's as well, and the first ends as if alone (F09, S8)."""
    deployed(controller)
    second = new_controller("second")
    assert second.enrol().code == 0
    second.commit("three")
    controller.commit("two", "--load", "20", timeouts={**TIMEOUTS, "ready": "90s"})
    begun = controller.begin_apply()
    begun.wait_for("ready")
    told = second.apply()
    assert told.ended == (6, "Refused", "LeaseHeld"), told.outcome
    says(told, "test@controller")
    beside = controller.apply()
    assert beside.ended == (6, "Refused", "LeaseHeld"), beside.outcome
    says(beside, "another process of this installation")
    assert begun.end().ended == (0, "Applied", "")
    view.serves("two")
    assert second.apply().ended == (0, "Applied", "")
    view.serves("three")


def test_ctrl_c_while_the_new_server_loads_brings_the_old_one_back(
    controller: Controller, view: HostView
) -> None:
    """Once: exit 130, the last good revision serves, the lease is given back; the next pass tries again (F06)."""
    deployed(controller)
    controller.commit("two", "--load", "6")
    begun = controller.begin_apply()
    begun.wait_for("ready")
    begun.interrupt()
    ended = begun.end()
    assert ended.code == 130, (ended.out[-2000:], ended.err)
    assert ended.outcome["reason"] == "Interrupted"
    view.serves("one")
    assert controller.apply().ended == (0, "Applied", "")
    view.serves("two")


def test_ctrl_c_while_it_drains_leaves_the_old_server_alone(
    controller: Controller, view: HostView
) -> None:
    """Once, before anything was stopped: exit 130, the very same process serves on, its restarts are armed again."""
    engine = {"in_flight": "/metrics"}
    controller.commit("one", timeouts={**TIMEOUTS, "drain": "10m"})
    controller.set(engine={**controller.document["engine"], **engine})
    assert controller.apply().ended == (0, "Applied", "")
    old = view.server()
    with requests_in_flight(view, 1, "one"):
        controller.commit("two", timeouts={**TIMEOUTS, "drain": "10m"})
        begun = controller.begin_apply()
        begun.wait_for("drain")
        begun.interrupt()
        ended = begun.end()
        assert ended.code == 130, (ended.out[-2000:], ended.err)
        assert view.server() == old
        assert view.show("Restart")["Restart"] != "no"
        assert view.left() == []
        controller.set(state="stopped", timeouts={**TIMEOUTS, "drain": "0s"})
        assert controller.apply().ended == (0, "Stopped", "")


def test_ctrl_c_twice_leaves_at_once_and_the_next_pass_goes_on(
    controller: Controller, view: HostView
) -> None:
    """Twice: exit 130 at once with a word on what stands half-way; the next pass ends Applied with one start (L3)."""
    deployed(controller)
    controller.commit("two", "--load", "6")
    starts = view.starts()
    begun = controller.begin_apply()
    begun.wait_for("ready")
    begun.interrupt()
    begun.wait_for_error("stopping at the next safe point")
    begun.interrupt()
    ended = begun.end()
    assert ended.code == 130
    if "left at once" in ended.err:
        again = controller.apply()
        assert again.code in {0, 3}, again.outcome
        assert view.left() == []
    assert view.starts() - starts <= 3
