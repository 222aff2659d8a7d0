"""From a hand-made unit to a spec: what can be said in one is, and what cannot is listed. Pure.

Called by `cli/adopt.py` with what was observed. The draft is held against the spec language's own judge and against the
renderer before it is given out: it is a spec that validates, and what its unit would change is shown beside it. No secret value is
ever part of it; in its place stands a file on the host, for a person to fill.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from reconciler.core.findings import Finding, read_server
from reconciler.core.fleet import path_text, worded
from reconciler.core.grammar import IS_LABEL
from reconciler.core.live import Gpu, Known, LiveHost
from reconciler.core.masking import is_secret, masked, masked_words
from reconciler.core.spec import API_VERSION, Server
from reconciler.core.units_of_measure import duration_text
from reconciler.engines.base import Engine
from reconciler.resolve import UnresolvedError, bind_gpus, target_of
from reconciler.systemd import UnitTextError, unit_diff
from reconciler.takeover import Stranger, card_named, differences, stranger_of

SECRETS_PLACE: Final = "/etc/reconciler"
"""Where the helper may read secrets for any user (`helper/records.py`)."""

PORTS: Final[Mapping[str, int]] = {"sglang": 30000, "vllm": 8000, "llamacpp": 8080}
"""Where an engine listens that is not told a port."""

LAST: Final = "custom"
"""The engine that takes any command."""

OURS: Final[Mapping[str, str]] = {
    "Service.Type": "exec", "Service.Restart": "on-failure", "Service.RestartSec": "5s", "Service.KillMode": "mixed",
    "Service.SendSIGKILL": "yes", "Service.OOMPolicy": "stop", "Service.TimeoutStartSec": "infinity", "Service.PrivateMounts": "yes",
    "Service.LimitNOFILE": "1048576", "Service.LimitMEMLOCK": "infinity", "Service.NoNewPrivileges": "yes",
    "Install.WantedBy": "multi-user.target",
}  # fmt: skip
"""What our unit says in any case. Another value is said, and replaced."""

SILENT: Final = frozenset({
    "Unit.Description", "Unit.Documentation", "Unit.StartLimitIntervalSec", "Unit.StartLimitBurst", "Unit.Wants", "Unit.After",
    "Service.ExecStart", "Service.Environment", "Service.EnvironmentFile", "Service.User", "Service.WorkingDirectory",
    "Service.TimeoutStopSec", "Service.TimeoutSec",
})  # fmt: skip
"""Said in the spec, or of no consequence."""

HOOKS: Final[Mapping[str, str]] = {
    "ExecStartPre": "runs before the start: reconcile's unit has no such hook. If it frees GPUs or kills processes, the guard and the release take its place",
    "ExecStartPost": "runs after the start: reconcile waits for a real generation instead",
    "ExecStop": "stops the server in its own way: reconcile drains, then sends SIGTERM",
    "ExecStopPost": "runs after the stop: reconcile proves the GPUs free instead",
    "ExecReload": "reloads the server: a change of a spec is a rollout",
    "ExecCondition": "decides whether it may start: the guard decides that",
}
NETWORK: Final = re.compile(
    r"(network(-online)?|multi-user|nss-lookup|remote-fs|local-fs|time-sync|basic|sysinit)\.target"
)
WRAPPERS: Final = frozenset({"bash", "sh", "dash", "zsh", "env", "nice", "numactl", "taskset", "ionice", "chrt", "timeout", "stdbuf", "sudo", "su", "runuser", "setpriv", "flock"})  # fmt: skip
CONTAINERS: Final = frozenset({"docker", "podman", "nerdctl"})
SPECIFIER: Final = re.compile(r"(?<!%)(?:%%)*%([A-Za-z])")


@dataclass(frozen=True, slots=True)
class Remark:
    """One thing that a reader has to know: of a field of the spec (`path`), or of something that is in none (`what`)."""

    what: str
    sentence: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret that was found, and the file that is to hold it: never its value."""

    name: str
    file: str
    where: str


@dataclass(frozen=True, slots=True)
class Adoption:
    """The draft of a spec, and how what it renders stands to what is there.

    `differs` is what would change for the running process: empty, and it is taken over without a restart. `problems` are what
    the spec language refuses and a person has to decide.
    """

    name: str
    unit: str
    document: Mapping[str, Any]
    remarks: tuple[Remark, ...] = ()
    unmapped: tuple[Remark, ...] = ()
    secrets: tuple[Secret, ...] = ()
    problems: tuple[str, ...] = ()
    diff: str = ""
    differs: tuple[str, ...] = ()
    drop_ins: tuple[str, ...] = ()

    @property
    def restarts(self) -> bool:
        """Say whether the take-over would restart the server, as far as can be said."""
        return bool(self.differs or self.problems)


@dataclass
class _Draft:
    """A spec under way."""

    name: str
    host: str
    unit: str
    fields: dict[str, Any] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    unmapped: list[Remark] = field(default_factory=list)
    secrets: list[Secret] = field(default_factory=list)

    def note(self, path: str, sentence: str) -> None:
        self.remarks.append(Remark(path, sentence, path))

    def lost(self, what: str, sentence: str) -> None:
        self.unmapped.append(Remark(masked(what), sentence))

    def secret(self, name: str, where: str) -> dict[str, str]:
        """Give the place that is to hold a secret, and remember that a person has to put it there."""
        file = f"{SECRETS_PLACE}/{self.name}/{re.sub(r'[^A-Za-z0-9._-]', '-', name)}"
        if all(s.file != file for s in self.secrets):
            self.secrets.append(Secret(name, file, where))
        return {"file": file}


# -- the draft -------------------------------------------------------------------------------------------


def server_name(unit: str) -> str:
    """Make a server's name of a unit's."""
    name = re.sub(r"[^a-z0-9]+", "-", unit.removesuffix(".service").lower()).strip("-")[:63]
    return name if IS_LABEL.match(name) else "server"


PORTS_TRIED: Final = 6


def ports_to_try(live: LiveHost, name: str, engines: Mapping[str, Engine]) -> tuple[int, ...]:
    """Say on which ports the server may listen, the likeliest first, for a second look at who does."""
    found = stranger_of(live, name)
    argv, engine, _ = _command(found, engines)
    listen = _map(engines[engine].read_argv(argv, found.environment).get("listen"))
    told = [listen.get("port"), PORTS.get(engine), _port_word(argv)]
    numbers = [int(w) for word in argv for w in [word.rpartition("=")[2]] if w.isdecimal()]
    likely = [n for n in [*told, *numbers] if isinstance(n, int) and 1024 <= n < 65536]
    return tuple(dict.fromkeys(likely))[:PORTS_TRIED]


def adopt(
    live: LiveHost, name: str, host: str, engines: Mapping[str, Engine], asked: int | None = None
) -> Adoption:
    """Write a spec for what was observed of one unit, and compare what it renders with what is there.

    `asked` is the port that was asked about.
    """
    found = stranger_of(live, name)
    argv, engine, how = _command(found, engines)
    adoption = _adopted(live, name, host, engines, (argv, engine, how, asked))
    if adoption.problems and engine != LAST:
        plain = _adopted(live, name, host, engines, (argv, LAST, how, asked))
        if not plain.problems:
            why = f"{engine}'s own fields cannot say this command ({'; '.join(adoption.problems)}), so the command is written out: flags are then not checked"
            return replace(plain, remarks=(Remark("engine", why, "engine"), *plain.remarks))
    return adoption


def _adopted(
    live: LiveHost,
    name: str,
    host: str,
    engines: Mapping[str, Engine],
    command: tuple[tuple[str, ...], str, tuple[Remark, ...], int | None],
) -> Adoption:
    found, (argv, engine, how, asked) = stranger_of(live, name), command
    draft = _Draft(name, host, found.unit, remarks=[r for r in how if r.path])
    draft.unmapped = [r for r in how if not r.path]
    _engine_fields(draft, found, argv, engines[engine])
    _listen(draft, found, argv, engine, asked)
    _cards(draft, found, live)
    _environment(draft, found)
    _unit_fields(draft, found)
    _directives(draft, found)
    server, problems = _judged(draft, engines)
    done = Adoption(
        name,
        found.unit,
        _document(draft),
        tuple(draft.remarks),
        tuple(draft.unmapped),
        tuple(draft.secrets),
        tuple(problems),
        drop_ins=tuple(path for path, _ in found.drop_ins),
    )
    if server is None:
        return done
    try:
        target = target_of(server, engines[engine], bind_gpus(server, live, {}))
    except (UnitTextError, UnresolvedError) as error:
        return replace(done, problems=(*done.problems, str(error)))
    text = live.server(name)
    before = text.files.value.text or "" if isinstance(text.files, Known) else ""
    return replace(
        done,
        diff=unit_diff(before, target.unit_text, old_name=found.unit, new_name="from the spec"),
        differs=differences(server, engines[engine], target, live)
        if found.running
        else (f"{found.unit} does not run",),
    )


def _command(
    found: Stranger, engines: Mapping[str, Engine]
) -> tuple[tuple[str, ...], str, tuple[Remark, ...]]:
    """Choose the command line that the spec is made of: the unit's own, or, where it hides the engine, the process's."""
    known = [name for name in sorted(engines) if name != LAST]
    main = found.main.argv if found.main is not None else ()
    rest = [p.argv for p in found.processes if p.argv and p is not found.main]
    candidates = [("the unit", found.loaded or ()), ("the running process", main)]
    candidates += [("a process of the unit", argv) for argv in rest]
    starts = found.values("ExecStart")
    remarks = []
    if len(starts) > 1:
        remarks.append(Remark("ExecStart", f"there are {len(starts)}; a server has one command"))
    if found.loaded is None and starts:
        remarks.append(
            Remark("engine", f"read from the running process, because {found.loaded_why}", "engine")
        )
    remarks += [
        Remark(
            "engine",
            f"the unit's %{letter} is written out as it stands for this unit",
            "engine",
        )
        for letter in sorted({m for line in starts for m in SPECIFIER.findall(line)})
    ]
    for where, argv in candidates:
        name = next((n for n in known if argv and engines[n].recognises(argv)), None)
        if name is None:
            continue
        if where == "a process of the unit" or (argv is main and _wraps(found.loaded or ())):
            shown = " ".join(masked_words(found.loaded or main))[:200]
            what = f"ExecStart={shown}"
            remarks.append(
                Remark(
                    what,
                    "is a wrapper: the spec starts the engine itself; whatever else the wrapper does is not in it",
                )
            )
        return tuple(argv), name, tuple(remarks)
    argv = tuple(found.loaded or main)
    if argv and argv[0].rpartition("/")[2] in CONTAINERS:
        remarks.append(
            Remark(
                "engine",
                "a container that the unit starts by hand; write `engine`, `runtime.container` and `runtime.image` instead, so that its processes are the unit's own",
                "engine",
            )
        )
    elif _wraps(argv):
        remarks.append(
            Remark(
                "engine",
                "a wrapper whose engine is not among its processes now; write the engine's own command here",
                "engine",
            )
        )
    elif argv:
        remarks.append(
            Remark("engine", "no engine that is known; the command is written out", "engine")
        )
    return argv, LAST, tuple(remarks)


def _wraps(argv: Sequence[str]) -> bool:
    return bool(argv) and argv[0].rpartition("/")[2] in WRAPPERS


def _engine_fields(draft: _Draft, found: Stranger, argv: tuple[str, ...], engine: Engine) -> None:
    read = dict(engine.read_argv(argv, found.environment))
    read.pop("gpus", None)
    read.pop("env", None)
    if engine.name == LAST:
        words = _without_secrets(draft, argv)
        read["engine"] = {"name": LAST, "command": list(words)}
        if words and not words[0].startswith("/"):
            draft.note("engine", "the program's absolute path has to be written out")
    args = {}
    for key, value in _map(read.pop("args", {})).items():
        if is_secret(key, str(value)):
            draft.secret(key, f"--{key} of the command line")
            draft.lost(
                f"--{key}",
                "holds a secret, and the spec has no field for it: give it to the engine by a variable under `secrets`",
            )
        else:
            args[key] = value
    for key, value in read.items():
        if value not in (None, {}, ()):
            draft.fields[key] = value
    if args:
        draft.fields["args"] = args
    if engine.name != LAST and "runtime" not in draft.fields and argv:
        program = argv[0]
        beside = f"{program.rpartition('/')[0]}/python" if program.startswith("/") else ""
        if beside:
            draft.fields["runtime"] = {"python": beside}
            draft.note("runtime.python", f"taken to lie beside {program}; check it")
    if "model" in draft.fields and isinstance(draft.fields["model"], list):
        draft.fields["model"] = draft.fields["model"][0]


def _without_secrets(draft: _Draft, argv: Sequence[str]) -> tuple[str, ...]:
    """Leave secrets out of a command that is written out; a masked word must never be started."""
    kept: list[str] = []
    shown = masked_words(argv)
    for at, (word, safe) in enumerate(zip(argv, shown, strict=True)):
        if word == safe:
            following = shown[at + 1] if at + 1 < len(shown) else ""
            if (
                word.startswith("-")
                and "=" not in word
                and following != (argv[at + 1] if at + 1 < len(argv) else "")
            ):
                continue
            kept.append(word)
            continue
        flag = (
            word.partition("=")[0]
            if word.startswith("-")
            else next((w for w in reversed(argv[:at]) if w.startswith("-")), "command")
        )
        draft.secret(flag.lstrip("-"), f"{flag} of the command line")
        draft.lost(
            flag,
            "held a secret and is left out: give it to the server by a variable under `secrets`",
        )
    return tuple(kept)


def _listen(
    draft: _Draft, found: Stranger, argv: Sequence[str], engine: str, asked: int | None
) -> None:
    listen = _map(draft.fields.pop("listen", {}))
    port = listen.get("port") or PORTS.get(engine) or _port_word(argv)
    if port is None and found.addresses:
        port = asked  # Where its own processes listen, whatever word of its command says so.
    seen = found.addresses if port == asked else ()
    address = listen.get("address")
    place: dict[str, Any] = {}
    if address is None and seen:
        address = "0.0.0.0" if seen[0] in {"*", "0.0.0.0", ""} else seen[0]  # noqa: S104  (read, not bound)
    if address not in (None, "127.0.0.1"):
        place["address"] = str(address)
    if address is None:
        draft.note(
            "listen", "nobody listens there now, so the address is not known: 127.0.0.1 is taken"
        )
    if isinstance(port, int):
        place["port"] = port
    else:
        draft.note("listen", "the port is not known")
    if listen.get("api_key"):
        place["api_key"] = draft.secret(
            "api-key", "the API key of the command line or the environment"
        )
    draft.fields["listen"] = place


def _port_word(argv: Sequence[str]) -> int | None:
    for at, word in enumerate(argv):
        flag, _, value = word.partition("=")
        if flag in {"--port", "-p", "--http-port", "--listen-port"}:
            text = value or (argv[at + 1] if at + 1 < len(argv) else "")
            return int(text) if text.isdecimal() else None
    return None


def _cards(draft: _Draft, found: Stranger, live: LiveHost) -> None:
    """Name the GPUs: as the unit does, else as its processes hold them, else none that anybody knows of."""
    cards: Sequence[Gpu] = live.gpus.value if isinstance(live.gpus, Known) else ()
    written = found.environment.get("CUDA_VISIBLE_DEVICES")
    held = sorted(c.index for c in cards if found.held and c.uuid in found.held)
    if written is not None:
        named = [card_named(cards, part.strip()) for part in written.split(",") if part.strip()]
        known = [card.index for card in named if card is not None]
        draft.fields["gpus"] = known
        if len(known) != len(named):
            draft.note(
                "gpus", f"CUDA_VISIBLE_DEVICES={written} names a card that the host does not show"
            )
        elif found.held and set(known) != set(held):
            draft.note("gpus", f"the unit names these; its processes hold {held} now")
        return
    draft.fields["gpus"] = held
    if found.held is None:
        draft.note(
            "gpus",
            "which cards it holds cannot be read without the installed helper: write them here",
        )
    elif held:
        draft.note(
            "gpus",
            "the cards that its processes hold now; the unit names none, so it saw every card of the host",
        )
    elif cards:
        draft.note("gpus", "it holds none now; write the cards here that it is to have")


def _environment(draft: _Draft, found: Stranger) -> None:
    env: dict[str, str] = {}
    hidden = {name: path for path, name, value in found.file_variables if value is None}
    for name, value in sorted(found.environment.items()):
        if name == "CUDA_VISIBLE_DEVICES":
            continue
        if is_secret(name, value) or name in hidden:
            if name == "VLLM_API_KEY":
                continue  # `listen.api_key` says it.
            place = draft.secret(name, f"{name} of {hidden.get(name, 'the unit')}'s environment")
            draft.fields.setdefault("secrets", {})[name] = place
        else:
            env[name] = value
    if env:
        draft.fields["env"] = env
    for path in dict.fromkeys(p for p, _, _ in found.file_variables):
        names = ", ".join(n for p, n, _ in found.file_variables if p == path)
        draft.note("env", f"from {path}, which is not read any more: {names}")
    unread = found.unseen_variables or (
        ()
        if found.environment_files
        else tuple(
            (v.removeprefix("-"), "it was not read") for v in found.values("EnvironmentFile")
        )
    )
    for path, why in unread:
        draft.lost(
            f"EnvironmentFile={path}",
            f"{why}: write what it sets under `env`, or under `secrets` with a file of its own",
        )


def _unit_fields(draft: _Draft, found: Stranger) -> None:
    runtime = dict(_map(draft.fields.get("runtime")))
    if found.user and found.user != "root":
        runtime["user"] = found.user
    directory = next(iter(found.values("WorkingDirectory")), "")
    if directory.startswith("/"):
        runtime["working_directory"] = directory
    elif directory:
        draft.lost(f"WorkingDirectory={directory}", "is no absolute path")
    if runtime:
        draft.fields["runtime"] = runtime
    if found.stop_s is not None:
        stop = max(1.0, min(86_400.0, found.stop_s))
        draft.fields["timeouts"] = {"stop": duration_text(stop)}
        if stop < 60:
            draft.note(
                "timeouts.stop",
                "as the unit has it; shorter than most engines take to let requests end, and what is cut is killed with GPU memory in use",
            )


def _directives(draft: _Draft, found: Stranger) -> None:
    """Say of every other line of the unit what becomes of it."""
    if found.broken:
        draft.lost(found.unit, f"a part of it cannot be read: {found.broken}")
    for section, key, value, file in found.entries:
        path = f"{section}.{key}"
        line = f"{key}={value}"
        where = "" if file.endswith(f"/{found.unit}") or not file else f" (in {file})"
        if key in HOOKS:
            draft.lost(f"{line}{where}", HOOKS[key])
        elif path in {
            "Unit.After",
            "Unit.Wants",
            "Unit.Requires",
            "Unit.BindsTo",
            "Unit.Requisite",
        }:
            others = [unit for unit in value.split() if not NETWORK.fullmatch(unit)]
            if others:
                draft.lost(
                    f"{key}={' '.join(others)}{where}",
                    "an order among units: reconcile's unit waits for the network and its guard alone",
                )
        elif path == "Service.Group" and value == found.user:
            continue
        elif path in OURS:
            if value != OURS[path] and not _same_switch(value, OURS[path]):
                draft.lost(f"{line}{where}", f"reconcile's unit says {OURS[path]}")
        elif path not in SILENT:
            draft.lost(
                f"{line}{where}",
                "is not in the spec; to keep it, put it into a drop-in of its own and name that under `drift_ignore`",
            )


def _same_switch(one: str, other: str) -> bool:
    yes = {"yes", "true", "on", "1"}
    return one.lower() in yes and other.lower() in yes


# -- judging ---------------------------------------------------------------------------------------------


def _judged(draft: _Draft, engines: Mapping[str, Engine]) -> tuple[Server | None, list[str]]:
    """Hold the draft to the spec language; leave out, and say so, what an optional map holds that is refused."""
    for _ in range(60):
        server, findings = read_server(_plain(draft), engines)
        if not findings:
            return server, []
        dropped = [f for f in findings if _drop(draft, f)]
        if not dropped:
            return None, [worded(f) for f in findings]
    return None, ["the draft cannot be made right"]


def _drop(draft: _Draft, finding: Finding) -> bool:
    """Take an entry of `env`, `secrets` or a remark-worthy single field out of the draft."""
    loc = [part for part in finding.loc if part != "[key]"]
    if len(loc) < 2 or loc[0] not in {"env", "secrets", "runtime"}:
        if loc[:1] in (["served_model_name"], ["model_revision"]):
            draft.lost(f"{loc[0]}: {draft.fields.pop(str(loc[0]), '')}", finding.message)
            return True
        return False
    entries = draft.fields.get(str(loc[0]))
    if not isinstance(entries, dict) or loc[1] not in entries:
        return False
    value = entries.pop(loc[1])
    if not entries:
        del draft.fields[str(loc[0])]
    shown = value if loc[0] != "secrets" else "(secret)"
    draft.lost(f"{loc[1]}={shown}", f"`{path_text(tuple(loc))}` {finding.message}")
    return True


def _plain(draft: _Draft) -> dict[str, Any]:
    return {k: v for k, v in _document(draft).items() if k not in {"apiVersion", "kind"}}


ORDER: Final = (
    "engine", "runtime", "model", "model_revision", "served_model_name", "gpus", "tp_size", "pp_size", "dp_size", "ep_size",
    "speculative", "listen", "args", "env", "secrets", "timeouts",
)  # fmt: skip


def _document(draft: _Draft) -> dict[str, Any]:
    head = {"apiVersion": API_VERSION, "kind": "Server", "name": draft.name, "host": draft.host}
    if draft.unit != f"{draft.name}.service":
        head["unit"] = draft.unit
    fields: dict[str, Any] = {key: draft.fields[key] for key in ORDER if key in draft.fields}
    return {**head, **fields, **{k: v for k, v in draft.fields.items() if k not in fields}}


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# -- text ------------------------------------------------------------------------------------------------


def spec_text(adoption: Adoption) -> str:
    """Write the draft as YAML, with what a reader has to know as comments where it belongs."""
    from ruamel.yaml import YAML  # noqa: PLC0415  (only who adopts pays for it)
    from ruamel.yaml.comments import CommentedMap  # noqa: PLC0415

    tree = CommentedMap(_tree(adoption.document))
    for key, lines in _comments(adoption).items():
        if key in tree:
            tree.yaml_set_comment_before_after_key(key, before="\n".join(lines))
    out = io.StringIO()
    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.dump(tree, out)
    return "".join(f"# {line}".rstrip() + "\n" for line in _header(adoption)) + out.getvalue()


def _header(adoption: Adoption) -> Iterator[str]:
    yield f"Made by `reconcile adopt` from {adoption.unit} as it was found."
    if adoption.unmapped:
        yield ""
        yield "Not in this spec:"
        yield from (f"- {_one_line(r.what)}: {_one_line(r.sentence)}" for r in adoption.unmapped)
    if adoption.secrets:
        yield ""
        yield "Put these secrets into files on the host (mode 0600, root), each with the value alone:"
        yield from (f"- {s.file}: {s.where}" for s in adoption.secrets)


def _comments(adoption: Adoption) -> dict[str, list[str]]:
    comments: dict[str, list[str]] = {}
    for remark in adoption.remarks:
        comments.setdefault(remark.path.split(".")[0], []).append(_one_line(remark.sentence))
    return comments


def _one_line(text: str) -> str:
    """Keep a hand-made unit's text from ending a comment."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:400]


def _tree(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _tree(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_tree(v) for v in value]
    return value


__all__ = ["Adoption", "Remark", "Secret", "adopt", "ports_to_try", "server_name", "spec_text"]
