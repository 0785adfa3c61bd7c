"""scripts.lib.archive, integrity and tree: what is packed is what comes out, and any change is seen."""

import os
import shutil
import struct
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scripts.lib import archive, integrity, tree
from scripts.lib.archive import Content
from scripts.lib.errors import UserError
from scripts.lib.names import check_model_name, check_version

# Any name that a Linux directory can hold and an archive may carry.
NAMES = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\\x7f"), min_size=1, max_size=40
).filter(lambda name: name not in (".", "..") and len(name.encode()) < 200)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


def make(path: Path, extra: dict[str, Content] | None = None) -> str:
    """Write a small whole archive and return its SHA-256."""
    contents: dict[str, Content] = {
        archive.MANIFEST: archive.manifest("m", "1.0", "handlers.embedding", requirements=False),
        archive.CONFIG: archive.model_config({"task": "embedding"}, response_timeout=120, startup_timeout=300),
        "model/config.json": b"{}",
        "model/weights": bytes(range(256)) * 40,
        **(extra or {}),
    }
    members = archive.measure(contents)
    contents[archive.PROVENANCE] = archive.provenance({"source": "test"}, members)
    return archive.write(path, contents, members | archive.measure({archive.PROVENANCE: contents[archive.PROVENANCE]}))


@pytest.fixture
def built(tmp_path: Path) -> Path:
    make(tmp_path / "m.mar")
    return tmp_path / "m.mar"


def test_manifest_is_what_torchserve_reads(built: Path) -> None:
    whole = archive.read(built)
    assert (whole.name, whole.version, whole.handler) == ("m", "1.0", "handlers.embedding")
    assert whole.config == {"responseTimeout": 120, "startupTimeout": 300, "handler": {"task": "embedding"}}
    assert whole.manifest["model"]["configFile"] == "model-config.yaml"
    assert integrity.problems(built) == []


def test_same_inputs_same_bytes(tmp_path: Path) -> None:
    digests = set()
    for order in (["b", "a"], ["a", "b"]):
        folder = tmp_path / "-".join(order)
        folder.mkdir()
        for name in order:
            (folder / name).write_text(name)
            os.utime(folder / name, (len(digests), 1e9 + len(digests)))
            (folder / name).chmod(0o600 + 0o40 * len(digests))
        extra: dict[str, Content] = {f"model/{name}": path for name, path in tree.walk(folder).items()}
        path = tmp_path / f"{'-'.join(order)}.mar"
        digests.add(make(path, extra))
        assert archive.file_sha256(path) in digests
    assert len(digests) == 1


@given(st.dictionaries(PATHS, st.binary(max_size=64), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_any_file_name_comes_back(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        kept = {}
        for name, content in files.items():
            try:
                (root / "in" / name).parent.mkdir(parents=True, exist_ok=True)
                (root / "in" / name).write_bytes(content)
            except OSError:  # a file where another name needs a folder
                continue
            kept[name] = content
        assume(not any(content.startswith(b"version https://git-lfs") for content in kept.values()))
        found = tree.walk(root / "in")
        assert found.keys() == kept.keys()
        make(root / "m.mar", {f"model/x/{name}": path for name, path in found.items()})
        assert integrity.problems(root / "m.mar") == []
        archive.extract(root / "m.mar", root / "out")
        for name, content in kept.items():
            assert (root / "out" / "model" / "x" / name).read_bytes() == content


def test_awkward_names(tmp_path: Path) -> None:
    names = [
        "a, b.txt",
        "w[1].txt",
        "Größe/モデル.json",
        "1/config.json",
        "2/config.json",
        "--force",
        "*",
        "a b/c  d",
        "é",
    ]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    make(tmp_path / "m.mar", {f"model/{name}": path for name, path in tree.walk(tmp_path / "in").items()})
    archive.extract(tmp_path / "m.mar", tmp_path / "out")
    assert {name: (tmp_path / "out" / "model" / name).read_text() for name in names} == {name: name for name in names}


def test_links_are_packed_as_what_they_lead_to(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    (inside / "real").mkdir(parents=True)
    (tmp_path / "blob").write_text("outside")
    (inside / "real" / "file").write_text("inside")
    (inside / "far").symlink_to("../blob")
    (inside / "near").symlink_to("real/file")
    (inside / "folder").symlink_to("real")
    found = tree.walk(inside)
    assert {name: path.read_text() for name, path in found.items()} == {
        "far": "outside", "folder/file": "inside", "near": "inside", "real/file": "inside",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: (root / "x").symlink_to("nowhere"), "broken link to 'nowhere'"),
        (lambda root: (root / "x").symlink_to("x"), "link that can't be followed"),
        (lambda root: (root / "x").symlink_to("."), "a loop"),
        (lambda root: (root / "x").symlink_to("/"), "a loop"),
        (lambda root: os.mkfifo(root / "x"), "a named pipe"),
        (lambda root: (root / "x\n").touch(), "control character"),
        (lambda root: (root / "x\\y").touch(), "backslash"),
        (lambda root: Path(os.fsdecode(bytes(root) + b"/\xff")).touch(), "not valid UTF-8"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(tmp_path: Path, spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    spoil(tmp_path)
    with pytest.raises(UserError, match=message):
        tree.walk(tmp_path)


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").touch(mode=0)
    with pytest.raises(UserError, match="can't be read"):
        tree.walk(tmp_path)


@pytest.mark.parametrize("name", ["/a", "../a", "a/../b", "./a", "a//b", "", "\ud800"])
def test_names_outside_are_refused(name: str) -> None:
    with pytest.raises(UserError):
        tree.check_name(name)


def test_a_source_that_changes_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"before")
    contents: dict[str, Content] = {"model/file": file}
    members = archive.measure(contents)
    for after in (b"behind", b"shorter", b"x"):
        file.write_bytes(after)
        with pytest.raises(UserError, match="changed while it was packed"):
            archive.write(tmp_path / "m.mar", contents, members)
        (tmp_path / "m.mar").unlink()


def test_git_lfs_pointers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(UserError, match="git-lfs pointer"):
        archive.measure({"model/vocab.txt": tmp_path / "vocab.txt"})


def rewrite(path: Path, change: dict[str, bytes | None], compression: int = zipfile.ZIP_STORED) -> None:
    """Write the archive again with some members replaced (None: removed)."""
    with zipfile.ZipFile(path) as old:
        members = {info.filename: old.read(info) for info in old.infolist()}
    members |= {name: content for name, content in change.items() if content is not None}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, content in members.items():
            if name not in change or change[name] is not None:
                new.writestr(zipfile.ZipInfo(name), content, compression)


def test_each_kind_of_tampering_is_named(built: Path) -> None:
    def wrong(change: dict[str, bytes | None]) -> str:
        copy = built.with_name("copy.mar")
        shutil.copy(built, copy)
        rewrite(copy, change)
        return "; ".join(integrity.problems(copy))

    with zipfile.ZipFile(built) as file:
        origin = file.read(archive.PROVENANCE)
    assert "its headers are not the ones that batchserve writes" in wrong({})
    assert "'model/weights' was changed" in wrong({"model/weights": b"other"})
    assert "'model/extra' was added" in wrong({"model/extra": b"more"})
    assert "'model/config.json' is missing" in wrong({"model/config.json": None})
    assert "digest does not match" in wrong({archive.PROVENANCE: origin.replace(b'"test"', b'"tset"')})
    assert "names no members" in wrong({archive.PROVENANCE: b"{}"})
    assert "'model/config.json' was changed" in wrong({"model/config.json": b"[]"})


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_flipped_byte_is_seen(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "m.mar"
        make(path)
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        assert not _passes(path), f"byte {at}"


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_foreign_archive_never_ends_in_a_traceback(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "m.mar"
        make(path)
        rewrite(path, {archive.PROVENANCE: None}, zipfile.ZIP_DEFLATED)
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        _passes(path)
        try:
            archive.extract(path, Path(temporary) / "out")
        except UserError as error:
            assert str(path) in str(error) or "no path inside" in str(error) or "file name" in str(error)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_truncation_is_seen(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "m.mar"
        make(path)
        os.truncate(path, data.draw(st.integers(0, path.stat().st_size - 1)))
        assert not _passes(path)


def _passes(path: Path) -> bool:
    try:
        return integrity.problems(path) == []
    except UserError:
        return False


def test_bytes_that_belong_to_no_member_are_seen(built: Path) -> None:
    original = built.read_bytes()
    built.write_bytes(b"#!/bin/sh\n" + original)
    assert not _passes(built)
    built.write_bytes(original + b"more")
    assert not _passes(built)
    # A member that only the headers in front name: TorchServe's reader would unpack it, Python's would not
    with zipfile.ZipFile(built, "w") as file:
        file.writestr("hidden.py", "evil")
    hidden = built.read_bytes()[: 30 + len("hidden.py") + len("evil")]
    start = original.rindex(b"PK\x05\x06")
    offset = struct.unpack_from("<I", original, start + 16)[0]
    end = bytearray(original[start:])
    struct.pack_into("<I", end, 16, offset + len(hidden))
    built.write_bytes(original[:offset] + hidden + original[offset:start] + end)
    with zipfile.ZipFile(built) as file:
        assert "hidden.py" not in file.namelist()
    assert not _passes(built)


def test_other_files_are_named_as_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.mar"
    with pytest.raises(UserError, match="there is no archive"):
        archive.read(path)
    for content, message in [
        (b"", "is empty"),
        (b"\x1f\x8b\x08", "a gzip file"),
        (b"GGUF", "no ZIP file"),
        (b"PK\x03\x04 and then nothing", "truncated"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            archive.read(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme", "")
    with pytest.raises(UserError, match=r"no MAR-INF/MANIFEST\.json"):
        archive.read(path)
    with pytest.raises(UserError, match="is a directory"):
        archive.read(tmp_path)


def test_a_foreign_archive_is_read_and_checked_by_its_crcs(built: Path) -> None:
    rewrite(built, {archive.PROVENANCE: None}, zipfile.ZIP_DEFLATED)
    assert archive.read(built).provenance is None
    assert integrity.problems(built) == []
    rewrite(built, {}, zipfile.ZIP_STORED)
    content = bytearray(built.read_bytes())
    content[content.index(bytes(range(256)))] ^= 1
    built.write_bytes(content)
    assert integrity.problems(built) == ["'model/weights' is damaged: Bad CRC-32 for file 'model/weights'"]


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil"])
def test_extraction_stays_inside(tmp_path: Path, name: str) -> None:
    make(tmp_path / "m.mar")
    rewrite(tmp_path / "m.mar", {name: b"evil"})
    with pytest.raises(UserError):
        archive.extract(tmp_path / "m.mar", tmp_path / "out" / "deep")
    assert not list(tmp_path.rglob("evil"))
    assert any("no path inside" in problem for problem in integrity.problems(tmp_path / "m.mar"))


def test_extraction_makes_no_links(tmp_path: Path) -> None:
    make(tmp_path / "m.mar")
    with zipfile.ZipFile(tmp_path / "m.mar", "a") as file:
        link = zipfile.ZipInfo("model/link")
        link.create_system, link.external_attr = 3, 0o120777 << 16
        file.writestr(link, "/etc/passwd")
    with pytest.raises(UserError, match="symbolic link"):
        archive.extract(tmp_path / "m.mar", tmp_path / "out")
    assert "'model/link' is a symbolic link" in integrity.problems(tmp_path / "m.mar")


@pytest.mark.parametrize("text", [b"[]", b"{", b'{"model": []}', b"{}", b"null"])
def test_manifests_that_say_nothing(built: Path, text: bytes) -> None:
    rewrite(built, {archive.MANIFEST: text})
    try:
        whole = archive.read(built)
    except UserError:
        return
    assert (whole.name, whole.version, whole.handler) == ("", "", "")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a b", "-a", "ä", "a%2f", "x" * 101, "a.mar", "a\n", "token", "token_tagger"]
)
def test_names_that_torchserve_cannot_route(name: str) -> None:
    with pytest.raises(UserError):
        check_model_name(name)


def test_versions_are_exact_strings() -> None:
    assert [check_version(version) for version in ("1", "1.0", "2024-01-01_a")] == ["1", "1.0", "2024-01-01_a"]
    for version in ("", "1/0", "1 0", "../1", "1.0\n"):
        with pytest.raises(UserError):
            check_version(version)


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=3))
def test_prompts_survive_the_yaml(prompts: dict[str, str]) -> None:
    import yaml

    text = archive.model_config({"prompts": prompts}, response_timeout=1, startup_timeout=1)
    assert text.isascii()
    assert yaml.safe_load(text)["handler"]["prompts"] == prompts


def test_a_pipe_is_no_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mar")
    with pytest.raises(UserError, match="no regular file"):
        archive.read(tmp_path / "pipe.mar")


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.mar"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("zeros", bytes(100 << 20))
    with pytest.raises(UserError, match="would unpack to 104,857,600 bytes"):
        archive.extract(path, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
