"""scripts.lib.requirements: what pip would install beside the worker's own packages."""

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.lib import requirements
from scripts.lib.errors import UserError


def read(tmp_path: Path, text: str) -> str:
    (tmp_path / "requirements.txt").write_text(text, encoding="utf-8")
    return requirements.read(tmp_path / "requirements.txt").decode()


@pytest.mark.parametrize(
    "line",
    [
        "torch", "torch>=2", "Torch == 2.0 ; python_version > '3'", "torch[extra]", "TRANSFORMERS~=5.0", "torchserve",
        "torch @ https://example.com/torch-2.0-cp311-cp311-linux_x86_64.whl", "git+https://github.com/x/torch#egg=torch",
        "https://example.com/torch-2.0%2Bcpu-cp311-cp311-linux_x86_64.whl#sha256=00", "torch --hash=sha256:00",
        "torch_model_archiver", "requests\ntorch # comment", "tor\\\nch", "torchvision",
    ],
)  # fmt: skip
def test_what_would_shadow_the_workers_own_is_refused(tmp_path: Path, line: str) -> None:
    if line.startswith("tor\\"):
        with pytest.raises(UserError, match="is no requirement"):
            read(tmp_path, line)
        return
    with pytest.raises(UserError, match=r"would install .* again"):
        read(tmp_path, line)


def test_what_needs_torch_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"requirements\.txt:2: sentence-transformers needs (torch|transformers)"):
        read(tmp_path, "# embeddings\nsentence-transformers\n")


@pytest.mark.parametrize(
    "line", ["huggingface_hub[torch]", "huggingface-hub[Torch]>=0.1", "git+https://x/y#egg=huggingface_hub[torch]"]
)
def test_extras_that_need_torch_are_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(UserError, match=r"requirements\.txt:1: huggingface-hub needs torch"):
        read(tmp_path, line)


def test_what_is_not_installed_here_cannot_be_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate and torchmetrics need torch, and nothing on this machine says so."""

    def requires(name: str) -> SimpleNamespace:
        if name not in ("here", "orjson"):
            raise metadata.PackageNotFoundError(name)
        return SimpleNamespace(requires=["orjson", 'missing; extra == "more"', "absent; python_version < '3'"])

    monkeypatch.setattr(requirements.metadata, "distribution", requires)
    with pytest.raises(UserError, match="accelerate is not installed here") as error:
        read(tmp_path, "accelerate")
    assert error.value.hint == "install it here first: pip install accelerate"
    with pytest.raises(UserError, match="here needs missing, which is not installed here"):
        read(tmp_path, "here[more]")
    assert read(tmp_path, "here\n") == "here\n"


def test_harmless_ones_pass(tmp_path: Path) -> None:
    lines = [
        "regex>=2024.1",
        "--extra-index-url https://example.com/simple",
        "--pre --prefer-binary",
        "orjson",
        "huggingface_hub",
        "torch; python_version < '3'",
    ]
    text = "\n".join(lines) + "\n"
    assert read(tmp_path, text.replace("2024.1", "2024.1  # for words\n")) == text


def test_includes_are_written_out_and_checked(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "more.txt").write_text("orjson\n-r ../again.txt\n")
    (tmp_path / "again.txt").write_text("regex\n")
    assert read(tmp_path, "typer\n-r sub/more.txt\n") == "typer\norjson\nregex\n"
    (tmp_path / "again.txt").write_text("torch\n")
    for include in ("-r sub/more.txt", "-rsub/more.txt", "--requirement=sub/more.txt", "--requirement sub/more.txt"):
        with pytest.raises(UserError, match=r"again\.txt:1: this would install torch again"):
            read(tmp_path, include)
    (tmp_path / "again.txt").write_text("-r sub/more.txt\n")
    with pytest.raises(UserError, match="includes itself"):
        read(tmp_path, "-r sub/more.txt")
    with pytest.raises(UserError, match="there is no file"):
        read(tmp_path, "-r none.txt")


@pytest.mark.parametrize(
    "line",
    [
        "-e .",
        "--prefoo",
        "--pre -e .",
        "--pre --requirement=other.txt",
        "-c constraints.txt",
        "./local",
        "file.whl",
        "x @ file:///tmp/x",
        "https://example.com/x.tar.gz",
        "not a name",
    ],
)
def test_what_the_archive_cannot_bring_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(UserError, match=r"requirements\.txt:1"):
        read(tmp_path, line)
