"""Calls of functions: offered through the chat template, constrained to schemas, answered as OpenAI answers them."""

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from scripts.lib.service import Body
from tests.contract.frontend import CHAT, GREEDY, Frontend, text_of
from tests.contract.generation.conftest import Start
from tests.generation_models import HERMES, LLAMA, Oracle, tiny_llama

MARKS = ("<tool_call>", "</tool_call>")
CITIES = {"$defs": {"city": {"enum": ["Oslo", "Rome"]}}, "properties": {"city": {"$ref": "#/$defs/city"}}}
WEATHER = {
    "name": "get_weather", "description": "The weather.",
    "parameters": {"type": "object", **CITIES, "required": ["city"], "additionalProperties": False},
}  # fmt: skip
CLOCK = {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS: Any = [{"type": "function", "function": function} for function in (WEATHER, CLOCK)]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
MESSAGES: Any = [{"role": "user", "content": "the red house"}]


class Served:
    """A model that knows tools, behind the unmodified OpenAI client."""

    def __init__(self, frontend: Frontend, directory: Path) -> None:
        self.frontend = frontend
        self.oracle = Oracle(directory)
        transport = httpx.MockTransport(self._answer)
        self.client = openai.OpenAI(
            base_url="http://test/v1", api_key="x", max_retries=0, http_client=httpx.Client(transport=transport)
        )
        self.create: Any = self.client.chat.completions.create

    def _answer(self, request: httpx.Request) -> httpx.Response:
        id = self.frontend.send(Body(request.content, headers={"url_path": CHAT}))
        self.frontend.run()
        answer = self.frontend.answers[id]
        return httpx.Response(answer.status, content=answer.body, headers={"content-type": answer.content_type})


@pytest.fixture(scope="module", params=["special", "text"])
def hermes(request: pytest.FixtureRequest, start: Start, tmp_path_factory: pytest.TempPathFactory) -> Served:
    marks = MARKS if request.param == "special" else ()
    directory = tiny_llama(tmp_path_factory.mktemp("models") / "hermes", template=HERMES, marks=marks, positions=1024)
    return Served(start(directory, num_blocks=128), directory)


@pytest.fixture(scope="module")
def llama(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = tiny_llama(tmp_path_factory.mktemp("models") / "llama", template=LLAMA, positions=1024)
    return Served(start(directory, num_blocks=128), directory)


def checked(choice: Any) -> list[str]:
    """The names of an answer's calls, their arguments looked at; a random model may call until the context is full."""
    calls = choice.message.tool_calls[: None if choice.finish_reason == "tool_calls" else -1]
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert call.type == "function"
        assert len(call.id) == 9
        if call.function.name == "get_weather":
            assert arguments["city"] in ("Oslo", "Rome")
        else:
            assert arguments == {}
    return [call.function.name for call in calls]


def test_a_call_is_forced(hermes: Served) -> None:
    for seed in range(3):
        options = {
            "model": "m",
            "messages": MESSAGES,
            "tools": TOOLS,
            "seed": seed,
            "temperature": 1.5,
            "max_tokens": 300,
        }
        one = hermes.create(**options, tool_choice=NAMED).choices[0]
        assert checked(one) == ["get_weather"]
        assert one.finish_reason == "tool_calls"
        assert one.message.content is None
        assert set(checked(hermes.create(**options, tool_choice="required").choices[0])) <= {"get_weather", "get_time"}
        single = hermes.create(**options, tool_choice="required", parallel_tool_calls=False, n=2)
        assert [len(checked(choice)) for choice in single.choices] == [1, 1]
    assert hermes.frontend.at_rest()


def test_a_stream_brings_the_same_calls_in_pieces(hermes: Served) -> None:
    options = {
        "model": "m",
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 300,
        **GREEDY,
    }
    choice = hermes.create(**options).choices[0]
    whole = choice.message.tool_calls
    assert whole
    calls: dict[int, list[str]] = {}
    ids = []
    finish = None
    for event in hermes.create(**options, stream=True):
        delta_of = event.choices[0].delta
        assert not delta_of.content
        finish = event.choices[0].finish_reason
        for delta in delta_of.tool_calls or []:
            if delta.id is not None:
                ids.append(delta.id)
                calls[delta.index] = [delta.function.name, ""]
            calls[delta.index][1] += delta.function.arguments
    assert finish == choice.finish_reason
    assert len(set(ids)) == len(ids) == len(whole)
    assert [calls[i] for i in sorted(calls)] == [[call.function.name, call.function.arguments] for call in whole]


def test_auto_is_the_models_own_text_until_a_call_begins(hermes: Served) -> None:
    ids = hermes.oracle.tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, add_generation_prompt=True)["input_ids"]
    options = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 25, **GREEDY}
    text = hermes.create(**options).choices[0]
    assert text.message.tool_calls is None
    made = hermes.oracle.ids(ids, 25)
    assert hermes.oracle.text(ids, 25) == text.message.content
    assert text.finish_reason == ("stop" if made[-1] == 2 else "length")


@pytest.mark.parametrize("hermes", ["special"], indirect=True)  # a bias cannot spell the mark as a text
def test_auto_calls_where_the_model_begins_one(hermes: Served) -> None:
    begin = hermes.oracle.tokenizer("<tool_call>", add_special_tokens=False)["input_ids"]
    options = {"model": "m", "messages": MESSAGES, "tools": TOOLS, **GREEDY}
    called = hermes.create(**options, logit_bias={str(begin[0]): 100}, parallel_tool_calls=False).choices[0]
    assert called.finish_reason == "tool_calls"
    assert len(checked(called)) == 1


def test_without_a_mark_a_text_that_begins_as_a_call_is_one(llama: Served) -> None:
    brace = llama.oracle.tokenizer("{", add_special_tokens=False)["input_ids"]
    options = {"model": "m", "messages": MESSAGES, "tools": TOOLS, **GREEDY}
    called = llama.create(**options, logit_bias={str(brace[0]): 100}, max_tokens=60).choices[0]
    assert called.message.tool_calls[0].function.name in ("get_weather", "get_time")
    text = llama.create(**options, logit_bias={str(brace[0]): -100}, max_tokens=20).choices[0]
    assert text.message.tool_calls is None
    ids = llama.oracle.tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, add_generation_prompt=True)["input_ids"]
    assert text.message.content == llama.oracle.text(ids, 20, sequence_bias=[[[brace[0]], -100.0]])
    one = llama.create(**options, tool_choice="required").choices[0]
    assert len(checked(one)) == 1


def test_a_cut_call_is_told_as_far_as_it_goes(hermes: Served) -> None:
    options = {"model": "m", "messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED, **GREEDY}
    ids = hermes.oracle.tokenizer('\n<tool_call>\n{"name": "get_weather", "arguments": {"c')["input_ids"]
    cut = hermes.create(**options, max_tokens=len(ids)).choices[0]
    assert cut.finish_reason == "length"
    assert cut.message.tool_calls[0].function.arguments.startswith('{"c')


def test_a_conversation_with_calls_reaches_the_template(hermes: Served, llama: Served) -> None:
    call = {"id": "123456789", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "123456789", "content": "rain"},
    ]
    seen = [dict(message) for message in messages]
    function = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    seen[1] |= {"content": "", "tool_calls": [{**call, "function": function}]}
    for served in (hermes, llama):
        # what a template gets of a tool is what it is told, without `strict`
        tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
        for told in (TOOLS[:1], None):
            ids = served.oracle.tokenizer.apply_chat_template(seen, tools=told, add_generation_prompt=True)["input_ids"]
            given = {"tools": tools, "tool_choice": "auto" if told else "none"}
            answer = served.create(model="m", messages=messages, max_tokens=8, **given, **GREEDY)
            assert answer.usage.prompt_tokens == len(ids)
            assert answer.choices[0].message.content == served.oracle.text(ids, 8)


TOOL = TOOLS[0]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
     "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": {"not": {}}}}}}]},
     "tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tools"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos"),
    ({"functions": [WEATHER]}, "functions"),
]  # fmt: skip
for calls, param in {
    "x": "tool_calls",
    ((),): "tool_calls[0]",
}.items():
    BAD.append(({"messages": [{"role": "assistant", "tool_calls": calls}]}, f"messages[0].{param}"))
BAD += [
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": {
        "name": "a", "arguments": arguments}}]}]}, "messages[0].tool_calls[0].function.arguments")
    for arguments in ("[]", "{", {"a": 1}, "[" * 100_000)
]  # fmt: skip


def test_what_is_wrong_is_named(hermes: Served) -> None:
    answers = hermes.frontend.ask(*({"messages": MESSAGES, **body} for body, _ in BAD), route=CHAT)
    for answer, (body, param) in zip(answers, BAD, strict=True):
        assert answer.status == 400, body
        assert answer.json()["error"]["param"] == param, (body, answer.body)


def test_a_template_without_tools_says_so(frontend: Frontend, start: Start, tmp_path: Path) -> None:
    tagged = HERMES.replace('{"name": "{{ call.function.name }}", "arguments":', "<function={{ call.function.name }}>")
    other = start(tiny_llama(tmp_path / "other", template=tagged))
    call = {"type": "function", "function": {"name": "a", "arguments": "{}"}}
    bodies = (
        {"messages": MESSAGES, "tools": TOOLS},
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]},
    )
    for served, reason in ((frontend, "has no tools"), (other, "not known here")):
        for answer, param in zip(served.ask(*bodies, route=CHAT), ("tools", "messages"), strict=True):
            assert answer.status == 400
            assert answer.json()["error"]["param"] == param
            assert reason in answer.json()["error"]["message"]
        unused = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none", "max_tokens": 3}
        assert text_of(served.ask(unused, route=CHAT)[0])
        assert served.handler.card()["tools"] is False
