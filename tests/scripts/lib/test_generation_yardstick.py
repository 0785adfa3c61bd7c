"""The yardsticks of generation answer in processes of their own, with the same tokens. Oracle: each other."""

import shutil
from pathlib import Path

import pytest

from scripts.lib.generation_yardstick import ENGINE, STATIC, UNSHARED, Yardstick
from scripts.lib.offline import OfflineError
from tests.generation_models import tiny_llama

REPOSITORY = Path(__file__).resolve().parents[3]
SETTINGS = {"task": "generation", "model": "model", "cache_gib": 0.01}
REQUESTS = [([5, 6, 7], 4), ([8] * 40, 9), ([9, 10], 1), ([11] * 20, 6), ([12, 5], 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = tmp_path_factory.mktemp("archive")
    shutil.copytree(REPOSITORY / "handlers", archive / "handlers", ignore=shutil.ignore_patterns("__pycache__"))
    return tiny_llama(archive / "model")


def test_all_sides_generate_the_same(model: Path) -> None:
    found = {}
    for kind in (STATIC, ENGINE, UNSHARED):
        with Yardstick(model, "float32", 1, kind, SETTINGS, 2) as side:
            found[kind] = side.generate(REQUESTS, at_once=2)
    for kind, done in found.items():
        assert [len(tokens) for tokens in done.tokens] == [new for _, new in REQUESTS], kind
        assert done.tokens == found[STATIC].tokens, kind
        assert all(0 < first <= last <= done.seconds for first, last in zip(done.first_s, done.latency_s, strict=True))
    batches = found[STATIC].latency_s
    assert batches[0] == batches[1] != batches[2]
    assert found[ENGINE].first_s[1] < found[ENGINE].latency_s[1]


def test_a_failure_is_told(model: Path, tmp_path: Path) -> None:
    with pytest.raises(OfflineError, match="could not load"), Yardstick(tmp_path, "float32", 1, STATIC, SETTINGS, 2):
        pytest.fail("entered without a model")
