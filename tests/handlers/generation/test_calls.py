"""How templates write calls, rules that follow them, and the reader that finds calls in a growing text."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from handlers.generation import rules
from handlers.generation.call_reader import CallReader
from handlers.generation.calls import Format, NoCalls, find_format
from handlers.generation.grammar import Grammars
from handlers.generation.tools import Tool, Toolbox
from tests.generation_models import HERMES, LLAMA, TEMPLATE, write_tokenizer

MISTRAL = (
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ message.content }}"
    "[/INST]"
    "{% elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}"
    '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>'
    "{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
)
THINKING = HERMES.replace(
    "{{ message.content }}{%",
    "{% if message.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ message.content }}{%",
)
FORMATS = {
    "hermes": Format(
        "<tool_call>", '<tool_call>\n', '{"name": "', '", "arguments": ', "\n</tool_call>\n<tool_call>\n",
        "\n</tool_call>",
    ),
    "llama": Format("", "", '{"name": "', '", "parameters": ', None, ""),
    "mistral": Format("[TOOL_CALLS]", "[TOOL_CALLS] [", '{"name": "', '", "arguments": ', ", ", "]"),
}  # fmt: skip


def found(template: str) -> Format:
    def render(messages: Any, tools: Any, answer: bool) -> str:
        rendered: Any = render_jinja_template(
            [messages], tools=tools, chat_template=template, add_generation_prompt=answer
        )
        text: str = rendered[0][0]
        return text

    return find_format(render, ["</s>"])


@pytest.mark.parametrize(
    ("template", "name"), [(HERMES, "hermes"), (THINKING, "hermes"), (LLAMA, "llama"), (MISTRAL, "mistral")]
)
def test_a_template_shows_how_calls_are_written(template: str, name: str) -> None:
    assert found(template) == FORMATS[name]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (TEMPLATE, "no tools"),
        (HERMES[HERMES.index("{% for message") :], "no tools"),  # it knows calls, but no tools
        ("{{ tools | tojson }}{{ raise_exception('no') }}", "no tools"),
        (HERMES.replace('"name": "', '"function": "'), "not known"),
        (HERMES.replace("arguments | tojson", "arguments | tojson | tojson"), "not known"),  # JSON within a string
        (HERMES.replace('{"name": "', '{"id": 5, "name": "'), "not known"),
        (LLAMA.replace('{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}', "{{ call.name }}()"),
         "not known"),
        (LLAMA.replace('{"name": "{{', 'I call {"name": "{{'), "not known"),
    ],
)  # fmt: skip
def test_other_templates_are_told_apart(template: str, reason: str) -> None:
    with pytest.raises(NoCalls, match=reason):
        found(template)


def written(format: Format, *calls: tuple[str, str]) -> str:
    parts = [f"{format.before}{name}{format.after}{arguments}}}" for name, arguments in calls]
    return f"{format.opening}{(format.separator or '').join(parts)}{format.closing}"


CASES = [
    ("hermes", "", [("f", '{"a": "}\\"]{", "b": [{}]}'), ("g", "{}")]),
    ("hermes", "text <tool > < ", [("f", '{"a": {"b": "\\\\"}}')]),
    ("hermes", "only text <tool_call", []),
    ("mistral", "", [("f", '{"x": "[TOOL_CALLS]"}'), ("f", '{"x": ", "}')]),
    ("llama", "", [("f", '{"a": 1}')]),
    ("llama", 'x {"name": "f", "parameters": {}}', []),
    ("llama", "", []),
]


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 200)))
@settings(deadline=None)
def test_calls_are_read_wherever_a_text_is_cut(case: Any, cuts: list[int]) -> None:
    name, text, calls = case
    whole = text + (written(FORMATS[name], *calls) if calls else "")
    reader = CallReader(FORMATS[name])
    places = sorted({0, *(cut for cut in cuts if cut < len(whole)), len(whole)})
    shown, pieces = "", []
    for begin, end in pairwise(places):
        more, new = reader.add(whole[begin:end])
        shown, pieces = shown + more, pieces + new
    more, new = reader.rest()
    shown, pieces = shown + more, pieces + new
    assert shown == text
    assert [piece.name for piece in pieces if piece.name is not None] == [name for name, _ in calls]
    arguments = ["".join(piece.arguments for piece in pieces if piece.index == i) for i in range(len(calls))]
    assert arguments == [arguments for _, arguments in calls]
    assert reader.complete == bool(calls)


CITY = Tool("city", None, {"type": "object", "$defs": {"c": {"enum": ["Oslo"]}}, "required": ["c"],
                           "properties": {"c": {"$ref": "#/$defs/c"}}, "additionalProperties": False})  # fmt: skip
NONE = Tool("none", None, {"type": "object", "properties": {}, "additionalProperties": False})
GOOD, WRONG, EMPTY = ("city", '{"c": "Oslo"}'), ("city", '{"c": "Rome"}'), ("none", "{}")


@pytest.fixture(scope="module", params=[(), ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")], ids=["texts", "tokens"])
def grammars(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    vocabulary = write_tokenizer(directory, marks=request.param)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    made = Grammars(tokenizer, vocabulary, [2])
    yield made, tokenizer
    made.stop()


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_rules_allow_calls_of_the_format_alone(grammars: Any, name: str, forced: bool, parallel: bool) -> None:
    compiler, tokenizer = grammars
    format = FORMATS[name]
    toolbox = Toolbox((CITY, NONE), (CITY, NONE), forced, parallel)
    tokens = format.tokens(tokenizer.added_tokens_encoder)
    grammar = compiler.compile(rules.calls(format, toolbox, tokens, [2]))

    def fits(text: str) -> bool:
        """Whether a text may be written, and may end there."""
        constraint = grammar.constraint()
        for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], 2]:
            if not int.from_bytes(constraint.allowed() or b"", "little") >> token & 1:
                return False
            constraint.add(token)
        return constraint.failure is None

    assert fits(written(format, GOOD))
    assert fits(written(format, EMPTY))
    assert not fits(written(format, WRONG))
    assert not fits(written(format, ("other", "{}")))
    assert not fits(written(format, GOOD)[:-1])
    assert fits(written(format, GOOD, EMPTY)) == (parallel and format.separator is not None)
    assert fits("hello world") == fits("") == fits("é < {") == (not forced)
    if format.mark:
        assert fits("hello " + written(format, GOOD)) == (not forced)
        assert not fits("hello " + written(format, WRONG))
    else:
        assert fits("hello " + written(format, WRONG)) == (not forced)  # text, as it begins with none


def test_rules_survive_what_a_schema_says_of_itself(grammars: Any) -> None:
    compiler, _ = grammars
    rule = rules.json_answer({"type": "object", "x-guidance": {"lenient": True}, "not": {}})
    with pytest.raises(Exception, match="Unimplemented"):
        compiler.compile(rule)
    assert compiler.compile(rules.json_answer({"title": '"\n%ignore /x/\nstart: "', "enum": [1]}))


def test_a_tokenizer_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no end"):
        Grammars(tokenizer, 400, [])
    with pytest.raises(ValueError, match="fast"):
        Grammars(object(), 400, [2])
