"""scripts.lib.user_handler: does TorchServe load the class that the user means?"""

import shutil
from pathlib import Path

import pytest

from scripts.lib import user_handler
from scripts.lib.errors import UserError

GOOD = "from handlers.embedding import EmbeddingHandler\n\nclass Mine(EmbeddingHandler):\n    pass\n"


def check(tmp_path: Path, text: str, name: str = "my_handler.py") -> str:
    (tmp_path / name).write_text(text)
    return user_handler.check_text(tmp_path / name)


def test_a_good_one(tmp_path: Path) -> None:
    assert check(tmp_path, GOOD) == "my_handler"
    assert check(tmp_path, GOOD, "embedding.py") == "embedding"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Mine(:", r"my_handler\.py line 1"),
        ("", "defines no class"),
        ("from handlers.embedding import EmbeddingHandler", "imported ones don't count"),
        (GOOD + "class Other: pass\n", "the classes Mine, Other"),
        (GOOD + "def handle(data, context): pass\n", "a function `handle`"),
        (GOOD + "handle = Mine()\n", "a function `handle`"),
        ("x = '\0'", "null bytes"),
    ],
)
def test_what_torchserve_would_not_load(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(tmp_path, text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-handler.py", "can't be imported"), ("1st.py", "can't be imported"), ("class.py", "can't be imported"),
        ("handler.txt", "can't be imported"), ("handlers.py", "a part of the archive"),
        ("json.py", "a module of Python"),
        ("torch.py", "an installed package"), ("ts.py", "an installed package"),
        ("image_classifier.py", "a handler of TorchServe's own"),
    ],
)  # fmt: skip
def test_names_that_mean_something_else(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(tmp_path, GOOD, name)
    with pytest.raises(UserError, match="there is no handler file"):
        user_handler.check_text(tmp_path / "none.py")


def test_the_import_decides(tmp_path: Path) -> None:
    """In a process of its own, with a stand-in for the handlers package: the real one takes seconds to import."""
    (tmp_path / "handlers").mkdir()
    (tmp_path / "handlers" / "__init__.py").touch()
    (tmp_path / "handlers" / "base.py").write_text("class TransformerHandler: pass\n")
    (tmp_path / "handlers" / "embedding.py").write_text(
        "from handlers.base import TransformerHandler\nclass EmbeddingHandler(TransformerHandler): pass\n"
    )
    for text, message in [
        (GOOD, ""),
        (GOOD + "import no_such_module\n", "No module named 'no_such_module'"),
        ("class Mine: pass\n", r"Mine is no subclass of handlers\.base\.TransformerHandler"),
        (GOOD + "if True:\n    class Other: pass\n", "the classes Mine, Other"),
        (GOOD + "globals()['handle'] = print\n", "a function `handle`"),
        ("from handlers.embedding import EmbeddingHandler as Mine\n", "defines no class"),
    ]:
        (tmp_path / "my_handler.py").write_text(text)
        if message:
            with pytest.raises(UserError, match=message):
                user_handler.check_import(tmp_path, "my_handler")
        else:
            user_handler.check_import(tmp_path, "my_handler")
    shutil.rmtree(tmp_path / "handlers")


def test_the_clean_environment_knows_no_python_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    environment = user_handler.clean_environment(tmp_path)
    assert "PYTHONPATH" not in environment
    assert environment["TMPDIR"] == str(tmp_path)
