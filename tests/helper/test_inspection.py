"""A model's directory is looked at within bounds, whole or not; nothing here is simulated."""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reconciler.core.checks import Verdict, flags_check
from reconciler.helper import inspection
from reconciler.helper.host import RealMachine
from reconciler.helper.inspection import inspect_models, inspect_nodes, model_facts
from reconciler.helper.observe import check_flags

CONFIG = {
    "architectures": ["QwenForCausalLM"],
    "num_attention_heads": 32,
    "text_config": {"num_key_value_heads": 8, "num_attention_heads": 16, "layer_types": ["linear_attention", "full_attention"]},
    "torch_dtype": "bfloat16",
    "secret_note": "not passed on",
}  # fmt: skip


def tensors(size: int = 64) -> bytes:
    """Give a safetensors file with one tensor."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * size


def a_model(folder: Path, shards: int = 3) -> Path:
    """Write a whole model."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)]
    for name in names:
        (folder / name).write_bytes(tensors())
    index = {"weight_map": {f"layer.{i}": name for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def look(path: Path | str, **asked: Any) -> dict[str, Any]:
    """Look at one model as the helper does, in this process."""
    return model_facts({"role": "model", "source": str(path), **asked}, "/nonexistent")


def test_a_whole_model_is_told_in_numbers(tmp_path: Path) -> None:
    """Shards, bytes, and of the configuration only what a fit is reckoned from; the inner configuration counts first."""
    facts = look(a_model(tmp_path / "m"))
    assert (facts["shards"], facts["missing_count"], facts["broken_count"]) == (3, 0, 0)
    assert facts["bytes"] == 3 * len(tensors())
    assert facts["tokenizer"] is True
    assert facts["config"] == {
        "architectures": ["QwenForCausalLM"], "num_attention_heads": 16, "num_key_value_heads": 8,
        "torch_dtype": "bfloat16", "full_attention_layers": 1,
    }  # fmt: skip


def test_a_missing_a_cut_and_a_looping_shard_are_named(tmp_path: Path) -> None:
    """Each by its name and what is wrong; a loop of links ends at once."""
    model = a_model(tmp_path / "m", shards=4)
    names = sorted(p.name for p in model.glob("*.safetensors"))
    (model / names[0]).unlink()
    (model / names[1]).write_bytes(tensors()[:-1])
    (model / names[2]).unlink()
    (model / names[2]).symlink_to(names[2])
    (model / names[3]).write_bytes(struct.pack("<Q", 1 << 62))
    facts = look(model)
    assert facts["missing"] == [names[0]]
    told = dict(facts["broken"])
    assert "where its header promises" in told[names[1]]
    assert "loop of symbolic links" in told[names[2]]
    assert "no safetensors file has" in told[names[3]]


@pytest.mark.parametrize(
    ("content", "words"),
    [('{"num_attention_heads": 3', "cut short"), ("[]", "not a JSON object"), ("[" * 100_000, "is not JSON"), (" " * (1 << 21), "is larger")],
)  # fmt: skip
def test_a_configuration_that_is_none_is_said_to_be_none(
    tmp_path: Path, content: str, words: str
) -> None:
    """Cut short, of another shape, too deep, too large: a sentence each, and no number."""
    model = a_model(tmp_path / "m")
    (model / "config.json").write_text(content)
    assert words in look(model)["config"]["unknown"]


def test_an_index_cannot_lead_outside_of_its_directory(tmp_path: Path) -> None:
    """S19: a path in an index is a name in its directory, or the index is no index."""
    model = a_model(tmp_path / "m")
    for name in ("/etc/shadow", "../other/x.safetensors"):
        index = {"weight_map": {"a": name}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "outside of its directory" in look(model)["index_problem"]


def test_a_pipe_or_a_directory_in_place_of_a_file_blocks_nothing(tmp_path: Path) -> None:
    """Only regular files are opened for reading."""
    model = a_model(tmp_path / "m")
    name = next(iter(sorted(p.name for p in model.glob("*.safetensors"))))
    (model / name).unlink()
    os.mkfifo(model / name)
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    facts = look(model)
    assert facts["broken"] == [[name, "is no file"]]
    assert facts["config"] == {"unknown": "is not a regular file"}


def cached(home: Path, commit: str = "a" * 40) -> Path:
    """Write a model as the hub's library caches it: snapshots of links to blobs."""
    repo = home / ".cache/huggingface/hub/models--org--small"
    blobs = repo / "blobs"
    whole = a_model(blobs / "tmp")
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(whole.iterdir())):
        (path).rename(blobs / f"{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    whole.rmdir()
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(commit)
    return repo


def test_the_hubs_cache_is_read_as_its_library_reads_it(tmp_path: Path) -> None:
    """A ref names a commit, a commit a snapshot, its files are links; another revision is not there, and a blob may be missing."""
    repo = cached(tmp_path)

    def at(revision: str | None = None, **environment: str) -> dict[str, Any]:
        asked = {"role": "model", "source": "org/small", "revision": revision, "environment": environment}  # fmt: skip
        return model_facts(asked, str(tmp_path))

    for revision in (None, "main", "a" * 40, "a" * 8):
        assert (at(revision)["found"], at(revision)["broken_count"]) == (True, 0), revision
    other = at("b" * 40)
    assert not other["found"]
    assert "aaaaaaaaaaaa" in other["why"]
    assert not at("../../x")["found"]
    assert not at(HF_HOME="/nonexistent")["found"]
    assert at(HF_HOME=str(tmp_path / ".cache/huggingface"))["found"]
    for blob in (repo / "blobs").iterdir():
        if blob.read_bytes()[:1] != b"{":
            blob.unlink()
            break
    assert "link to nothing" in at()["broken"][0][1]


def test_a_gguf_file_is_known_by_its_first_bytes_and_by_its_parts(tmp_path: Path) -> None:
    """One file, or several numbered ones of which all must be there."""
    one = tmp_path / "one.gguf"
    one.write_bytes(b"GGUF" + b"\0" * 20)
    assert (look(one)["broken_count"], look(one)["bytes"]) == (0, 24)
    one.write_bytes(b"<html>")
    assert look(one)["broken"] == [[str(one), "is no GGUF file"]]
    first = tmp_path / "big-00001-of-00002.gguf"
    first.write_bytes(b"GGUF" + b"\0" * 20)
    assert look(first)["missing_count"] == 1


@pytest.fixture
def open_path() -> Iterator[Path]:
    """Give a directory that every user can reach, which pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


NOBODY = {"uid": 65534, "gid": 65534, "groups": list[int]()}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_model_is_looked_at_with_the_servers_own_rights(open_path: Path) -> None:
    """What its user cannot read is found before its start does; root's own rights would have hidden it."""
    model = a_model(open_path / "m")
    model.chmod(0o755)
    for file in model.iterdir():
        file.chmod(0o644)
    shard = min(model.glob("*.safetensors"))
    shard.chmod(0o600)
    asked = [{"role": "model", "source": str(model)}]
    (reading,) = inspect_models(asked, NOBODY, "/")
    assert reading["known"]["broken"] == [[shard.name, "may not be read by the server's user"]]
    (as_root,) = inspect_models(asked, None, "/")
    assert as_root["known"]["broken_count"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_device_that_its_user_may_not_open_is_denied(open_path: Path) -> None:
    """Asked with the user's rights; a node that is missing is something else."""
    node = open_path / "nvidia0"
    node.write_text("")
    node.chmod(0o600)
    found = inspect_nodes([str(node), "/dev/null", f"{open_path}/none"], NOBODY)["known"]
    assert list(found.values()) == ["denied", "usable", "missing"]


def test_a_network_file_system_that_hangs_makes_the_model_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look is made in a child with a limit, which is left behind."""
    monkeypatch.setattr(inspection, "MODEL_LIMIT_S", 0.3)
    read, _write = os.pipe()
    monkeypatch.setattr(inspection, "model_facts", lambda _model, _home: os.read(read, 1))
    (reading,) = inspect_models([{"role": "model", "source": str(tmp_path)}], None, "/")
    assert "no answer within" in reading["unknown"]


def test_an_interpreter_tells_what_is_installed_in_it() -> None:
    """By its own metadata, with a digest of the installation; a program that is none says why."""
    machine = RealMachine()
    asked = {"user": None, "python": sys.executable, "distributions": ["no-such", "pytest"], "models": [], "nodes": [], "places": ["/tmp"]}  # fmt: skip
    facts = machine.engine_facts(asked)
    assert facts["program"]["known"]["distribution"] == "pytest"
    assert facts["program"]["known"]["version"] == pytest.__version__
    assert facts["limits"]["known"]["files"] > 1000
    broken = machine.engine_facts({**asked, "python": "/bin/false"})
    assert "it ended with 1" in broken["program"]["unknown"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("sleep 60", "did not end within 0.5 s"),
        ("head -c 100000000 /dev/zero | tr '\\0' 'x'", "said more than 1 MiB"),
        ("echo no such module >&2; exit 1", "ended with 1: no such module"),
    ],
)
def test_an_engine_that_cannot_say_its_flags_is_no_engine_without_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    """Its help hangs, prints 100 MB, or dies: the check refuses and says that, and not that it lacks a flag (S12)."""
    limit = 0.5 if body.startswith("sleep") else 60.0
    monkeypatch.setattr("reconciler.helper.observe.HELP_LIMIT_S", limit)
    engine = tmp_path / "engine"
    engine.write_text(f"#!/bin/sh\n{body}\n")
    engine.chmod(0o755)
    asked = {"user": None, "argv": [str(engine)], "flags": ["--tp-size"]}
    check = flags_check(check_flags(RealMachine(), asked), "one")
    assert check.verdict is Verdict.REFUSED
    assert "does not tell its flags" in check.sentence
    assert words in check.sentence
    assert "does not know" not in check.sentence
