"""A review as Markdown for a comment on GitHub, GitLab or Gitea: folded, bounded, and safe against what specs hold. Pure.

Text from specs is data. It stands only where no forge reads it: in code spans and fences that are longer than any run of
backticks inside, in table cells with bars escaped, or as escaped HTML inside `<code>`. There a mention notifies nobody, an
issue number links nothing, and a tag is letters. Control, bidi and other invisible characters are shown as escapes.

A comment that would be too long is cut between servers, never inside a fence or a fold, into parts that say so; what does
not fit into the last part is counted, with the command that shows it.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from reconciler.core.review import (
    FieldChange,
    HostReview,
    Kind,
    Review,
    ServerReview,
    headline,
)

GITHUB_LIMIT: Final = 65_536
"""Of a comment, in characters; counted here in bytes of UTF-8, which are never fewer."""
FOLD_LINES: Final = 12
"""What is longer is folded: about what is seen without scrolling."""
MAX_DIFF_LINES: Final = 400
MAX_LINE: Final = 600
MAX_VALUE: Final = 300
MAX_NAME: Final = 100
MAX_HOSTS: Final = 20
MAX_WARNINGS: Final = 20
MAX_ROWS: Final = 60
"""Of the table; a list of hundreds is not read, and would leave no room for what is."""
MAX_PROBLEMS: Final = 40
MARK: Final = "<!-- reconcile:"
_KEY: Final = re.compile(r"[A-Za-z0-9._/-]{1,120}\Z")


def pages(
    review: Review, *, limit: int = GITHUB_LIMIT, key: str = "plan", most: int = 1, note: str = ""
) -> tuple[str, ...]:
    """Write a review as one to `most` comments of at most `limit` bytes each.

    Each begins with a hidden mark by which it is found again (`marker`). `key` tells comments of several runs apart; `note`
    is ours (a link to the build, say), never a spec's.
    """
    assert limit >= 4_000, "a comment holds at least the table's head and the notes"
    room = limit - 600  # The mark, the words about parts, and what is left out.
    parts: list[list[str]] = [[_top(review, note, room)]]
    used = _bytes(parts[0][0])
    shown = 0
    for server in review.servers:
        block = _server(server)
        if _bytes(block) > room:
            block = _cut_server(server, room)
        size = _bytes(block) + 2
        if used + size > room:
            if len(parts) == most:
                break
            parts.append([])
            used = 0
        parts[-1].append(block)
        used += size
        shown += 1
    left = len(review.servers) - shown
    return tuple(
        _page(part, number, len(parts), key, left if number == len(parts) else 0)
        for number, part in enumerate(parts, 1)
    )


def _page(blocks: Sequence[str], number: int, of: int, key: str, left: int) -> str:
    lines = [marker(key, number)]
    if of > 1:
        lines.append(f"_Part {number} of {of}._")
    lines += blocks
    if left:
        what = "1 more server" if left == 1 else f"{left} more servers"
        lines.append(
            f"_{what} did not fit; the build's log, or `reconcile --dry-run --offline --base REV`, shows all._"
        )
    return "\n\n".join(lines) + "\n"


def marker(key: str, number: int = 1) -> str:
    """Give the hidden first line by which a comment of ours is known again.

    Raises:
        ValueError: The key could end the comment that hides it.
    """
    if not _KEY.match(key) or "--" in key:
        message = f"{key!r} is no key of a comment: letters, digits and . _ / -"
        raise ValueError(message)
    return f"{MARK}{key}:{number} -->"


def marked(body: str, key: str) -> int | None:
    """Give which part of ours a comment's body is, by its first line; None when it is not ours."""
    first = body.lstrip().partition("\n")[0].strip()
    match = re.fullmatch(re.escape(f"{MARK}{key}:") + r"(\d{1,3}) -->", first)
    return int(match[1]) if match else None


# -- parts -------------------------------------------------------------------------------------------------------


def _top(review: Review, note: str, room: int) -> str:
    """Write what a reader sees first. What does not fit is said to be left out, the last words never are."""
    sections = [_problems(review), _table(review), *(_host(h) for h in review.hosts[:MAX_HOSTS])]
    if len(review.hosts) > MAX_HOSTS:
        sections.append(f"_{len(review.hosts) - MAX_HOSTS} more hosts change._")
    last = "\n\n".join(filter(None, [_notes(review), note]))
    lines = [f"### reconcile: {headline(review)}"]
    left = room - _bytes(lines[0]) - _bytes(last) - 200
    for section in filter(None, sections):
        left -= _bytes(section) + 2
        lines.append(
            section if left > 0 else "_Something did not fit here; the build's log shows all._"
        )
        if left <= 0:
            break
    return "\n\n".join(filter(None, [*lines, last]))


def _problems(review: Review) -> str:
    if not review.problems:
        return ""
    shown = [_line(p) for p in review.problems[:MAX_PROBLEMS]]
    more = len(review.problems) - len(shown)
    text = "\n".join([*shown, *([f"... and {more} more"] if more else [])])
    words = (
        "Specs with mistakes hold back their own servers; nothing is removed while there are any."
    )
    return f"{words}\n\n{fenced(text, 'text')}"


def _table(review: Review) -> str:
    if not review.servers:
        return ""
    lines = ["| | server | host | what | outage |", "|---|---|---|---|---|"]
    for server in review.servers[:MAX_ROWS]:
        host = cell(server.host or "-")
        if server.host_before:
            host = f"{cell(server.host_before)} to {host}"
        row = (_SYMBOL[_look(server)], cell(server.server), host, _what(server), _outage(server))
        lines.append(f"| {' | '.join(row)} |")
    if len(review.servers) > MAX_ROWS:
        lines.append(f"| | _and {len(review.servers) - MAX_ROWS} more_ | | | |")
    return "\n".join(lines)


_SYMBOL: Final = {
    "held": "❌", "removed": "➖", "added": "➕", "restart": "🔁", "reload": "♻️", "controller": "📝", "none": "·",
}  # fmt: skip


def _look(server: ServerReview) -> str:
    if server.kind in {Kind.HELD, Kind.REMOVED, Kind.ADDED}:
        return server.kind.value
    return server.effect


def _what(server: ServerReview) -> str:
    """Say in our own words what happens to a server."""
    if server.kind is Kind.PLANNED and server.live is not None and server.blocked:
        return f"waits: {cell(server.live.reason or server.live.outcome)}"
    what = _EVENT[server.kind] or _NEEDS[server.effect]
    if server.kind is Kind.ADDED and server.effect == "none":
        what += ", stopped"
    if server.live is not None and server.blocked:
        what += f"; now: {cell(server.live.reason or server.live.outcome)}"
    return what


_EVENT: Final = {
    Kind.HELD: "held back by a mistake", Kind.REMOVED: "removed from the specs", Kind.ADDED: "added",
    Kind.MOVED: "**moved**: deployed anew", Kind.CHANGED: "", Kind.PLANNED: "",
}  # fmt: skip
_NEEDS: Final = {
    "restart": "**restart**", "reload": "reload, no stop", "controller": "no restart", "none": "nothing",
}  # fmt: skip


def _outage(server: ServerReview) -> str:
    if server.effect in {"reload", "controller", "none"} or server.kind is Kind.HELD:
        return "none"
    if server.kind in {Kind.ADDED, Kind.REMOVED}:
        return "-"
    if server.outage_s is None:
        return "not known yet"
    return f"about {server.outage_s:.0f} s ({server.outage_runs} rollout{'s' if server.outage_runs != 1 else ''})"


def _host(host: HostReview) -> str:
    rows = "\n".join(_field(c) for c in host.changes[:MAX_DIFF_LINES])
    title = f"Host <code>{_html(host.host)}</code> {host.kind.value}: how it is reached or what is protected there"
    return _fold(title, fenced(rows, "diff"))


def _notes(review: Review) -> str:
    lines = []
    against = review.against
    if against is not None:
        at = datetime.fromtimestamp(against.taken_at, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
        stale = " **This is old: hosts may have moved on.**" if against.stale else ""
        lines.append(
            f"Compared with the hosts as they were on {at} ({age(against.age_s)} before).{stale}"
        )
        if against.unknown_hosts:
            names = ", ".join(code(h) for h in against.unknown_hosts[:MAX_WARNINGS])
            lines.append(
                f"Nothing is known of {names}: not in that state, or not reachable when it was taken."
            )
    if review.also_pending:
        names = ", ".join(code(n) for n in review.also_pending[:MAX_WARNINGS])
        more = len(review.also_pending) - MAX_WARNINGS
        lines.append(
            f"Whatever this change does, the next pass also acts on {names}{f' and {more} more' if more > 0 else ''}."
        )
    if review.base_problems:
        lines.append(
            "The base has mistakes in its specs as well; what they hid is shown as if it were new."
        )
    if review.unchanged:
        n = review.unchanged
        lines.append(f"{n} server{'s are' if n > 1 else ' is'} not touched.")
    where = [f"base {code(review.base[:12])}" if review.base else ""]
    where.append(f"head {code(review.head[:12])}" if review.head else "")
    if any(where):
        lines.append(f"Compared: {', '.join(w for w in where if w)}.")
    return "  \n".join(lines)


def _server(server: ServerReview, *, with_unit: bool = True) -> str:
    """Write what happens to one server; the unit is folded where it is long."""
    lines = [
        f"#### {_SYMBOL[_look(server)]} {code(server.server)} on {code(server.host or '-')}",
        "",
    ]
    if server.note:
        lines += [f"{_capital(server.note)}.", ""]
    if server.live is not None:
        lines += _live(server)
    for move in server.gate_moves:
        word = {True: "**looser**", False: "stricter", None: "moved"}[move.looser]
        lines.append(
            f"- gate {word}: {code(move.limit)} {code(_value(move.old))} to {code(_value(move.new))}"
        )
    for warning in server.warnings[:MAX_WARNINGS]:
        lines.append(f"- ⚠️ {code(warning)}")
    if server.gate_moves or server.warnings:
        lines.append("")
    if server.changes:
        rows = [_field(c) for c in server.changes]
        block = fenced("\n".join(row for group in rows for row in group.split("\n")), "diff")
        lines += [
            _fold(f"{len(rows)} fields change", block) if len(rows) > FOLD_LINES else block,
            "",
        ]
    if server.unit_diff and with_unit:
        lines.append(_unit(server))
    elif server.unit_diff:
        lines.append("_The unit's difference is too long to be shown here._")
    return "\n".join(lines).strip("\n")


def _cut_server(server: ServerReview, room: int) -> str:
    """Give a server without what makes it too long."""
    text = _server(server, with_unit=False)
    if _bytes(text) <= room:
        return text
    n = len(server.changes)
    return (
        f"#### {_SYMBOL[_look(server)]} {code(server.server)} on {code(server.host or '-')}\n\n"
        f"_{n} fields change; too many to be shown here._"
    )


def _live(server: ServerReview) -> list[str]:
    live = server.live
    assert live is not None, "asked for only where it is there"
    lines = [f"On the host as it was found: **{_word(live.action)}**, {code(live.sentence)}"]
    lines += [f"- drifted: {code(d)}" for d in live.drift[:MAX_WARNINGS]]
    return [*lines, ""]


def _unit(server: ServerReview) -> str:
    rows = server.unit_diff.split("\n")
    cut = rows[:MAX_DIFF_LINES]
    if len(rows) > len(cut):
        cut.append(f"... and {len(rows) - len(cut)} more lines")
    block = fenced("\n".join(_line(row) for row in cut), "diff")
    if len(rows) <= FOLD_LINES:
        return block
    return _fold(f"<code>{_html(server.unit or 'unit')}</code>, {len(rows)} lines", block)


def _field(change: FieldChange) -> str:
    """Write one field as rows of a diff."""
    note = {"restart": "restart", "reload": "reload", "controller": "no restart"}.get(
        change.effect, ""
    )
    tail = f"   ({note})" if note else ""
    rows = []
    if change.old is not None:
        rows.append(_line(f"- {change.path}: {_value(change.old)}"))
    if change.new is not None:
        rows.append(_line(f"+ {change.path}: {_value(change.new)}"))
    rows[-1:] = [rows[-1] + tail] if rows else []
    return "\n".join(rows)


def _value(value: Any) -> str:
    if value is None:
        return "(none)"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"


def _fold(title: str, body: str) -> str:
    """Fold a block; `title` is HTML of ours. The empty lines let Markdown begin again inside."""
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


# -- text that is data ---------------------------------------------------------------------------------------------


def seen(text: object) -> str:
    """Show what cannot be seen, or moves what is seen, as an escape; line ends too."""
    return "".join(
        c if c == " " or unicodedata.category(c)[0] not in "CZ" else f"\\u{ord(c):04x}"
        for c in str(text)
    )


def _line(text: str) -> str:
    shown = seen(text)
    return shown if len(shown) <= MAX_LINE else f"{shown[:MAX_LINE]}… (cut)"


def code(text: object) -> str:
    """Write text as a code span that nothing in it can leave."""
    shown = _line(str(text))
    ticks = "`" * (max((len(run) for run in re.findall(r"`+", shown)), default=0) + 1)
    if not shown.strip():
        return "`(empty)`"
    pad = " " if shown[0] in "` " or shown[-1] in "` \\" else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}"


def cell(text: object) -> str:
    """Write text as a code span in a table, where a bar ends the cell whatever stands around it."""
    return code(str(text)[:MAX_NAME].replace("|", "\\u007c"))


def fenced(text: str, kind: str) -> str:
    """Write lines as a fenced block whose fence is longer than any run of backticks inside."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text)), 3)
    return f"{fence}{kind}\n{text}\n{fence}"


def _html(text: str) -> str:
    return html.escape(_line(text))


def _word(text: str) -> str:
    """Give a word of ours as it came back from a file: letters only."""
    return re.sub(r"[^A-Za-z]", "", text)[:40]


def _capital(text: str) -> str:
    """Give a sentence of ours (with names that the spec language limits to letters, digits and dashes)."""
    return plain(text[:1].upper() + text[1:])


def plain(text: str) -> str:
    """Give text for prose with every character that Markdown, HTML or a forge could read taken literally."""
    return re.sub(r"([\\`*_{}\[\]()#+!|<>&@~$:/^=])", lambda m: f"&#{ord(m[1])};", _line(text))


def age(seconds: float) -> str:
    """Say how long ago something was, in its largest unit."""
    for size, word in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= size:
            n = int(seconds // size)
            return f"{n} {word}{'s' if n > 1 else ''}"
    return "less than a minute"


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def page_numbers(bodies: Iterable[tuple[int, str]], key: str) -> dict[int, int]:
    """Give by part the id of the comment that holds it; the oldest where there are several."""
    found: dict[int, int] = {}
    for number, body in bodies:
        part = marked(body, key)
        if part is not None:
            found.setdefault(part, number)
    return found
