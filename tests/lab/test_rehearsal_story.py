"""What a rehearsal plays: `--set` on merged servers, cut-short waits, stand-ins that fit the spec. Pure parts."""

from __future__ import annotations

import pytest

from reconciler.core.errors import SpecError, UsageError
from reconciler.core.fleet import Fleet, load_fleet
from reconciler.lab.rehearsal import CASES as SIMULATED_CASES
from reconciler.lab.rehearsal import Backend, choose
from reconciler.lab.rehearsal_hosts import CASES as SYSTEMD_CASES
from reconciler.lab.stand_in import SPEED_BY_STEPS, Fault, stand_in_of
from reconciler.lab.story import BREAKS, FLEET, changed, chapters_of, shortened, shortening, story
from reconciler.wiring import engines


@pytest.fixture
def fleet() -> Fleet:
    return load_fleet({"story.yaml": FLEET.encode()}, engines=engines())


def test_set_reads_yaml_and_reaches_into_maps_and_named_items(fleet: Fleet) -> None:
    """A value is typed as in a spec; a list's item is found by its name; null removes."""
    sets = [
        "qwen.speculative.num_steps=3",
        "qwen.args={context-length: 4096}",
        "qwen.gate.runs.single.min_decode_tps=150",
        "qwen.timeouts.drain=null",
    ]
    server = changed(fleet, sets, engines()).servers[0]
    assert server.speculative is not None
    assert server.speculative["num_steps"] == 3
    assert server.args["context-length"] == 4096
    assert server.gate is not None
    assert server.gate.runs[0].limits[0].value == 150
    assert server.timeouts.drain != fleet.servers[0].timeouts.drain


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("qwen", UsageError, "write SERVER.field=value"),
        ("qwen=3", UsageError, "write SERVER.field=value"),
        ("qwen..x=3", UsageError, "write SERVER.field=value"),
        ("qwem.tp_size=3", UsageError, "there are: qwen"),
        ("qwen.name=other", UsageError, "cannot be set"),
        ("qwen.gate.runs.batch.requests=3", UsageError, "no item 'batch'"),
        ("qwen.tp_size.x=3", UsageError, "has no fields of its own"),
        ("qwen.tp_sise=3", SpecError, "did you mean `tp_size`"),
        ("qwen.tp_size=three", SpecError, "`tp_size`: expected a whole number"),
        ("qwen.speculative.num_steps=0", SpecError, "`speculative.num_steps`"),
        ("qwen.args={a: 1", SpecError, "is missing"),
        ("qwen.args=&a {b: 1}", SpecError, "anchor"),
    ],
)
def test_a_wrong_set_says_what_is_wrong(
    fleet: Fleet, text: str, error: type[Exception], words: str
) -> None:
    """The message names the option as typed, and the field."""
    with pytest.raises(error, match=words.replace("(", r"\(")) as caught:
        changed(fleet, [text], engines())
    assert f"--set {text}" in str(caught.value)


def test_the_whole_fleet_is_judged_after_a_set() -> None:
    """A change that clashes with another server is refused as a spec would be."""
    other = (
        FLEET.partition("---")[2]
        .replace("name: qwen\n", "name: other\n")
        .replace("sglang-qwen", "other")
    )
    text = FLEET + "---" + other.replace("[0, 1, 2, 3]", "[4, 5, 6, 7]").replace("30000", "30001")
    two = load_fleet({"f.yaml": text.encode()}, engines=engines())
    assert not two.problems
    with pytest.raises(SpecError, match="port 30000 of host"):
        changed(two, ["other.listen.port=30000"], engines())


def test_waits_are_cut_and_nothing_else(fleet: Fleet) -> None:
    """Only what is longer than a rehearsal's patience changes, and it is said."""
    assert shortened(fleet, engines()) == fleet or not shortening(
        fleet, shortened(fleet, engines())
    )
    long = changed(
        fleet, ["qwen.timeouts.stop=120s", "qwen.gate.runs.single.max_tokens=256"], engines()
    )
    cut = shortened(long, engines())
    assert cut.servers[0].timeouts.stop == 5.0
    assert cut.servers[0].gate is not None
    assert cut.servers[0].gate.runs[0].max_tokens == 32
    assert shortening(long, cut) == "stop 5 s, answers of at most 32 tokens in gates"
    assert cut.servers[0].model_dump(exclude={"timeouts", "gate"}) == long.servers[0].model_dump(
        exclude={"timeouts", "gate"}
    )


def test_stand_ins_are_as_fast_as_the_incident_measured(fleet: Fleet) -> None:
    """num_steps decides; more steps than five make it slower than the gate allows."""
    for steps, speed in SPEED_BY_STEPS.items():
        server = changed(fleet, [f"qwen.speculative.num_steps={steps}"], engines()).servers[0]
        assert stand_in_of(server).speed == speed
    far = changed(fleet, ["qwen.speculative.num_steps=10"], engines()).servers[0]
    assert stand_in_of(far).speed < 60
    bare = changed(
        fleet, ["qwen.speculative=null", "qwen.gate.runs.single.min_decode_tps=500"], engines()
    ).servers[0]
    assert stand_in_of(bare).speed == 650


def test_a_slow_stand_in_misses_every_limit(fleet: Fleet) -> None:
    """Speeds fall below the gate's minimum, first tokens come after its maximum."""
    server = changed(fleet, ["qwen.gate.runs.single.max_ttft_p50=100ms"], engines()).servers[0]
    options = stand_in_of(server, Fault.SLOW).options()
    assert float(options[options.index("--speed") + 1]) < 100
    assert float(options[options.index("--ttft") + 1]) > 0.1


def test_the_story_has_four_chapters_that_end_differently() -> None:
    """First deploy, a faster change, one that fails its gate, a left-over that is ended."""
    chapters = story(engines())
    assert [c.ends.value for c in chapters if c.ends] == [
        "Applied",
        "Applied",
        "RolledBack",
        "Applied",
    ]
    assert [c.kills for c in chapters] == [False, False, False, True]


def test_every_case_is_played_or_refused_by_name() -> None:
    """Each backend knows each case, but the power cut that only the simulated host can have."""
    assert set(SIMULATED_CASES) == set(BREAKS)
    assert set(BREAKS) - set(SYSTEMD_CASES) == {n for n, b in BREAKS.items() if b.only_simulated}


def test_auto_takes_simulated_hosts_where_lab_hosts_cannot_play_it(fleet: Fleet) -> None:
    """The reason is said; whoever insists on a real systemd is told why not."""
    named = changed(fleet, ["qwen.gpus=['0000:3b:00.0', 1, 2, 3]"], engines())
    for specs, case in ((named, None), (fleet, BREAKS["reboot"])):
        choice = choose(Backend.AUTO, specs, case)
        assert choice.backend is Backend.SIMULATED
        assert "no real systemd because" in choice.why
        with pytest.raises(UsageError, match="cannot be used for this"):
            choose(Backend.SYSTEMD, specs, case)


def test_a_case_without_a_second_commit_makes_one(fleet: Fleet) -> None:
    """Something must be rolled out for anything to go wrong; a server that cannot play it is said."""
    first, second = chapters_of(fleet, [], "left-over", engines())
    assert first.fleet.servers[0].env != second.fleet.servers[0].env
    assert second.victim == "qwen"
    bare = changed(fleet, ["qwen.gate=null"], engines())
    with pytest.raises(UsageError, match="needs a server that has a gate"):
        chapters_of(bare, [], "slow", engines())
