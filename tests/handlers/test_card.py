import json
from pathlib import Path

import pytest

from handlers.card import origin


@pytest.mark.parametrize(
    ("name", "told"), [("org/model", "org/model"), ("/home/me/model", None), ("./model", None), ("C:\\models", None)]
)
def test_where_a_model_comes_from(tmp_path: Path, name: str, told: str | None) -> None:
    config = {"model_type": "bert", "architectures": ["BertModel"], "_name_or_path": name}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "MAR-INF" / "PROVENANCE.json").write_text('{"source": "me/model"}')
    found = origin(tmp_path, tmp_path)
    assert found.pop("base_model", None) == told
    assert found == {"source": "me/model", "model_type": "bert", "architecture": "BertModel"}


def test_an_archive_that_says_nothing(tmp_path: Path) -> None:
    assert origin(tmp_path, tmp_path) == {}
    (tmp_path / "config.json").write_text("[]")
    assert origin(tmp_path, tmp_path) == {}
