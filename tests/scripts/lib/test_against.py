"""The options of `bench --against`: what they ask for, which contradict each other, what is written down of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.lib.against import Wanted
from scripts.lib.errors import UserError
from scripts.lib.load import whole
from scripts.lib.load_plan import Closed
from scripts.lib.openai_api import read_chat

URL = "http://h:8080/predictions/m"


def wanted(**options: Any) -> Wanted:
    return Wanted(**{"url": URL, "workload": "short"} | options)


def test_what_nothing_else_says() -> None:
    drive = wanted().drive()
    assert (drive.target.url, dict(drive.target.headers), drive.target.reader) == (URL, {}, whole)
    assert drive.loads == (Closed(1, 30.0), Closed(8, 30.0))
    assert (drive.warmup, drive.objective, drive.metrics) == (32, None, None)
    assert set(json.loads(drive.bodies[0].data)) == {"text"}


def test_what_is_said_is_taken() -> None:
    drive = wanted(token="secret", warm_up=0, objective="p95<=0.2s", metrics=" http://h:9/m ", clients=(2,)).drive()
    assert drive.target.headers == {"Authorization": "Bearer secret"}
    assert (drive.warmup, str(drive.objective), drive.metrics) == (0, "p95<=200ms", "http://h:9/m")


@pytest.mark.parametrize(
    ("kind", "path", "reader"), [("chat", "chat/completions", read_chat), ("embeddings", "embeddings", whole)]
)
def test_openai(kind: str, path: str, reader: Any) -> None:
    drive = wanted(url="http://h/v1", openai=kind, model="n", token="t").drive()
    assert (drive.target.url, drive.target.reader) == (f"http://h/v1/{path}", reader)
    assert drive.target.headers == {"Authorization": "Bearer t", "Accept-Encoding": "identity"}
    assert json.loads(drive.bodies[0].data)["model"] == "n"


def test_bodies_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "bodies.jsonl"
    path.write_text('{"data": "a"}\n')
    drive = Wanted(URL, bodies=path).drive()
    assert [body.data for body in drive.bodies] == [b'{"data": "a"}']
    assert Wanted(URL, bodies=path).described(drive)["requests"] == "1 different ones, from bodies.jsonl"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "h:8080/predictions/m"}, "--against h:8080/predictions/m: no URL"),
        ({"url": "ftp://h/x"}, "no URL of HTTP"),
        ({"url": "http://h:99999/x"}, "no URL of HTTP"),
        ({"metrics": "h:8082"}, "--metrics h:8082: no URL"),
        ({"model": "m"}, "--model says nothing"),
        ({"openai": "chat"}, "needs a model"),
        ({"openai": "images", "model": "m"}, "--openai images"),
        ({"openai": "chat", "model": "m", "task": "embedding"}, "--task says nothing"),
        ({"bodies": Path("b")}, "--workload says nothing"),
        ({"task": "ranking"}, "--task ranking"),
        ({"workload": "short,mixed"}, "--workload short,mixed"),
        ({"objective": "fast"}, "no objective"),
        ({"token": "a\nb"}, "--token holds"),
        ({"token": "a", "url": "http://u:p@h/x"}, "exclude each other"),
    ],
)
def test_options_that_can_not_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        wanted(**options).drive()


def test_a_url_that_is_refused_does_not_show_its_password() -> None:
    with pytest.raises(UserError) as error:
        wanted(url="ftp://user:pw@h/x").drive()
    assert "pw" not in str(error.value) + error.value.hint


def test_neither_key_nor_password_is_written_down() -> None:
    asked = wanted(url=f"{URL}?key=hidden", token="secret", rate="5", objective="p95<=1s")
    described = asked.described(asked.drive())
    assert described["server"] == URL
    assert (described["load"], described["arrivals"], described["objective"]) == ("5/s", "poisson", "p95<=1s")
    assert described["requests"] == "1000 different ones, short texts for embedding"
    assert not any(secret in str(described) for secret in ("secret", "hidden"))
    asked = Wanted("http://user:pw@h:8080/predictions/m", task="reranking")
    described = asked.described(asked.drive())
    assert (described["server"], described["requests"]) == (URL, "100 different ones, lists texts for reranking")
