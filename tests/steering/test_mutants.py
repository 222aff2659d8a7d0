"""Guards of pruning, holds, windows and groups, each switched off: a server that must not be touched is, and it is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from steering_stage import ENGINES, Stage

from reconciler import reconcile
from reconciler.core import plan, pruning, schedule
from reconciler.core.conditions import Outcome
from reconciler.core.fleet import Fleet, load_fleet
from reconciler.core.plan import Permissions
from reconciler.core.pruning import Pruning
from reconciler.helper import retire
from reconciler.helper.protocol import Act
from reconciler.reconcile import act, survey

GROUP = "group: {name: chat, at_once: 1, min_available: 1, canary: a, soak: 30m, max_failures: 1}"


def passed(stage: Stage, fleet: Fleet, **allow: object) -> None:
    """Make one pass over a fleet."""
    found = survey(fleet, stage.controller, allow=Permissions(**allow))  # type: ignore[arg-type]
    act(found, stage.controller, lambda _event: None)


def three(stage: Stage, steps: int, rules: str) -> str:
    """Give a group of three, each on a host of its own."""
    return stage.text(**{n: f"{n} 0 {steps}\n{rules}" for n in ("a", "b", "c")})


def down(stage: Stage, *names: str) -> set[str]:
    """Name those that do not serve any more."""
    return {n for n in names if not stage.serving(n)}


def more_than_a_pass_may_end() -> bool:
    """Prune two in one pass."""
    stage = Stage(pruning=Pruning("auto"))
    stage.apply(stage.text(keep="one 0 1", a="one 1 1", b="one 2 1"))
    stage.apply(stage.text(keep="one 0 1"))
    return down(stage, "a", "b") == {"a", "b"}


def unconfirmed() -> bool:
    """Prune what somebody was to confirm."""
    stage = Stage(pruning=Pruning("confirm"))
    stage.apply(stage.text(keep="one 0 1", old="one 1 1"))
    stage.apply(stage.text(keep="one 0 1"))
    return bool(down(stage, "old"))


def protected() -> bool:
    """Prune what was protected."""
    stage = Stage()
    stage.apply(stage.text(keep="one 0 1", old="one 1 1\nprotect: true"))
    stage.prune(Pruning("auto"))
    stage.apply(stage.text(keep="one 0 1"))
    return "/etc/systemd/system/old.service" not in stage.hosts["one"].host.files.data


def by_a_broken_file() -> bool:
    """Prune because a file cannot be read."""
    stage = Stage(pruning=Pruning("auto"))
    stage.apply(stage.text(keep="one 0 1", old="one 1 1"))
    rest = {"specs/fleet.yaml": stage.text(keep="one 0 1").encode()}
    rest["specs/new.yaml"] = b"apiVersion: reconciler/v1\nkind: Serv er\n"
    passed(stage, load_fleet(rest, engines=ENGINES))
    return bool(down(stage, "old"))


def by_specs_without_a_server() -> bool:
    """Prune the last ones because nothing but hosts is left."""
    stage = Stage(pruning=Pruning("auto", limit=10))
    stage.apply(stage.text(keep="one 0 1"))
    stage.apply(stage.text())
    return bool(down(stage, "keep"))


def held() -> bool:
    """Change a server that is on hold."""
    stage = Stage()
    stage.apply(stage.text(a="one 0 1"))
    hold = b'{"at":1,"owner":"ann","reason":"demo","until":null,"version":1}'
    stage.hosts["one"].host.files.put("/var/lib/reconciler/a/hold.json", hold)
    stage.apply(stage.text(a="one 0 2"))
    return len(stage.hosts["one"].host.truth.starts) > 1


def outside_of_its_window() -> bool:
    """Change a server while its window is shut."""
    stage = Stage()
    stage.apply(stage.text(a="one 0 1"))
    stage.apply(stage.text(a='one 0 2\nwindow: {allow: ["22:00-23:00"]}'))
    return len(stage.hosts["one"].host.truth.starts) > 1


def before_the_canary() -> bool:
    """Change the others while the canary has not soaked."""
    stage = Stage("a", "b", "c")
    stage.settle(three(stage, 1, "group: {name: chat}"), 3)
    starts = len(stage.hosts["b"].host.truth.starts)
    stage.settle(three(stage, 2, GROUP), 3)
    return len(stage.hosts["b"].host.truth.starts) > starts


def after_a_failure() -> bool:
    """Try a bad revision on the next member."""
    stage = Stage("a", "b", "c")
    rules = "group: {name: chat, at_once: 1, max_failures: 1}"
    stage.settle(three(stage, 1, rules), 3)
    starts = len(stage.hosts["b"].host.truth.starts)
    stage.settle(three(stage, 3, rules), 3)
    return len(stage.hosts["b"].host.truth.starts) > starts


def before_its_dependency() -> bool:
    """Change a server whose dependency does not serve."""
    stage = Stage("one", "two")
    stage.apply(stage.text(a="one 0 1\ndepends_on: [b]", b="two 0 3"))
    return stage.serving("a", "one")


def no_bound(patch: pytest.MonkeyPatch) -> None:
    """End as many as there are."""
    patch.setattr(reconcile, "limited", lambda *_: {})


def nobody_asked(patch: pytest.MonkeyPatch) -> None:
    """Take every orphan for one that a person named."""
    real = pruning.orphan_plan
    patch.setattr(
        reconcile, "orphan_plan", lambda *args, **said: real(*args, **{**said, "asked": True})
    )


def no_protection(patch: pytest.MonkeyPatch) -> None:
    """Forget what the host remembers, in the plan and in the helper."""
    nobody_asked(patch)
    real = Act.record
    patch.setattr(
        retire.Act, "record", lambda self, name: None if name == "protect" else real(self, name)
    )


def always_complete(patch: pytest.MonkeyPatch) -> None:
    """Take a reading with mistakes for a whole one."""
    patch.setattr(Fleet, "complete", property(lambda _self: True))


def some_are_left(patch: pytest.MonkeyPatch) -> None:
    """Never doubt specs without a server."""
    real = pruning.orphan_plan
    patch.setattr(
        reconcile, "orphan_plan", lambda *args, **said: real(*args, **{**said, "none_left": False})
    )


def no_holds(patch: pytest.MonkeyPatch) -> None:
    """Take every hold for one that ran out."""
    patch.setattr(plan, "expired", lambda *_: True)


def always_open(patch: pytest.MonkeyPatch) -> None:
    """Leave every window open."""
    patch.setattr(schedule, "is_open", lambda *_: True)


def no_canary(patch: pytest.MonkeyPatch) -> None:
    """Let everybody follow at once."""
    patch.setattr(schedule, "_canary", lambda *_: None)


def no_failures(patch: pytest.MonkeyPatch) -> None:
    """Forget who failed on what is to run."""
    real = reconcile.Facts
    patch.setattr(reconcile, "Facts", lambda **facts: real(**{**facts, "failed": False}))


def no_dependencies(patch: pytest.MonkeyPatch) -> None:
    """Let nobody wait for anybody."""
    patch.setattr(schedule, "_depends", lambda *_: None)


CASES: list[tuple[Callable[[], bool], Callable[[pytest.MonkeyPatch], None]]] = [
    (more_than_a_pass_may_end, no_bound),
    (unconfirmed, nobody_asked),
    (protected, no_protection),
    (by_a_broken_file, always_complete),
    (by_specs_without_a_server, some_are_left),
    (held, no_holds),
    (outside_of_its_window, always_open),
    (before_the_canary, no_canary),
    (after_a_failure, no_failures),
    (before_its_dependency, no_dependencies),
]


@pytest.mark.parametrize(("harmed", "switched_off"), CASES)
def test_with_its_guard_off_a_server_is_harmed_and_with_it_on_none_is(
    harmed: Callable[[], bool],
    switched_off: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S13, S6, S25, S27: each guard is the one thing between a mistake and a server that serves."""
    assert not harmed()
    switched_off(monkeypatch)
    assert harmed()


def test_what_is_protected_after_the_look_is_refused_by_its_host() -> None:
    """The helper compares with what is recorded when it acts: the unit and its binding stay."""
    stage = Stage(pruning=Pruning("auto"))
    stage.apply(stage.text(keep="one 0 1", old="one 1 1"))
    found = survey(stage.fleet(stage.text(keep="one 0 1")), stage.controller)
    files = stage.hosts["one"].host.files
    files.put("/var/lib/reconciler/old/protect.json", b'{"at":1,"version":1}')
    results = {r.server: r for r in act(found, stage.controller, lambda _event: None)}
    assert results["old"].outcome is Outcome.REFUSED
    assert "protected" in results["old"].sentence
    assert "/etc/systemd/system/old.service" in files.data
