"""A row as TorchServe hands it over → the body and the route that the client meant.

TorchServe decodes `application/json` and `text/*` before a handler sees them, in UTF-8 alone; everything it could not
decode arrives as bytes. Form fields arrive as keys of the row, a plain body as the key `body`.
"""

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Any

from handlers.errors import RequestError, shown

TEXT_FIELDS = ("data", "text")
# Media types of bodies that are lines, which a codec takes apart
JSON_LINES = ("application/jsonlines", "application/x-jsonlines", "application/jsonl", "application/x-ndjson")
CSV = ("text/csv", "application/csv")

CHARSETS = frozenset(
    [
        *("ascii", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"),
        *("koi8-r", "koi8-u", "mac-roman", "shift_jis", "cp932", "euc_jp", "iso2022_jp", "gb2312", "gbk", "gb18030"),
        *("big5", "big5hkscs", "euc_kr", "cp949", "cp437", "cp850", "cp866", "cp874"),
        *(f"iso8859-{part}" for part in range(1, 17)),
        *(f"cp{page}" for page in range(1250, 1259)),
    ]
)

# UTF-32's mark is that of UTF-16 before a NUL: UTF-32 is read where it is declared
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class Call:
    """One request as the client sent it.

    Args:
        body: decoded JSON, or a text.
        route: the path behind the model's version, without slashes at its ends; empty for the model itself.
    """

    body: Any
    route: str = ""


class Headers(Mapping[str, Any]):
    """Request headers, whatever their case."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._values = {str(name).lower(): value for name, value in raw.items()}

    def __getitem__(self, name: str) -> Any:
        return self._values[name.lower()]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def content_type(self, field: str) -> tuple[str, str | None]:
        """Media type and declared charset of the form field or body `field`; ("", None) where nothing is said."""
        part = self._values.get(field.lower())
        whole = _parsed(self._values.get("content-type"))
        declared = _parsed(part.get("content-type") if isinstance(part, Mapping) else None) or whole
        if declared is None:
            return "", None
        # TorchServe hands a body's media type over without its parameters: the charset is in the request's own header
        charset = _charset(declared)
        if charset is None and field == "body" and whole is not None:
            charset = _charset(whole)
        return declared.get_content_type(), charset


def _charset(message: Message) -> str | None:
    try:
        return message.get_content_charset()
    except (ValueError, LookupError):
        raise RequestError("The content type's charset cannot be read.", code="unknown_charset") from None


def _parsed(content_type: Any) -> Message | None:
    if not content_type:
        return None
    message = Message()
    message["content-type"] = str(content_type)
    return message


def route_of(headers: Headers) -> str:
    """The path behind the model's version, without slashes at its ends; empty for the model itself."""
    return str(headers.get("url_path") or "").strip("/")


def media_type(headers: Headers) -> str:
    """The request's own media type; empty where it has none."""
    whole = _parsed(headers.get("content-type"))
    return whole.get_content_type() if whole is not None else ""


def accepted(headers: Headers) -> list[str]:
    """The media types of the Accept header, in its order."""
    return [kind.partition(";")[0].strip().lower() for kind in str(headers.get("accept") or "").split(",")]


def decode(row: Mapping[str, Any], headers: Headers, fields: Sequence[str] = ()) -> Call:
    """Find the body and the route of one request.

    Args:
        fields: of an instance of the task, which a form may hold too.

    Raises:
        RequestError: no body, undecodable bytes, malformed JSON, or a form that holds none of the known fields.
    """
    route = route_of(headers)
    if "body" in row:
        kind, charset = headers.content_type("body")
        return Call(_value(row["body"], kind, charset, "body"), route)
    return Call(_form(row, headers, fields), route)


def _form(row: Mapping[str, Any], headers: Headers, fields: Sequence[str]) -> Any:
    """A form's body: its text field or the task's fields, with its other fields as options."""
    found = [field for field in TEXT_FIELDS if field in row]
    if not found:
        if any(field in row for field in fields):
            return {
                name: _value(row[name], "text/plain", headers.content_type(name)[1], name)
                if name in fields
                else _option(row[name], headers, name)
                for name in row
            }
        as_form = not row and headers.content_type("")[0] == "application/x-www-form-urlencoded"
        if as_form or any(str(name).lstrip().startswith(("{", "[", '"')) for name in row):
            raise RequestError(
                "The body was sent as a form without the field text or data; for JSON, add the header "
                "'Content-Type: application/json'.",
                code="json_as_form",
            )
        if not row:
            raise RequestError("The request has no body.", code="empty_body")
        raise RequestError(f"The form has no field {' or '.join(TEXT_FIELDS)}.", code="missing_field", param="text")
    if len(found) > 1:
        raise RequestError("The form has both fields data and text; send one.", code="ambiguous_input", param="data")
    field = found[0]
    kind, charset = headers.content_type(field)
    if field == "text":
        kind = "text/plain"  # a field named text is a text even when it looks like JSON
    body = _value(row[field], kind, charset, field)
    options = {
        name: _value(row[name], "text/plain", headers.content_type(name)[1], name)
        if name in fields
        else _option(row[name], headers, name)
        for name in row
        if name != field
    }
    if not options:
        return body
    if not isinstance(body, dict):
        body = {"texts" if isinstance(body, list) else "text": body}
    return {**options, **body}


def _option(value: Any, headers: Headers, name: str) -> Any:
    """A form field that is an option: a JSON scalar where it reads as one, else a text."""
    if not isinstance(value, str | bytes | bytearray):
        return value  # a part of its own with a JSON type: TorchServe decoded it
    text = _value(value, "text/plain", headers.content_type(name)[1], name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _value(value: Any, kind: str, charset: str | None, field: str) -> Any:
    """The value of a body or field: JSON, or a text."""
    if isinstance(value, str) and kind.startswith("text/"):
        # TorchServe took it for UTF-8; that is undone when the client declared something else
        foreign = charset is not None and _codec(charset) != "utf-8"
        return _text(value.encode(), charset, field) if foreign else value.removeprefix("\ufeff")
    if not isinstance(value, bytes | bytearray):
        return value
    text = _text(bytes(value), charset, field)
    if kind.startswith("text/") or kind in JSON_LINES or kind in CSV:
        return text
    if not text:
        raise RequestError(f"The {field} is empty.", code="empty_body", param=None if field == "body" else field)
    return _json(text, field, strict=kind.endswith("json"))


def _json(text: str, field: str, *, strict: bool) -> Any:
    """JSON; where the client did not say that it is JSON, a text that cannot be meant as JSON is itself."""
    meant = strict or text.lstrip().startswith("{")
    try:
        value = json.loads(text)
    except RecursionError:
        raise RequestError("The JSON is nested too deeply.", code="malformed_json") from None
    except ValueError as error:
        if not meant:
            return text
        where = ""
        if isinstance(error, json.JSONDecodeError):  # else a number too long for Python's int
            where = f": {error.msg} at line {error.lineno}, column {error.colno}"
        hint = "" if strict else " To send it as a text, use the header 'Content-Type: text/plain'."
        raise RequestError(
            f"The {field} is not valid JSON{where}.{hint}",
            code="malformed_json",
            param=None if field == "body" else field,
        ) from None
    return value if meant or isinstance(value, str | list) else text


def _text(raw: bytes, charset: str | None, field: str) -> str:
    """Bytes → text: by byte order mark, else by the declared charset, else UTF-8."""
    declared = _codec(charset or "utf-8")
    marked = next((codec for mark, codec in _MARKS if raw.startswith(mark)), None)
    codec = declared if declared.startswith("utf-32") else marked or declared
    try:
        return raw.decode(codec)
    except (UnicodeError, ValueError):
        where = None if field == "body" else field
        name = (charset or codec).upper()
        raise RequestError(f"The {field} is not valid {shown(name)} text.", code="undecodable", param=where) from None


def _codec(charset: str) -> str:
    """Python's name of a charset that texts come in.

    Raises:
        RequestError: it is none of CHARSETS. Python knows many codecs more that are no charsets, and some that take
            quadratic time, such as punycode.
    """
    try:
        name = codecs.lookup(charset).name
    except (LookupError, ValueError):
        name = ""
    if name not in CHARSETS:
        raise RequestError(f"The charset {shown(charset)} is unknown.", code="unknown_charset")
    return name
