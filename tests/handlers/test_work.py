import pytest

from handlers.errors import OutOfMemory, RequestError
from handlers.work import placed


@pytest.mark.parametrize(
    ("message", "param", "said", "named"),
    [
        ("the text is long.", "texts[3]", "texts[3]: the text is long.", "texts[3]"),
        ("the text is long.", "", "The text is long.", None),
        ("90 tokens are too many.", "text", "90 tokens are too many.", "text"),
        ("90 tokens are too many.", "", "90 tokens are too many.", None),
    ],
)
def test_an_error_names_its_text_where_it_has_a_name(message: str, param: str, said: str, named: str | None) -> None:
    found = placed(RequestError(message, code="too_long"), param)
    assert (found.message, found.param, found.code) == (said, named, "too_long")


def test_an_error_stays_of_its_kind() -> None:
    assert placed(OutOfMemory("the text does not fit."), "text").status == 507
