"""The operator's settings: where they come from, who wins, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from reconciler.core.errors import SpecError
from reconciler.core.policy import Grant
from reconciler.settings import Settings, load_settings

UID = os.getuid()


def write(home: Path, text: str) -> Path:
    path = home / ".config/reconciler/settings.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)
    return path


def load(home: Path, environ: Mapping[str, str] | None = None) -> Settings:
    return load_settings(environ or {}, home=home, uid=UID)


def refusals(home: Path, environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(home, environ)
    return str(caught.value).replace(str(home), "~").split("\n")


@pytest.fixture(autouse=True)
def _no_machine_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own settings are none of a test's business."""
    monkeypatch.setattr("reconciler.settings.SYSTEM_FILE", tmp_path / "etc/settings.yaml")


def test_without_any_file_everything_has_a_default(tmp_path: Path) -> None:
    """The first run needs no settings; state goes where XDG says."""
    settings = load(tmp_path)
    assert settings.state_dir == f"{tmp_path}/.local/state/reconciler"
    assert settings.store == f"sqlite:///{tmp_path}/.local/state/reconciler/history.db"
    assert (settings.trust_remote_code, settings.allow_no_pidfd) == (False, False)
    assert settings.spec_policy.grants == ()
    assert load(tmp_path, {"XDG_STATE_HOME": "/s"}).state_dir == "/s/reconciler"


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    """And each value is typed by its field."""
    write(tmp_path, "state_dir: /a\ntrust_remote_code: true\nhosts_at_once: 3\n")
    assert load(tmp_path).hosts_at_once == 3
    settings = load(
        tmp_path,
        {"RECONCILER_STATE_DIR": "/b", "RECONCILER_TRUST_REMOTE_CODE": "no", "RECONCILER_HOSTS_AT_ONCE": "7", "RECONCILER_SIGNING_KEYS": "/a:/b"},
    )  # fmt: skip
    assert (settings.state_dir, settings.trust_remote_code, settings.hosts_at_once) == (
        "/b",
        False,
        7,
    )
    assert settings.signing_keys == ("/a", "/b")


def test_a_named_file_is_the_only_one_that_is_read(tmp_path: Path) -> None:
    """RECONCILER_SETTINGS replaces the search, and must be there."""
    write(tmp_path, "state_dir: /user\n")
    named = tmp_path / "named.yaml"
    named.write_text("state_dir: /named\n")
    assert load(tmp_path, {"RECONCILER_SETTINGS": str(named)}).state_dir == "/named"
    assert refusals(tmp_path, {"RECONCILER_SETTINGS": str(tmp_path / "gone")}) == [
        "~/gone: cannot be read: No such file or directory"
    ]


def test_the_user_s_file_comes_before_the_machine_s(tmp_path: Path) -> None:
    """One file is read, not a mix of two."""
    system = tmp_path / "etc/settings.yaml"
    system.parent.mkdir()
    system.write_text("state_dir: /system\nhosts_at_once: 2\n")
    assert load(tmp_path).state_dir == "/system"
    write(tmp_path, "state_dir: /user\n")
    assert (load(tmp_path).state_dir, load(tmp_path).hosts_at_once) == ("/user", 16)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stat_dir: /x\n", "1:1: unknown key `stat_dir`; did you mean `state_dir`?"),
        ("state_dir: x\n", "1:12: `state_dir`: must be an absolute path"),
        ("trust_remote_code: no\n", "1:20: `trust_remote_code`: expected true or false, found text"),
        ("hosts_at_once: 0\n", "1:16: `hosts_at_once`: must be at least 1"),
        ("policy:\n  - hosts: [a]\n", "2:5: `path` is missing in `policy[0]`"),
        ("policy:\n  - path: a/**\n    ports: [30000-]\n", ""),
        ("policy:\n  - path: a/**\n    ports: [x]\n", "3:12: `policy[0].ports`: must be a port or a range such as 30000-30099"),
        ("policy:\n  - path: a/**\n    ports: [30000]\n", "3:13: `policy[0].ports[0]`: expected text, found a number; put it in quotes"),
        ("a: &x 1\n", "1:4: an anchor (&x); use `extends:` instead"),
        ("- a\n", "1:1: settings are one map in one document"),
        ("store: a\n---\nstore: b\n", "1:1: settings are one map in one document"),
    ],
)  # fmt: skip
def test_what_is_no_setting_is_refused_at_its_place(
    tmp_path: Path, text: str, expected: str
) -> None:
    """A typing error must not widen what specs may do."""
    write(tmp_path, text)
    if expected:
        assert refusals(tmp_path) == [f"~/.config/reconciler/settings.yaml:{expected}"]
    else:
        assert load(tmp_path).policy[0].ports == ("30000-",)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RECONCILER_HOSTS_AT_ONCE": "many"}, "RECONCILER_HOSTS_AT_ONCE: expected a whole number, found text"),
        ({"RECONCILER_TRUST_REMOTE_CODE": "maybe"}, "RECONCILER_TRUST_REMOTE_CODE: expected true or false, found text"),
        ({"RECONCILER_TRUST_REMOTECODE": "1"}, "RECONCILER_TRUST_REMOTECODE: is no setting; did you mean `RECONCILER_TRUST_REMOTE_CODE`?"),
        ({"RECONCILER_STATE_DIR": "x"}, "RECONCILER_STATE_DIR: must be an absolute path"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named(tmp_path: Path, environ: dict[str, str], expected: str) -> None:
    """Also one that is only nearly a setting; others of the prefix are not ours to judge."""
    assert refusals(tmp_path, environ) == [expected]
    assert load(tmp_path, {"RECONCILER_NIGHTLY": "1"})


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_decides_nothing(tmp_path: Path, mode: int) -> None:
    """Whoever can write the settings can allow anything."""
    write(tmp_path, "trust_remote_code: true\n").chmod(mode)
    (refusal,) = refusals(tmp_path)
    assert refusal == (
        "~/.config/reconciler/settings.yaml: decides what specs may do, and others may write it; "
        "it must belong to you or root, mode 0644 or less"
    )


def test_the_policy_becomes_grants(tmp_path: Path) -> None:
    """In written order, which is the order of trust."""
    write(
        tmp_path,
        "policy:\n  - path: team-a/**\n    hosts: [llm-*]\n    unit_prefixes: [a-]\n    ports: ['8000', 30000-30009]\n"
        "    model_sources: [Qwen/*]\n  - {path: '**', trust_remote_code: true}\n",
    )
    assert load(tmp_path).spec_policy.grants == (
        Grant(
            "team-a/**", ("llm-*",), ("*",), ("a-",), ((8000, 8000), (30000, 30009)), ("Qwen/*",)
        ),
        Grant("**", trust_remote_code=True),
    )
