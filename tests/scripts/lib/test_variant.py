from pathlib import Path

import pytest

from scripts.lib import archive, integrity, variant
from scripts.lib.errors import UserError
from scripts.lib.loaded import loaded
from scripts.lib.recipe import Order, prepare
from scripts.lib.source import resolve
from tests.e2e.archives import write_archive


@pytest.fixture(scope="module")
def tiny_archive(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "tiny.mar"
    order = Order(source=resolve(str(tiny_model)), name="tiny", version="1.0", response_timeout=77)
    recipe = prepare(order, tmp_path_factory.mktemp("work"))
    archive.write(path, recipe.contents, recipe.members)
    return path


def test_a_variant_differs_in_its_settings_alone_and_is_intact(tiny_archive: Path, tmp_path: Path) -> None:
    about, path = archive.read(tiny_archive), tmp_path / "variant.mar"
    variant.write(about, {"threads": 3, "dtype": "bfloat16"}, path)
    changed = archive.read(path)
    assert changed.settings == {**about.settings, "threads": 3, "dtype": "bfloat16"}
    assert {**changed.config, "handler": None} == {**about.config, "handler": None}
    assert changed.config["responseTimeout"] == 77
    assert integrity.problems(path) == []
    with archive.opened(tiny_archive) as one, archive.opened(path) as other:
        assert one.namelist() == other.namelist()
        differ = [name for name in one.namelist() if one.read(name) != other.read(name)]
    assert sorted(differ) == [archive.PROVENANCE, archive.CONFIG]


def test_a_variant_is_the_archive_that_a_build_with_these_settings_makes(
    tiny_archive: Path, tiny_model: Path, tmp_path: Path
) -> None:
    variant.write(archive.read(tiny_archive), {"threads": 3}, tmp_path / "variant.mar")
    order = Order(
        source=resolve(str(tiny_model)), name="tiny", version="1.0", response_timeout=77, overrides={"threads": 3}
    )
    (tmp_path / "work").mkdir()
    recipe = prepare(order, tmp_path / "work")
    assert archive.write(tmp_path / "built.mar", recipe.contents, recipe.members) == archive.file_sha256(
        tmp_path / "variant.mar"
    )


def test_a_variant_computes_as_it_says(tiny_archive: Path, tmp_path: Path) -> None:
    variant.write(archive.read(tiny_archive), {"dtype": "bfloat16", "threads": 1}, tmp_path / "variant.mar")
    with loaded(tmp_path / "variant.mar") as running:
        handler = running._entry_point.__self__
        assert (handler.card()["dtype"], handler.threads.count) == ("bfloat16", 1)


def test_unknown_settings_and_foreign_archives_are_refused(tiny_archive: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="thread"):
        variant.write(archive.read(tiny_archive), {"thread": 3}, tmp_path / "variant.mar")
    foreign = write_archive(tmp_path / "echo.mar", config="responseTimeout: 30\n")
    with pytest.raises(UserError, match="not built by this tool"):
        variant.write(archive.read(foreign), {"threads": 3}, tmp_path / "variant.mar")
    assert not (tmp_path / "variant.mar").exists()
