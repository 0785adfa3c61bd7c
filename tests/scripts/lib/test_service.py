"""The wire format is TorchServe's own: what its codec encodes must come back unchanged."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from ts.context import Context, RequestProcessor
from ts.protocol.otf_message_handler import create_predict_response

from scripts.lib import service
from scripts.lib.service import Answer, Body

ascii_text = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
answers = st.builds(
    Answer,
    st.sampled_from([200, 400, 404, 413, 507]),
    ascii_text,
    st.sampled_from(["application/json", "text/plain"]),
    st.dictionaries(ascii_text.map(lambda name: f"x-{name}"), ascii_text, max_size=3),
    st.binary(max_size=40),
)


@given(st.lists(answers, min_size=1, max_size=5))
def test_answers_are_decoded_as_torchserve_encodes_them(expected: list[Answer]) -> None:
    context = Context("m", ".", {}, 1, None, "0", None, None)
    context.request_processor = [RequestProcessor({}) for _ in expected]
    for i, answer in enumerate(expected):
        context.set_response_status(answer.status, answer.phrase, i)
        context.set_response_content_type(i, str(answer.content_type))
        for name, value in answer.headers.items():
            context.set_response_header(i, name, value)
    ids = {i: f"id-{i}" for i in range(len(expected))}
    wire = bytes(create_predict_response([a.body for a in expected], ids, "Prediction success", 200, context))
    found = [answer for _, answer in service.answers(wire)]
    assert [id for id, _ in service.answers(wire)] == list(ids.values())
    assert [(a.status, a.phrase, a.content_type, a.body) for a in found] == [
        (a.status, a.phrase, a.content_type, a.body) for a in expected
    ]
    for a, b in zip(found, expected, strict=True):
        assert {k: v for k, v in a.headers.items() if k != "content-type"} == b.headers


def test_a_failed_batch_is_every_requests_status() -> None:
    wire = bytes(create_predict_response(None, {0: "a", 1: "b"}, "Prediction failed", 503))
    assert [(a.status, a.body) for _, a in service.answers(wire)] == [(503, b"error")] * 2


def test_bodies_are_handed_over_as_torchserve_decodes_them() -> None:
    cases: list[tuple[Body, Any]] = [
        (Body(b'{"a": 1}', "application/json"), {"a": 1}),
        (Body(b"{", "application/json"), bytearray(b"{")),
        (Body(b"a", "text/plain; charset=latin-1"), "a"),
        (Body(b"\xe9", "text/plain"), bytearray(b"\xe9")),
        (Body(b"{}", "application/octet-stream"), bytearray(b"{}")),
    ]
    for body, value in cases:
        assert service._request([body])["parameters"][0]["value"] == value
