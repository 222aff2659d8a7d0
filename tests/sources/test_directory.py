"""Reading a folder of specs: what counts, what is refused, and that the result is of one moment."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from unprivileged import as_nobody

from reconciler.core.errors import SpecError
from reconciler.core.yaml_text import MAX_BYTES
from reconciler.sources import directory
from reconciler.sources.directory import Directory


def test_every_spec_file_below_is_read_and_nothing_else(tmp_path: Path) -> None:
    """`.yaml` and `.yml` at any depth; hidden names and other files are left alone."""
    for name in (
        "b.yaml",
        "a.yml",
        "deep/er/c.yaml",
        ".hidden.yaml",
        ".git/d.yaml",
        "README.md",
        "x.yaml.orig",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    snapshot = Directory(tmp_path).snapshot()
    assert dict(snapshot.files) == {
        str(tmp_path / n): n.encode() for n in ("a.yml", "b.yaml", "deep/er/c.yaml")
    }
    assert snapshot.unread == ()
    assert snapshot.root == str(tmp_path)


def test_one_file_is_a_source_too(tmp_path: Path) -> None:
    """`validate FILE` reads that file, whatever its name."""
    file = tmp_path / "spec.txt"
    file.write_text("x")
    assert dict(Directory(file).snapshot().files) == {str(file): b"x"}


@pytest.mark.parametrize("kind", ["missing", "empty", "no specs", "a pipe"])
def test_nothing_to_read_is_an_error_and_never_a_wish(tmp_path: Path, kind: str) -> None:
    """S13: a missing or empty folder does not mean that all servers should go."""
    path = tmp_path / "specs"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind != "missing":
        path.mkdir()
    if kind == "no specs":
        (path / "README.md").write_text("x")
    expected = {
        "missing": "cannot be read: No such file or directory",
        "empty": "holds no .yaml or .yml file; nothing is planned, and nothing is removed",
        "no specs": "holds no .yaml or .yml file; nothing is planned, and nothing is removed",
        "a pipe": "is neither a directory nor a file",
    }
    with pytest.raises(SpecError) as caught:
        Directory(path).snapshot()
    assert str(caught.value) == f"{path}: {expected[kind]}"


def test_links_are_refused_wherever_they_point(tmp_path: Path) -> None:
    """S19: to a file outside, a folder outside, a file inside, nothing, or a device."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.yaml").write_text("secret")
    root = tmp_path / "specs"
    root.mkdir()
    (root / "ok.yaml").write_text("ok")
    for name, target in {
        "file.yaml": outside / "secret.yaml", "folder": outside, "inside.yaml": root / "ok.yaml",
        "dangling.yaml": root / "gone", "device.yaml": Path("/dev/zero"), "loop.yaml": root / "loop.yaml",
    }.items():  # fmt: skip
        (root / name).symlink_to(target)
    (root / "README").symlink_to(outside / "secret.yaml")
    snapshot = Directory(root).snapshot()
    assert dict(snapshot.files) == {str(root / "ok.yaml"): b"ok"}
    assert [str(problem) for problem in snapshot.unread] == [
        f"{root / name}: is a link, which is not followed; put the file itself here"
        for name in (
            "dangling.yaml",
            "device.yaml",
            "file.yaml",
            "folder",
            "inside.yaml",
            "loop.yaml",
        )
    ]


def test_a_link_as_the_root_is_the_operator_s_choice(tmp_path: Path) -> None:
    """The path on the command line is not part of the repository."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a.yaml").write_text("a")
    (tmp_path / "link").symlink_to("real")
    assert len(Directory(tmp_path / "link").snapshot().files) == 1
    (tmp_path / "one.yaml").symlink_to(next((tmp_path / "real").glob("*.yaml")))
    assert len(Directory(tmp_path / "one.yaml").snapshot().files) == 1


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """A pipe named like a spec neither blocks nor counts."""
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "a.yaml").write_text("a")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "folder.yaml/b.yaml").write_text("b")
    snapshot = Directory(tmp_path).snapshot()
    assert sorted(Path(name).name for name in snapshot.files) == ["a.yaml", "b.yaml"]
    assert [problem.message for problem in snapshot.unread] == ["is not a regular file"]


def test_a_large_file_is_read_only_as_far_as_it_takes_to_refuse_it(tmp_path: Path) -> None:
    """T06: a gigabyte in a spec's place costs 256 kB."""
    with (tmp_path / "big.yaml").open("wb") as file:
        file.truncate(2**30)
    (content,) = Directory(tmp_path).snapshot().files.values()
    assert len(content) == MAX_BYTES + 1


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T06: a folder of something else ends in one error."""
    for number in range(5):
        (tmp_path / f"{number}.yaml").write_text("x" * 10)
    for limit, value, words in (
        ("MAX_FILES", 4, "holds more than 4 spec files"),
        ("MAX_ENTRIES", 3, "holds more than 3 files; name the folder of the specs"),
        ("MAX_TOTAL_BYTES", 2**5, "holds more than 0 MiB of specs"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(directory, limit, value)
            with pytest.raises(SpecError, match=words):
                Directory(tmp_path).snapshot()


def test_a_tower_of_folders_is_refused(tmp_path: Path) -> None:
    """Depth has an end."""
    deep = tmp_path.joinpath(*("d" * 40))
    deep.mkdir(parents=True)
    (deep / "a.yaml").write_text("a")
    with pytest.raises(SpecError, match="is more than 32 folders deep"):
        Directory(tmp_path).snapshot()


def test_files_that_change_while_they_are_read_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot never mixes two states; what never holds still is refused."""
    file = tmp_path / "a.yaml"
    file.write_text("old")
    real, saves = directory._content, [b"new!"]

    def content(path: Path, *, whole: bool) -> object:
        read = real(path, whole=whole)
        if saves:
            file.write_bytes(saves.pop())
        return read

    monkeypatch.setattr(directory, "_content", content)
    assert dict(Directory(tmp_path).snapshot().files) == {str(file): b"new!"}
    saves.extend(b"x" * length for length in range(10, 20))
    with pytest.raises(SpecError, match="the files change while they are read; nothing was read"):
        Directory(tmp_path).snapshot()


def test_the_version_names_the_content_and_not_the_place(tmp_path: Path) -> None:
    """Two checkouts of one commit have one version; any other content has another."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.yaml").write_text("a")
    one = Directory(tmp_path / "one").snapshot().version
    assert one == Directory(tmp_path / "two").snapshot().version
    (tmp_path / "two/a.yaml").rename(tmp_path / "two/b.yaml")
    assert one != Directory(tmp_path / "two").snapshot().version


def test_what_may_not_be_read_is_said() -> None:
    """A file without permission makes the snapshot incomplete, and not smaller."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "a.yaml").write_text("a")
        (folder / "a.yaml").chmod(0)
        said = as_nobody(lambda: [p.message for p in Directory(folder).snapshot().unread])
    assert said == ["cannot be read: Permission denied"]


def test_a_daemon_reads_no_file_that_is_still_being_written(tmp_path: Path) -> None:
    """A slow save holds valid YAML half-way; it is read when its writer has closed it."""
    (tmp_path / "b.yaml").write_text("b")
    with (tmp_path / "a.yaml").open("w") as writer:
        writer.write("half")
        writer.flush()
        with pytest.raises(SpecError, match="change while they are read"):
            Directory(tmp_path, whole=True).snapshot()
        assert len(Directory(tmp_path).snapshot().files) == 2
        writer.write(" and half")
    found = Directory(tmp_path, whole=True).snapshot()
    assert found.files[str(tmp_path / "a.yaml")] == b"half and half"
