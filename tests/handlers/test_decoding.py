from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from handlers.decoding import Headers, accepted, decode
from handlers.errors import RequestError
from tests.strategies import as_json, json_values, texts


def body(value: Any, content_type: str = "", **headers: str) -> Any:
    part = {"body": {"content-type": content_type}} if content_type else {}
    return decode({"body": value}, Headers({**part, **headers})).body


def form(fields: dict[str, Any], **types: str) -> Any:
    return decode(fields, Headers({name: {"content-type": kind} for name, kind in types.items()})).body


def fault(code: str, call: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call()
    assert caught.value.code == code
    return caught.value


def test_what_torchserve_decoded_is_kept() -> None:
    assert body({"text": "a"}, "application/json") == {"text": "a"}
    assert body("a", "text/plain") == "a"


def test_the_route_is_found_whatever_its_slashes() -> None:
    assert decode({"body": "a"}, Headers({"URL_Path": "/v1/embeddings/"})).route == "v1/embeddings"
    assert decode({"body": "a"}, Headers({})).route == ""


@given(json_values)
def test_json_in_bytes_whatever_its_encoding(value: Any) -> None:
    for codec in ("utf-8", "utf-8-sig", "utf-16"):
        raw = bytearray(as_json(value).decode().encode(codec))
        assert body(raw, "application/json") == value
    raw = bytearray(as_json(value).decode().encode("utf-32"))
    assert body(raw, "application/json; charset=utf-32") == value


@given(texts)
@example("\x00")  # in UTF-16 it begins as UTF-32's mark does
def test_text_survives_its_charset(text: str) -> None:
    for codec in ("utf-8-sig", "utf-16"):
        assert body(bytearray(text.encode(codec)), "text/plain") == text
    # TorchServe takes what is valid UTF-8 for UTF-8, whatever the client declared
    raw = text.encode("utf-16-le")
    try:
        seen: Any = raw.decode()
    except UnicodeDecodeError:
        seen = bytearray(raw)
    if not text.startswith("\ufeff"):
        assert body(seen, "text/plain; charset=utf-16-le") == text


def test_declared_latin_1() -> None:
    assert body(bytearray("é".encode("latin-1")), "text/plain; charset=ISO-8859-1") == "é"
    assert body("Ã©", "text/plain; charset=utf-8") == "Ã©"
    assert body("é", "text/plain; charset=latin-1") == "Ã©", "the two bytes were two letters"


def test_the_charset_is_in_the_requests_own_header() -> None:
    """TorchServe keeps `; charset=…` out of what it says of the body."""
    headers = Headers({"body": {"content-type": "text/plain"}, "Content-Type": "text/plain; charset=latin-1"})
    assert decode({"body": bytearray(b"\xe9")}, headers).body == "é"


def test_a_byte_order_mark_is_no_part_of_a_text() -> None:
    assert body("\ufeffa", "text/plain") == "a"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"text": "a"}', {"text": "a"}),
        (b'["a", "b"]', ["a", "b"]),
        (b'"a"', "a"),
        (b"plain words", "plain words"),
        (b"[CLS] is a token", "[CLS] is a token"),
        (b"42", "42"),
        (b"true", "true"),
        (b"null", "null"),
    ],
)
def test_octets_that_name_no_type(raw: bytes, expected: Any) -> None:
    assert body(bytearray(raw), "application/octet-stream") == expected
    assert body(bytearray(raw)) == expected


def test_malformed_json() -> None:
    error = fault("malformed_json", lambda: body(bytearray(b'{"text": '), "application/json"))
    assert "line 1, column 10" in error.message
    assert error.param is None
    error = fault("malformed_json", lambda: body(bytearray(b'{"text": '), "application/octet-stream"))
    assert "text/plain" in error.message
    fault("malformed_json", lambda: body(bytearray(b"[" * 100_000), "application/json"))
    fault("malformed_json", lambda: body(bytearray(b"1" * 5000), "application/json"))


def test_empty() -> None:
    for kind in ("", "application/octet-stream", "application/json"):
        fault("empty_body", lambda kind=kind: body(bytearray(b""), kind))
    assert body("", "text/plain") == "", "a text may be empty"


def test_undecodable() -> None:
    fault("undecodable", lambda: body(bytearray(b"\xff\xffa"), "text/plain"))
    fault("undecodable", lambda: body(bytearray(b"\xff\xfea"), "text/plain"))  # half a UTF-16 unit
    assert fault("undecodable", lambda: form({"text": bytearray(b"\xff")})).param == "text"


@pytest.mark.parametrize(
    "charset", ["nonsense", "zip", "rot13", "idna\x00", "base64", "punycode", "idna", "utf-7", "unicode_escape"]
)
def test_no_charset(charset: str) -> None:
    fault("unknown_charset", lambda: body(bytearray(b"abc"), f'text/plain; charset="{charset}"'))


def test_a_charset_that_cannot_be_read() -> None:
    fault("unknown_charset", lambda: body(bytearray(b"abc"), "text/plain; charset*=%00''x"))


@pytest.mark.parametrize(
    "charset", ["utf8", "latin1", "windows-1252", "Shift_JIS", "GB18030", "big5", "KOI8-R", "ascii"]
)
def test_charsets_of_texts(charset: str) -> None:
    assert body(bytearray("abc".encode(charset)), f"text/plain; charset={charset}") == "abc"


def test_forms() -> None:
    # a part of its own content type is decoded already
    parts = {"text": bytearray(b"a"), "normalize": True, "dimensions": 3}
    assert form(parts, normalize="application/json") == {"text": "a", "normalize": True, "dimensions": 3}
    assert form({"text": bytearray(b'{"not": "parsed"}')}) == '{"not": "parsed"}'
    assert form({"data": bytearray(b'{"text": "a"}')}) == {"text": "a"}
    assert form({"data": bytearray(b"words")}) == "words"
    assert form({"data": {"text": "a"}}, data="application/json") == {"text": "a"}
    assert form({"text": bytearray(b"a"), "normalize": bytearray(b"false"), "prompt_name": "query"}) == {
        "text": "a",
        "normalize": False,
        "prompt_name": "query",
    }
    assert form({"data": bytearray(b'["a"]'), "dimensions": "8"}) == {"texts": ["a"], "dimensions": 8}


def test_form_faults() -> None:
    assert "Content-Type: application/json" in fault("json_as_form", lambda: form({'{"text": "a"}': ""})).message
    # TorchServe makes a form of no fields of a JSON text without "="
    empty = Headers({"Content-Type": "application/x-www-form-urlencoded"})
    fault("json_as_form", lambda: decode({}, empty))
    fault("missing_field", lambda: form({"txt": "a"}))
    fault("ambiguous_input", lambda: form({"data": "a", "text": "b"}))
    fault("empty_body", lambda: form({}))


@given(st.dictionaries(st.sampled_from(["body", "data", "text", "x"]), st.binary(max_size=30).map(bytearray)))
def test_no_row_raises_anything_but_a_request_error(row: dict[str, Any]) -> None:
    for kind in ("", "application/json", "text/plain; charset=utf-16", "text/plain", "x"):
        try:
            decode(row, Headers({name: {"content-type": kind} for name in row}))
        except RequestError as error:
            assert error.status == 400


def test_what_a_client_accepts() -> None:
    header = Headers({"Accept": "text/CSV; q=0.9 , application/json,*/*;q=0.1"})
    assert accepted(header) == ["text/csv", "application/json", "*/*"]
    assert accepted(Headers({})) == [""]
