"""Unit text against systemd's own reading of it: what went in is what it loads, and what it runs."""

from __future__ import annotations

import json
import random

import pytest

from reconciler.lab.hosts import SystemdHost
from reconciler.systemd import ServerUnit, server_unit, unit_environment

pytestmark = pytest.mark.lab

PIECES = [
    *"\\\"'$%;-@+!:#=|~*?()[]{}<>&`,. \t\n\r", "\x01", "\x1b[31m", "\x7f", "\x80", "\u0085", "\u2028", "\u202e", "ß", "語", "😀", "\ufeff",
    "${V}", "$V", "$$", "$(id)", "%n", "%%", "%Z", '" "-', "\\x41", "\\n", "\\", "a", "b c", "--flag=value", '{"a": [1, "b"]}', "[Service]", "\nUser=root",
]  # fmt: skip
DUMP = """\
import json, os, sys
told = {"argv": sys.argv[2:], "environ": dict(os.environ), "groups": os.getgroups(), "uid": os.getuid()}
told["secret"] = open(os.environ["CREDENTIALS_DIRECTORY"] + "/key").read()
with open(sys.argv[1], "w") as out:
    json.dump(told, out)
"""
INSTALL = """\
import json, os, sys
for path, text in json.load(sys.stdin).items():
    with open(path, "w", newline="") as out:
        out.write(text)
"""
ASK = """\
import json, subprocess, sys
def ask(unit, kind, name):
    path = "/org/freedesktop/systemd1/unit/" + "".join(c if c.isalnum() else "_%02x" % ord(c) for c in unit)
    argv = ["busctl", "--json=short", "get-property", "org.freedesktop.systemd1", path, "org.freedesktop.systemd1." + kind, name]
    return json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)["data"]
told = {}
for unit in json.load(sys.stdin):
    told[unit] = {"load": ask(unit, "Unit", "LoadState"), "exec": ask(unit, "Service", "ExecStart"), "env": ask(unit, "Service", "Environment")}
print(json.dumps(told))
"""


def made(unit: str, **changes: object) -> ServerUnit:
    values: dict[str, object] = {
        "server": "hard",
        "unit": unit,
        "revision": "ab" * 32,
        "description": "100% hard \\ arguments",
        "argv": ("/bin/true",),
        "environment": {},
        "stop_s": 5.0,
        "ready_s": 5.0,
    }
    return ServerUnit(**{**values, **changes})  # type: ignore[arg-type]


def install(host: SystemdHost, units: list[ServerUnit]) -> None:
    files = {f"/etc/systemd/system/{unit.unit}": server_unit(unit) for unit in units}
    files["/etc/systemd/system/reconciler-guard@.service"] = (
        "[Service]\nType=oneshot\nExecStart=/bin/true\n"
    )
    host.check(["/usr/bin/python3", "-c", INSTALL], json.dumps(files).encode())
    host.check(["systemctl", "daemon-reload"])


def hard_texts(seed: int, count: int) -> list[str]:
    dice = random.Random(seed)  # the same texts in every run
    return ["".join(dice.choices(PIECES, k=dice.randint(0, 8))) for _ in range(count)]


def test_systemd_loads_exactly_the_argv_and_environment_that_went_in(lab_host: SystemdHost) -> None:
    """S18, S24: 3,000 hard arguments and variables come back over the bus as they were given."""
    units = [
        made(
            f"hard-{n}.service",
            argv=("/bin/true", *hard_texts(n, 60), *PIECES),
            environment={f"V{i}": text for i, text in enumerate(hard_texts(1000 + n, 40))},
        )
        for n in range(30)
    ]
    install(lab_host, units)
    told = json.loads(
        lab_host.check(
            ["/usr/bin/python3", "-c", ASK], json.dumps([u.unit for u in units]).encode()
        )
    )
    for unit in units:
        assert told[unit.unit]["load"] == "loaded"
        ((path, argv, *_),) = told[unit.unit]["exec"]
        assert path == unit.argv[0]
        # What systemd shows is before it expands `$` at the start: there each `$` still stands twice.
        assert tuple(word.replace("$$", "$") for word in argv[1:]) == unit.argv[1:]
        assert [word.count("$") for word in argv[1:]] == [
            2 * word.count("$") for word in unit.argv[1:]
        ]
        assert sorted(told[unit.unit]["env"]) == sorted(unit_environment(unit))


def test_the_process_gets_exactly_what_went_in(lab_host: SystemdHost) -> None:
    """The program itself sees every argument and variable, its marks, its group and its credential."""
    arguments = [*PIECES, *hard_texts(7, 60)]
    environment = {f"V{i}": text for i, text in enumerate([*PIECES, *hard_texts(8, 40)])}
    lab_host.check(
        ["/usr/bin/python3", "-c", INSTALL],
        json.dumps({"/usr/local/bin/dump.py": DUMP, "/etc/the-key": "closed to others"}).encode(),
    )
    lab_host.check(["groupadd", "-f", "-g", "60999", "reconciler-hard"])  # systemd wants an entry
    lab_host.check(["chmod", "600", "/etc/the-key"])
    lab_host.check(["install", "-d", "-o", "deploy", "/run/told"])
    unit = made(
        "dump.service",
        argv=("/usr/bin/python3", "/usr/local/bin/dump.py", "/run/told/it", *arguments),
        environment=environment,
        user="deploy",
        group_id=60999,
        working_directory="/run/told",
        credentials={"key": "/etc/the-key"},
    )
    install(lab_host, [unit])
    lab_host.check(["systemctl", "start", "dump.service"])
    lab_host.check(
        ["sh", "-c", "until [ -s /run/told/it ] && python3 -m json.tool /run/told/it; do :; done"]
    )
    told = json.loads(lab_host.check(["cat", "/run/told/it"]))
    assert told["argv"] == arguments
    assert {k: v for k, v in told["environ"].items() if k in environment} == environment
    assert told["environ"]["RECONCILER_SERVER"] == "hard"
    assert 60999 in told["groups"]
    assert told["uid"] != 0
    assert told["secret"] == "closed to others"


def test_a_server_that_dies_at_once_stops_starting_by_itself(lab_host: SystemdHost) -> None:
    """S16: after three starts in the window systemd gives up; nothing loops for ever."""
    install(lab_host, [made("loop.service", argv=("/bin/false",), restart_s=0.1)])
    lab_host.check(["systemctl", "start", "--no-block", "loop.service"])
    state = "systemctl show -p ActiveState --value loop.service"
    lab_host.check(["sh", "-c", f'until [ "$({state})" = failed ]; do :; done'])
    shown = lab_host.check(
        ["systemctl", "show", "-p", "NRestarts", "-p", "StartLimitBurst", "loop.service"]
    )
    assert dict(line.split("=") for line in shown.split()) == {
        "NRestarts": "3",
        "StartLimitBurst": "3",
    }
    journal = lab_host.check(["journalctl", "-u", "loop.service", "-o", "cat", "--no-pager"])
    assert "Start request repeated too quickly" in journal


def test_systemd_finds_nothing_to_complain_about(lab_host: SystemdHost) -> None:
    """Every key of the unit is one that this systemd knows."""
    install(
        lab_host, [made("plain.service", user="deploy", group_id=60999, working_directory="/tmp")]
    )
    done = lab_host.exec(["systemd-analyze", "verify", "/etc/systemd/system/plain.service"])
    assert b"Unknown key" not in done.stderr + done.stdout
    assert b"plain.service" not in done.stderr
