"""What an engine will find on this host: its program, its model's files, limits and devices. Read, never changed.

Everything has a bound: bytes of a file, files of a model, time of a look. A model's files are read as the user
that the server will run as, in a child that has given up root's rights: so what that user cannot read is
found here, and a path in a spec shows nobody what its user could not see. Of a file's content only the numbers
named here travel. Part of the shipped helper (see `outputs.py`); `host.py` is its only caller.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import struct
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from reconciler.helper.machine import Reading
from reconciler.helper.outputs import known, unknown
from reconciler.helper.programs import each_guarded

MODEL_LIMIT_S = 30.0  # A model of a thousand shards on a slow network file system.
CONFIG_BYTES_MAX = 1 << 20
INDEX_BYTES_MAX = 32 << 20  # Of the largest mixtures of experts: some ten megabytes.
SHARDS_MAX = 2000
HEADER_BYTES_MAX = 100_000_000  # The format's own limit.
HEADERS_READ_MAX = 64 << 20  # Of all shards of a model together; beyond it sizes alone are checked.
NAMES_SHOWN = 8
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the kernel's, looked at

CONFIG_NUMBERS = (
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "num_hidden_layers",
    "max_position_embeddings",
    "vocab_size",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "full_attention_interval",
    "sliding_window",
)
CONFIG_WORDS = ("model_type", "torch_dtype", "dtype")
CONFIG_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "tekken.json",
    "tiktoken.model",
    "vocab.txt",
)
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf\Z")
_WEIGHTS = re.compile(r"[^/]+\.(safetensors|gguf|bin|pt|pth)\Z")
_NO_WEIGHTS = re.compile(
    r"(training_args|optimizer|scheduler|rng_state|adapter_model).*\.(bin|pt|pth|safetensors)\Z"
)


# -- whom it is read as --------------------------------------------------------------------------------


def become(user: Optional[Mapping[str, Any]]) -> None:
    """Give up root's rights for a user's, in a child that ends afterwards."""
    if user is None or os.geteuid() == user["uid"]:
        return
    if os.geteuid() != 0:
        raise PermissionError("only root can look with another user's rights")
    os.setgroups(list(user["groups"]))
    os.setgid(user["gid"])
    os.setuid(user["uid"])


def inspect_models(
    asked: Sequence[Mapping[str, Any]], user: Optional[Mapping[str, Any]], home: str
) -> List[Reading]:
    """Return a reading of each model that a server will load."""

    def look(model: Mapping[str, Any]) -> Dict[str, Any]:
        become(user)
        return model_facts(model, home)

    return each_guarded(list(asked), look, MODEL_LIMIT_S)


def inspect_nodes(paths: Sequence[str], user: Optional[Mapping[str, Any]]) -> Reading:
    """Return which of these device nodes a user may open: "usable", "missing" or "denied"."""

    def look(wanted: Sequence[str]) -> Dict[str, str]:
        become(user)
        found = {}
        for path in wanted:
            usable = os.access(path, os.R_OK | os.W_OK)
            found[path] = "usable" if usable else "denied" if os.path.lexists(path) else "missing"
        return found

    return each_guarded([list(paths)], look, MODEL_LIMIT_S)[0]


# -- a model -------------------------------------------------------------------------------------------


def model_facts(model: Mapping[str, Any], home: str) -> Dict[str, Any]:
    """Return what lies on this host of one model: {found, path, form, why, ...}; see `directory_facts`.

    `source` is an absolute path or a name at the hub; of the latter the local cache is looked at as the
    hub's own library does: refs name a commit, a snapshot links to blobs.
    """
    source = str(model["source"])
    if source.startswith("/"):
        return path_facts(source)
    cache = hub_cache(model.get("environment") or {}, home)
    repo = f"{cache}/models--{source.replace('/', '--')}"
    if not os.path.isdir(repo):
        return {"found": False, "cache": cache, "why": f"{repo} is not there"}
    snapshot, why = snapshot_of(repo, model.get("revision"))
    if snapshot is None:
        return {"found": False, "cache": cache, "why": why}
    facts = directory_facts(snapshot)
    facts["cache"] = cache
    left = [name for name in listed(f"{repo}/blobs") if name.endswith(".incomplete")]
    facts["incomplete"] = len(left)
    return facts


def hub_cache(environment: Mapping[str, str], home: str) -> str:
    """Return where the hub's library keeps models, by the same variables in the same order."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(name):
            return at_home(environment[name], home)
    if environment.get("HF_HOME"):
        return os.path.join(at_home(environment["HF_HOME"], home), "hub")
    base = environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return os.path.join(at_home(base, home), "huggingface", "hub")


def at_home(path: str, home: str) -> str:
    """Return a path with a `~` in front replaced by the server's user's home, as its process will."""
    return home + path[1:] if path == "~" or path.startswith("~/") else path


def snapshot_of(repo: str, revision: Optional[str]) -> Tuple[Optional[str], str]:
    """Return the snapshot of a revision (a branch, a tag, a commit or the beginning of one), or why there is none."""
    wanted = revision or "main"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}", wanted) or ".." in wanted:
        return None, f"{wanted!r} is no revision's name"
    commit = head_of(f"{repo}/refs/{wanted}", 200).decode("ascii", "replace").strip()
    names = listed(f"{repo}/snapshots")
    for name in names:
        if name in (commit, wanted):
            return f"{repo}/snapshots/{name}", ""
    short = re.fullmatch(r"[0-9a-f]{7,40}", wanted)
    begin = [name for name in names if short and name.startswith(wanted)]
    if len(begin) == 1:
        return f"{repo}/snapshots/{begin[0]}", ""
    there = ", ".join(name[:12] for name in names[:NAMES_SHOWN]) or "none"
    return None, f"revision {wanted} is not among the snapshots in {repo} ({there})"


def path_facts(path: str) -> Dict[str, Any]:
    """Return the facts of a model given by its path: a directory, or one file (GGUF)."""
    found, why = status_of(path)
    if found is None:
        return {"found": False, "why": why}
    if stat.S_ISDIR(found.st_mode):
        return directory_facts(path)
    if stat.S_ISREG(found.st_mode):
        return file_model(path)
    return {"found": False, "why": f"{path} is neither a file nor a directory"}


def file_model(path: str) -> Dict[str, Any]:
    """Return the facts of a model that is one file, or several numbered ones of which this is the first."""
    names = [path]
    match = _PART.match(path)
    if match and 0 < int(match.group(3)) <= SHARDS_MAX:
        count = int(match.group(3))
        names = [f"{match.group(1)}-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1)]
    facts: Dict[str, Any] = {"found": True, "path": path, "form": "file", "config": None}
    facts.update(shard_facts(names, ""))
    return facts


def directory_facts(path: str) -> Dict[str, Any]:
    """Return the facts of a model's directory.

    {found, path, form: "directory", config: {numbers} | {"unknown": why} | null (there is none), tokenizer: bool,
    index: the index file's name or null, index_problem: text or null, shards: how many weight files there should be,
    missing: [name] and missing_count, broken: [[name, why]], bytes: of all weights that are there}
    """
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        return {"found": False, "why": f"{path}: {said(error)}"}
    facts: Dict[str, Any] = {
        "found": True,
        "path": path,
        "form": "directory",
        "config": config_facts(f"{path}/config.json") if "config.json" in names else None,
        "tokenizer": any(name in TOKENIZERS and os.path.exists(f"{path}/{name}") for name in names),
        "index": next((name for name in INDEXES if name in names), None),
        "index_problem": None,
    }
    listed_shards = [n for n in names if _WEIGHTS.match(n) and not _NO_WEIGHTS.match(n)]
    if facts["index"] is not None:
        shards, problem = shards_of_index(f"{path}/{facts['index']}")
        facts["index_problem"] = problem
        listed_shards = listed_shards if problem else shards
    else:
        tensors = [n for n in listed_shards if n.endswith(".safetensors")]
        listed_shards = tensors or listed_shards
    facts.update(shard_facts(listed_shards[:SHARDS_MAX], f"{path}/"))
    return facts


def config_facts(path: str) -> Dict[str, Any]:
    """Return the numbers of a `config.json` that a fit is reckoned from; {"unknown": why} where it is none."""
    try:
        data = head_of(path, CONFIG_BYTES_MAX + 1, strict=True)
        if len(data) > CONFIG_BYTES_MAX:
            return {"unknown": f"is larger than {CONFIG_BYTES_MAX} bytes"}
        config = json.loads(data)
    except OSError as error:
        return {"unknown": said(error)}
    except (ValueError, RecursionError) as error:
        return {"unknown": f"is not JSON ({str(error)[:100]}): cut short?"}
    if not isinstance(config, dict):
        return {"unknown": "is not a JSON object"}
    levels = [config]
    for name in CONFIG_INNER:
        inner = config.get(name)
        if isinstance(inner, dict):
            levels.insert(0, inner)
            deeper = inner.get("text_config")
            if isinstance(deeper, dict):
                levels.insert(0, deeper)
    found: Dict[str, Any] = {}
    for key in CONFIG_NUMBERS:
        value = next((level[key] for level in levels if is_count(level.get(key))), None)
        if value is not None:
            found[key] = value
    for key in CONFIG_WORDS:
        value = next((level[key] for level in levels if isinstance(level.get(key), str)), None)
        if value is not None:
            found[key] = value[:64]
    names = config.get("architectures")
    if isinstance(names, list):
        found["architectures"] = [str(name)[:100] for name in names[:4]]
    kinds = next(
        (level["layer_types"] for level in levels if isinstance(level.get("layer_types"), list)),
        None,
    )
    if kinds is not None:
        found["full_attention_layers"] = sum(kind == "full_attention" for kind in kinds)
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        found["quantization"] = str(quantized.get("quant_method"))[:64]
    return found


def is_count(value: Any) -> bool:
    """Say whether a value is a whole number that a model's configuration can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40


def shards_of_index(path: str) -> Tuple[List[str], Optional[str]]:
    """Return the weight files that an index names, or what is wrong with it."""
    try:
        data = head_of(path, INDEX_BYTES_MAX + 1, strict=True)
        if len(data) > INDEX_BYTES_MAX:
            return [], f"is larger than {INDEX_BYTES_MAX} bytes"
        weights = json.loads(data)["weight_map"]
        names = sorted(set(weights.values()))
    except OSError as error:
        return [], said(error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [], f"is no index of weights ({type(error).__name__}): cut short?"
    if len(names) > SHARDS_MAX:
        return [], f"names more than {SHARDS_MAX} files"
    outside = [n for n in names if not isinstance(n, str) or n.startswith("/") or ".." in n]
    if outside:
        return [], f"names a file outside of its directory: {str(outside[0])[:100]!r}"
    return names, None


def shard_facts(names: Sequence[str], prefix: str) -> Dict[str, Any]:
    """Return which weight files are missing or broken, and how many bytes of weights are there."""
    missing: List[str] = []
    broken: List[List[str]] = []
    size, room = 0, HEADERS_READ_MAX
    for name in names:
        path = prefix + name
        found, why = status_of(path)
        if found is None and not os.path.lexists(path):
            missing.append(name)
            continue
        if found is None or not stat.S_ISREG(found.st_mode):
            broken.append([name, why or "is no file"])
            continue
        size += found.st_size
        wrong, spent = wrong_with(path, found.st_size, room)
        room -= spent
        if wrong:
            broken.append([name, wrong])
    return {
        "shards": len(names),
        "missing": missing[:NAMES_SHOWN],
        "missing_count": len(missing),
        "broken": broken[:NAMES_SHOWN],
        "broken_count": len(broken),
        "bytes": size,
    }


def wrong_with(path: str, size: int, room: int) -> Tuple[str, int]:
    """Say what is wrong with one weight file by its own header ("" for nothing), and how much was read."""
    try:
        if path.endswith(".safetensors"):
            return wrong_safetensors(path, size, room)
        if path.endswith(".gguf"):
            start = head_of(path, 8, strict=True)
            if start[:4] != b"GGUF":
                return "is no GGUF file", 8
            return "", 8
        head_of(path, 1, strict=True)
    except OSError as error:
        return said(error), 0
    return ("is empty" if size == 0 else ""), 1


def wrong_safetensors(path: str, size: int, room: int) -> Tuple[str, int]:
    """Compare a safetensors file's size with what its header promises."""
    start = head_of(path, 8, strict=True)
    if len(start) < 8:
        return f"is cut short ({size} bytes)", 8
    (length,) = struct.unpack("<Q", start)
    if length > HEADER_BYTES_MAX:
        return f"has a header of {length} bytes, which no safetensors file has", 8
    if 8 + length > size:
        return f"is cut short inside its header ({size} bytes)", 8
    if length > room:
        return "", 8
    try:
        header = json.loads(head_of(path, 8 + length, strict=True)[8:])
        ends = [row["data_offsets"][1] for key, row in header.items() if key != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return "has a header that is no JSON", 8 + length
    due = 8 + length + max([0, *(end for end in ends if isinstance(end, int))])
    if due != size:
        return f"has {size} bytes where its header promises {due}", 8 + length
    return "", 8 + length


# -- small reads ---------------------------------------------------------------------------------------


def head_of(path: str, limit: int, *, strict: bool = False) -> bytes:
    """Return the first bytes of a regular file, through links; b"" (or OSError, if `strict`) where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "is not a regular file")
            parts, left = [], limit
            while left > 0:
                part = os.read(descriptor, min(left, 1 << 20))
                if not part:
                    break
                parts.append(part)
                left -= len(part)
            return b"".join(parts)
        finally:
            os.close(descriptor)
    except OSError:
        if strict:
            raise
        return b""


def listed(path: str) -> List[str]:
    """Return the names in a directory; none where it cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir(path))
    return []


def status_of(path: str) -> Tuple[Optional[os.stat_result], str]:
    """Return what a path leads to, or why it leads nowhere."""
    try:
        return os.stat(path), ""
    except OSError as error:
        if os.path.islink(path) and error.errno == errno.ENOENT:
            return None, "is a link to nothing"
        return None, said(error)


def said(error: OSError) -> str:
    """Return an error in the words of a sentence about its file."""
    words = {
        errno.ENOENT: "does not exist",
        errno.ELOOP: "is a loop of symbolic links",
        errno.EACCES: "may not be read by the server's user",
    }
    return words.get(error.errno or 0) or str(error.strerror or error)


# -- the machine ---------------------------------------------------------------------------------------


def machine_limits(places: Sequence[str]) -> Dict[str, Any]:
    """Return the room that an engine will find: {shm: {free, total} | null, files, memory: {...}, disks: {place: free}}."""
    disks: Dict[str, Any] = {}
    for place in places:
        room = room_at(place)
        if room is not None:
            disks[place] = room["free"]
    return {
        "shm": room_at(SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else None,
        "files": number_in("/proc/sys/fs/nr_open"),
        "memory": memory_bytes(),
        "disks": disks,
    }


def room_at(place: str) -> Optional[Dict[str, int]]:
    """Return the free and total bytes of the file system that a path is, or would be, on."""
    while place and place != "/" and not os.path.exists(place):
        place = os.path.dirname(place)
    try:
        room = os.statvfs(place or "/")
    except OSError:
        return None
    return {"free": room.f_bavail * room.f_frsize, "total": room.f_blocks * room.f_frsize}


def number_in(path: str) -> Optional[int]:
    """Return the whole number in a small file of the kernel's."""
    with contextlib.suppress(ValueError):
        return int(head_of(path, 64))
    return None


def memory_bytes() -> Optional[Dict[str, int]]:
    """Return the machine's memory: {total, available}."""
    rows = dict(
        re.findall(
            r"(?m)^(MemTotal|MemAvailable):\s+(\d+) kB", head_of("/proc/meminfo", 8192).decode()
        )
    )
    if len(rows) < 2:
        return None
    return {"total": int(rows["MemTotal"]) * 1024, "available": int(rows["MemAvailable"]) * 1024}


PROBE = """
import hashlib, json, platform, sys
from importlib import metadata
found = {"python": platform.python_version(), "version": None, "digest": None, "distribution": None}
for name in sys.argv[1].split(","):
    try:
        it = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue
    found["distribution"], found["version"] = name, it.version
    record = it.read_text("RECORD")
    if record and "editable" not in (it.read_text("direct_url.json") or ""):
        found["digest"] = hashlib.sha256(record.encode()).hexdigest()
    break
if sys.argv[2] == "kernels":
    try:
        import torch
        found["torch"] = torch.__version__
        found["kernels"] = torch._C._cuda_getArchFlags().split()
    except Exception:
        pass
print("@" + json.dumps(found))
"""
"""Asks an interpreter what is installed there; `kernels`: also for which GPUs its torch was built."""


def read_probe(ran: Reading) -> Reading:
    """Read what `PROBE` printed."""
    if "known" not in ran:
        return ran
    result = ran["known"]
    line = next(
        (row for row in str(result.get("stdout", "")).splitlines() if row.startswith("@{")), ""
    )
    if result.get("exit_status") != 0 or not line:
        text = (str(result.get("stderr", "")) or str(result.get("stdout", ""))).strip()[-300:]
        return unknown(f"it ended with {result.get('exit_status')}: {text}")
    try:
        return known(dict(json.loads(line[1:])))
    except ValueError:
        return unknown("it printed something else than was asked for")


def read_compute_capabilities(exit_status: int, output: str) -> Reading:
    """Read `nvidia-smi --query-gpu=uuid,compute_cap`: UUID → "9.0"; old drivers do not know the field."""
    rows = re.findall(r"(?m)^\s*(GPU-[^,\s]+)\s*,\s*(\d+\.\d+)\s*$", output)
    if exit_status != 0 or not rows:
        return unknown("this driver does not tell the cards' architecture")
    return known(dict(rows))
