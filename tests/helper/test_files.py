"""Files are replaced whole or not at all, and never through a symbolic link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reconciler.helper.files import (
    FILE_BYTES_MAX,
    append_line,
    file_facts,
    file_kind,
    file_lock,
    list_directory,
    read_file,
    remove_directory,
    remove_file,
    replace_file,
)
from reconciler.helper.machine import Busy

OWNER = (os.geteuid(), os.getegid())


def test_a_file_is_replaced_with_its_mode_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    """Missing parents are made, the mode is exact whatever the umask, and no temporary file stays."""
    target = tmp_path / "a" / "b" / "x.service"
    replace_file(str(target), b"one", 0o640, *OWNER)
    replace_file(str(target), b"two", 0o640, *OWNER)
    assert read_file(str(target)) == b"two"
    assert target.stat().st_mode & 0o777 == 0o640
    assert list_directory(str(target.parent)) == ["x.service"]
    assert target.parent.stat().st_mode & 0o777 == 0o700


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """A directory in the way makes the rename fail: it stays, and no temporary file does."""
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError):
        replace_file(str(tmp_path / "x"), b"data", 0o600, *OWNER)
    assert list_directory(str(tmp_path)) == ["x"]


def test_no_link_is_followed(tmp_path: Path) -> None:
    """Reading and appending refuse a link; replacing puts a file in its place; its target is untouched."""
    secret, link = tmp_path / "secret", tmp_path / "link"
    secret.write_bytes(b"s")
    link.symlink_to(secret)
    assert file_kind(str(link)) == "link"
    with pytest.raises(OSError):
        read_file(str(link))
    with pytest.raises(OSError):
        append_line(str(link), b"x")
    replace_file(str(link), b"mine", 0o600, *OWNER)
    assert (file_kind(str(link)), secret.read_bytes()) == ("file", b"s")


def test_what_is_no_plain_file_or_too_large_is_an_error(tmp_path: Path) -> None:
    """A pipe does not block, a huge file is not read, and a missing one is None."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").write_bytes(b"x" * (FILE_BYTES_MAX + 1))
    for name in ("pipe", "huge"):
        with pytest.raises(OSError):
            read_file(str(tmp_path / name))
    assert read_file(str(tmp_path / "none")) is None


def test_lines_are_appended_and_files_removed(tmp_path: Path) -> None:
    """Each line ends with one newline; removing what is not there is fine."""
    path = str(tmp_path / "sub" / "log")
    append_line(path, b"one")
    append_line(path, b"two\n")
    assert read_file(path) == b"one\ntwo\n"
    remove_file(path)
    remove_file(path)
    assert file_kind(path) == "missing"


def test_only_what_lies_under_the_root_is_removed(tmp_path: Path) -> None:
    """A path outside, with dots, or the root itself is refused, and a link inside is not followed."""
    root, outside = tmp_path / "state", tmp_path / "outside"
    (root / "server").mkdir(parents=True)
    outside.mkdir()
    (outside / "kept").write_bytes(b"")
    (root / "server" / "link").symlink_to(outside)
    for path in (str(outside), f"{root}/../outside", str(root)):
        with pytest.raises(OSError):
            remove_directory(path, str(root))
    remove_directory(f"{root}/server", str(root))
    remove_directory(f"{root}/server", str(root))
    assert list_directory(str(root)) == []
    assert (outside / "kept").exists()


def test_the_lock_is_held_by_one(tmp_path: Path) -> None:
    """A second holder is told Busy at once when it may not wait; afterwards it has the lock."""
    path = str(tmp_path / "lock")
    with file_lock(path, 0), pytest.raises(Busy), file_lock(path, 0):
        pass
    with file_lock(path, 0):
        pass


def test_facts_of_a_missing_path_are_of_the_file_system_it_would_be_on(tmp_path: Path) -> None:
    """Room is told for a path that is yet to be made."""
    facts = file_facts(str(tmp_path / "a" / "b"))
    assert facts["kind"] == "missing"
    assert facts["free_bytes"] > 0
    (tmp_path / "run").write_bytes(b"")
    (tmp_path / "run").chmod(0o755)
    assert file_facts(str(tmp_path / "run"))["executable"]
