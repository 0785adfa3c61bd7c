"""What a request may ask of `generate`."""

from typing import Any

import pytest

from handlers.decoding_options import MAX_BEAMS, OPTIONS, Decoding, chosen, defaults
from handlers.errors import RequestError


def test_defaults_are_those_of_generate() -> None:
    assert defaults({}, 512) == Decoding(max_length=21)
    assert defaults({"max_length": 142, "min_length": 56, "num_beams": 4, "eos_token_id": 2}, 512) == Decoding(
        max_length=142, min_length=56, num_beams=4
    )
    assert defaults({"max_new_tokens": 10, "min_new_tokens": 3, "max_length": 99}, 512) == Decoding(11, 4)
    assert defaults({"max_length": None, "top_k": None}, 512) == Decoding(21)
    assert defaults({"max_length": 900}, 512).max_length == 513


def test_what_is_asked_for_replaces_what_the_model_does() -> None:
    default = Decoding(max_length=64, min_length=5, num_beams=4)
    asked = chosen({"max_new_tokens": 30, "num_beams": 2, "length_penalty": 2.0, "truncate": True}, default, 100)
    assert asked == Decoding(31, 5, 2, length_penalty=2.0)
    assert chosen({"max_length": 101, "min_length": 7}, default, 100) == Decoding(101, 7, 4)
    assert chosen({"max_new_tokens": 2}, default, 100) == Decoding(3, 5, 4), "generate ends there, too"
    sampled = chosen({"do_sample": True, "seed": 3, "top_p": 0.5}, Decoding(), 100)
    assert sampled == Decoding(do_sample=True, seed=3, top_p=0.5)


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"max_new_tokens": 101}, "max_new_tokens", "invalid_value"),
        ({"max_length": 102}, "max_length", "invalid_value"),
        ({"max_new_tokens": 9, "max_length": 9}, "max_length", "ambiguous_input"),
        ({"min_new_tokens": 9, "min_length": 9}, "min_length", "ambiguous_input"),
        ({"min_new_tokens": 21}, "min_new_tokens", "invalid_value"),
        ({"min_length": 22}, "min_length", "invalid_value"),
        ({"max_new_tokens": 5, "min_new_tokens": 6}, "min_new_tokens", "invalid_value"),
        ({"temperature": 0.5}, "temperature", "no_effect"),
        ({"seed": 1, "do_sample": False}, "seed", "no_effect"),
        ({"length_penalty": 1.0}, "length_penalty", "no_effect"),
        ({"early_stopping": True, "num_beams": 1}, "early_stopping", "no_effect"),
    ],
)
def test_what_makes_no_sense_together(options: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        chosen(options, Decoding(), 100)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("max_length", 1),
        ("min_new_tokens", -1),
        ("num_beams", MAX_BEAMS + 1),
        ("num_beams", "4"),
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("length_penalty", float("nan")),
        ("repetition_penalty", 0),
        ("no_repeat_ngram_size", -1),
        ("do_sample", "yes"),
        ("temperature", 0),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("seed", -1),
        ("seed", 1 << 63),
    ],
)
def test_absurd_values(name: str, value: Any) -> None:
    with pytest.raises(RequestError):
        OPTIONS[name](value)


def test_generate_is_told_everything_that_a_request_may_set() -> None:
    """Else a default of the model's would hold where a request asked for something else."""
    beams = Decoding(num_beams=2, do_sample=True, seed=1, apart=1).settings()
    assert beams.keys() == (OPTIONS.keys() - {"seed"}) | {"num_return_sequences"}
    assert "temperature" not in Decoding().settings()
