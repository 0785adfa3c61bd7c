"""Hypothesis strategies that several tests share."""

import json
from typing import Any

from hypothesis import strategies as st

# Any text a JSON body can carry: no lone surrogates, everything else
texts = st.text(st.characters(codec="utf-8"), max_size=40)

lengths = st.lists(st.integers(1, 300), max_size=80)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def as_json(value: Any) -> bytes:
    """A body as a client's JSON library writes it."""
    return json.dumps(value).encode()


good_bodies = st.one_of(
    texts.map(lambda text: {"text": text}),
    st.lists(texts, min_size=1, max_size=4).map(lambda many: {"texts": many}),
    st.lists(texts, min_size=1, max_size=4).map(lambda many: {"inputs": many}),
    texts.map(lambda text: {"inputs": text}),
    st.lists(texts, min_size=1, max_size=3).map(lambda many: {"instances": many}),
    st.lists(texts, min_size=1, max_size=3).map(lambda many: {"input": many}).filter(lambda b: "" not in b["input"]),
    st.lists(texts, min_size=1, max_size=3),
    texts,
)

bad_bodies = st.one_of(
    st.just({"texts": []}),
    st.just({"text": None}),
    st.just({"texts": ["fine", 3]}),
    st.just({"text": "a", "texts": ["b"]}),
    st.just({"text": "\ud800"}),
    st.just({"text": "a", "normalise": True}),
    st.just({"text": "a", "dimensions": 0}),
    st.just({"text": "a", "dimensions": 100_000}),
    st.just({"text": "a", "prompt_name": "nowhere"}),
    st.just({"text": "the cat " * 200, "truncate": False}),
    st.just({"input": [""]}),
    st.just({"input": [1, 10**9]}),
    st.just({}),
    st.just(None),
    st.just(7),
    st.just(True),
)
