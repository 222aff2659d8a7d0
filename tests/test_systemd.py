"""Unit text: what is written is what systemd runs, and nothing that cannot be written is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.systemd import (
    STARTS_PER_WINDOW,
    Section,
    ServerUnit,
    UnitFile,
    UnitTextError,
    argv_of,
    environment_line,
    environment_of,
    exec_line,
    guard_instance,
    parse_exec,
    parse_unit,
    path_text,
    plain_text,
    quoted,
    render_unit,
    seconds,
    server_unit,
    split_words,
    start_limit_window_s,
    unit_diff,
    unit_environment,
)

UNWRITABLE = {0} | set(range(0xFDD0, 0xFDF0))
TEXT = st.text(
    st.characters(exclude_categories=["Cs"]).filter(
        lambda c: ord(c) not in UNWRITABLE and ord(c) & 0xFFFE != 0xFFFE
    )
)
HARD = st.lists(
    st.sampled_from(
        [*"\\\"'$%;-@+!:#={}() \t\n\r", "\x01", "\x7f", "\u2028", "ß", "${V}", "%n", '" "-']
    )
).map("".join)
NAME = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)


def made(**changes: object) -> ServerUnit:
    values: dict[str, object] = {
        "server": "qwen",
        "unit": "sglang-qwen.service",
        "revision": "ab" * 32,
        "description": "qwen served by sglang",
        "argv": ("/opt/sglang/bin/python", "-m", "sglang.launch_server", "--tp-size", "4"),
        "environment": {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"},
        "stop_s": 120.0,
        "ready_s": 600.0,
        "user": "sglang",
        "group_id": 60706,
    }
    return ServerUnit(**{**values, **changes})  # type: ignore[arg-type]


def test_the_whole_text_of_a_servers_unit() -> None:
    """A person who reads the unit on the host finds who made it, and every setting that keeps it safe."""
    text = server_unit(
        made(
            environment_file="/var/lib/reconciler/qwen/secrets.env",
            working_directory="/srv/qwen",
            credentials={"secrets.yaml": "/var/lib/reconciler/qwen/secrets.yaml"},
        )
    )
    assert (
        text
        == """\
# Made by reconcile for the server qwen; do not edit.
# Revision abababababababababababababababababababababababababababababababab.
# To change it, change the server's spec and run: reconcile

[Unit]
Description=qwen served by sglang
Requires=reconciler-guard@sglang-qwen.service
After=reconciler-guard@sglang-qwen.service network-online.target
Wants=network-online.target
StartLimitIntervalSec=2235s
StartLimitBurst=3

[Service]
Type=exec
User=sglang
SupplementaryGroups=60706
WorkingDirectory=/srv/qwen
ExecStart="/opt/sglang/bin/python"\\
    "-m" "sglang.launch_server"\\
    "--tp-size" "4"
Environment="CUDA_VISIBLE_DEVICES=GPU-1,GPU-2"
Environment="RECONCILER_SERVER=qwen"
Environment="SPT_NOENV=1"
EnvironmentFile=-/var/lib/reconciler/qwen/secrets.env
LoadCredential=secrets.yaml:/var/lib/reconciler/qwen/secrets.yaml
PrivateMounts=yes
Restart=on-failure
RestartSec=5s
TimeoutStartSec=infinity
TimeoutStopSec=120s
KillMode=mixed
SendSIGKILL=yes
OOMPolicy=stop
LimitNOFILE=1048576
LimitMEMLOCK=infinity
NoNewPrivileges=yes

[Install]
WantedBy=multi-user.target
"""
    )


@pytest.mark.parametrize(
    ("argument", "written"),
    [
        ("b c", '"b c"'),
        ("h\ti", '"h\\ti"'),
        ("c:\\new", '"c:\\\\new"'),
        ('{"a":1}', '"{\\"a\\":1}"'),
        ("$V", '"$$V"'),
        ("${V}", '"$${V}"'),
        ("pre$V", '"pre$$V"'),
        ("$(id)", '"$$(id)"'),
        ("%n", '"%%n"'),
        (";", '";"'),
        ("line\nbreak", '"line\\nbreak"'),
        ("\r\x01\x7f", '"\\r\\x01\\x7f"'),
        ("ends in \\", '"ends in \\\\"'),
        ("", '""'),
        ("it's", '"it\'s"'),
    ],
)
def test_each_hard_argument_is_written_as_found_by_trying(argument: str, written: str) -> None:
    """Every row of the quoting table has exactly one spelling, and it reads back to itself."""
    assert quoted(argument, dollar="$$") == written
    assert parse_exec(exec_line(["/bin/x", argument])) == ("/bin/x", argument)


@given(st.lists(TEXT | HARD, max_size=8))
def test_any_argv_reads_back_as_it_went_in(arguments: list[str]) -> None:
    """S18: whatever stands in an argument, the unit's text says exactly that argv."""
    unit = made(argv=("/opt/x/python", *arguments))
    assert argv_of(parse_unit(server_unit(unit))) == unit.argv


@given(st.dictionaries(NAME, TEXT | HARD, max_size=6))
def test_any_environment_reads_back_as_it_went_in(environment: dict[str, str]) -> None:
    """S18: whatever stands in a variable, the unit's text sets exactly that, beside our two marks."""
    unit = made(environment=environment)
    found = environment_of(parse_unit(server_unit(unit)))
    assert found == {**environment, "RECONCILER_SERVER": "qwen", "SPT_NOENV": "1"}
    assert unit_environment(unit) == tuple(f"{k}={v}" for k, v in sorted(found.items()))


@given(st.lists(TEXT | HARD, max_size=8), st.dictionaries(NAME, HARD, max_size=3))
def test_reading_and_writing_again_changes_no_byte(
    arguments: list[str], env: dict[str, str]
) -> None:
    """A unit that was read and written again is the same file, so that a diff shows real changes only."""
    text = server_unit(made(argv=("/opt/x/python", *arguments), environment=env))
    assert render_unit(parse_unit(text)) == text


@pytest.mark.parametrize("bad", ["a\0b", "\ud800", "\ufffe", "\ufdd0", "\U0001ffff"])
def test_what_systemd_cannot_carry_is_refused(bad: str) -> None:
    """A NUL or a code that is no character would make systemd drop the line: it is never written."""
    with pytest.raises(UnitTextError):
        exec_line(["/bin/x", bad])
    with pytest.raises(UnitTextError):
        environment_line("A", bad)


@pytest.mark.parametrize(
    "program",
    ["python", "-/bin/x", "@/bin/x", "+/bin/x", "!/bin/x", ":/bin/x", "/opt/../bin/x", "/bin//x", "/bin/",
     "/opt/$X/python", '/opt/"x"', "/opt/x\\y", "/opt/x\ny", "/opt/x ", ""],
)  # fmt: skip
def test_only_an_absolute_plain_path_can_be_started(program: str) -> None:
    """No prefix of systemd's and no path that it would read differently ever reaches an Exec line."""
    with pytest.raises(UnitTextError):
        exec_line([program])
    with pytest.raises(UnitTextError):
        exec_line([])


def test_a_command_longer_than_a_line_of_systemd_is_refused() -> None:
    """Past 1 MiB systemd breaks the unit; below it a long command is fine."""
    assert parse_exec(exec_line(["/bin/x", "a" * 900_000]))[1] == "a" * 900_000
    with pytest.raises(UnitTextError, match="longer than systemd reads"):
        exec_line(["/bin/x", "a" * 1_100_000])
    with pytest.raises(UnitTextError, match="longer than systemd reads"):
        environment_line("A", "a" * 1_100_000)


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A-B", "ä"])
def test_a_variable_has_a_variables_name(name: str) -> None:
    """A name that systemd would ignore, with the variable, is refused."""
    with pytest.raises(UnitTextError):
        environment_line(name, "x")


def test_our_marks_cannot_be_set_to_something_else() -> None:
    """A spec cannot make its processes look like another server's."""
    with pytest.raises(UnitTextError, match="RECONCILER_SERVER"):
        server_unit(made(environment={"RECONCILER_SERVER": "other"}))


@pytest.mark.parametrize(
    "unit", ["qwen", "qwen.timer", "../x.service", "a b.service", "a\n.service", ".service"]
)
def test_a_unit_has_the_name_of_a_service(unit: str) -> None:
    """A name that systemd would escape or read as a path is refused."""
    with pytest.raises(UnitTextError):
        guard_instance(unit)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("user", "root\nUser=x"),
        ("user", ""),
        ("working_directory", "relative"),
        ("environment_file", "/x\n[Unit]"),
        ("credentials", {"a:b": "/x"}),
        ("stop_s", float("inf")),
        ("stop_s", -1.0),
    ],
)
def test_no_field_can_carry_a_line_of_its_own(field: str, value: object) -> None:
    """S18: a value that would become a second setting is refused, whichever field it stands in."""
    with pytest.raises(UnitTextError):
        server_unit(made(**{field: value}))


def test_a_description_is_text_without_syntax() -> None:
    """Specifiers, line ends and backslashes in a description are neutralised, never interpreted."""
    assert plain_text("a %n\nb\\") == "a %%n?b?"
    assert path_text("/srv/100%") == "/srv/100%%"


def test_the_start_limit_trips_for_a_server_that_dies_at_the_end_of_loading() -> None:
    """A crash loop ends by itself: the start too many lies inside the window, however slow each one is."""
    unit = made(ready_s=1800.0, stop_s=120.0, restart_s=5.0)
    slowest_turn = 1800 + 5 + 120
    assert start_limit_window_s(unit) > STARTS_PER_WINDOW * slowest_turn


def test_spans_are_written_exactly() -> None:
    """Whole seconds stay readable; a fraction keeps its milliseconds."""
    assert seconds(60.0) == "60s"
    assert seconds(1.5) == "1500ms"


def test_a_diff_shows_the_flag_that_changed_and_no_other() -> None:
    """One changed flag is one changed line of the unit."""
    old, new = server_unit(made()), server_unit(made(argv=(*made().argv[:-1], "8")))
    changed = [line for line in unit_diff(old, new).split("\n")[2:] if line[:1] in "+-"]
    assert changed == ['-    "--tp-size" "4"', '+    "--tp-size" "8"']
    assert unit_diff(old, old) == ""


def test_foreign_text_is_joined_as_systemd_joins_it() -> None:
    """Continuations, comments inside them, single quotes and resets are read as systemd reads them."""
    unit = parse_unit(
        "; a comment\n[Service]\nExecStart=/bin/a \\\n# skipped\n  'b c' d\\x20e \\\n\tf\n"
        "Environment=A=1\nEnvironment=\nEnvironment='B=x y' C=2\n"
    )
    assert unit.header == ("a comment",)
    assert argv_of(unit) == ("/bin/a", "b c", "d e", "f")
    assert environment_of(unit) == {"B": "x y", "C": "2"}


@pytest.mark.parametrize(
    "line",
    ["-/bin/x", "bin/x", "/bin/x %n", "/bin/x $V", "/bin/x pre${V}", "/bin/x a ; /bin/y", '/bin/x "open',
     "/bin/x \\q", "/bin/x \\x00", "/bin/x \\U00110000", ""],
)  # fmt: skip
def test_what_hangs_on_more_than_the_line_is_not_guessed(line: str) -> None:
    """An argv that only systemd could tell is refused, not shown wrong."""
    with pytest.raises(UnitTextError):
        parse_exec(line)


def test_escapes_of_every_form_are_read() -> None:
    """Hex, octal and Unicode escapes, inside and outside quotes, give their characters."""
    assert split_words(r'\x41\102\u0043 "\U00000044\s" ') == ("ABC", "D ")


@pytest.mark.parametrize("text", ["A=1\n", "[Service]\nnonsense\n"])
def test_a_line_that_is_no_assignment_is_an_error(text: str) -> None:
    """Text that is no unit is said to be none."""
    with pytest.raises(UnitTextError):
        parse_unit(text)


def test_a_value_of_two_lines_is_never_written() -> None:
    """Even a hand-made section cannot smuggle a line."""
    for value in ("a\nb", "a\\"):
        with pytest.raises(UnitTextError):
            render_unit(UnitFile((), (Section("Unit", (("X", value),)),)))


def test_a_unit_with_two_commands_has_no_one_argv() -> None:
    """A unit that starts several commands is not read as one server."""
    with pytest.raises(UnitTextError, match="2 ExecStart"):
        argv_of(parse_unit("[Service]\nExecStart=/bin/a\nExecStart=/bin/b\n"))


def test_text_that_ends_inside_a_line_is_read_to_its_end() -> None:
    """A last line that announces another is still a line, and an assignment without a name is none."""
    assert argv_of(parse_unit("[Service]\nExecStart=/bin/a b \\")) == ("/bin/a", "b")
    with pytest.raises(UnitTextError, match="sets no variable"):
        environment_of(parse_unit("[Service]\nEnvironment=1A=x\n"))
