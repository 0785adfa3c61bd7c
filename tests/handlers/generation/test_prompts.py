"""What a client sends into a chat template is checked before, and what the template raises is the client's to know."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from handlers.errors import RequestError
from handlers.generation import parameters, tools
from handlers.generation.engine import Sampling
from handlers.generation.messages import messages
from handlers.generation.prompts import Prompts
from handlers.generation.requests import Generation
from tests.generation_models import write_tokenizer

SURROGATE: Any = {"properties": {"x": {"enum": ["a \ud800"]}}}


def test_a_lone_surrogate_is_named_wherever_it_is() -> None:
    function = {"name": "f", "arguments": '{"x": "\\ud800"}'}
    call = {"type": "function", "function": function}
    with pytest.raises(RequestError) as caught:
        messages([{"role": "assistant", "tool_calls": [call]}])
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"
    with pytest.raises(RequestError) as caught:
        tools.tools([{"type": "function", "function": {"name": "f", "parameters": SURROGATE}}])
    assert caught.value.param == "tools[0].function.parameters"
    with pytest.raises(RequestError) as caught:
        parameters.schema({"properties": {"\udfff": {}}}, "response_format")
    assert caught.value.code == "invalid_text"
    assert parameters.schema({"enum": ["\U0001f999"]}, "response_format")


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content + 1 }}", "{{ messages[0].content | int / 0 }}", "{{ raise_exception('no') }}"],
)
def test_whatever_a_template_raises_is_a_refusal(tmp_path: Path, template: str) -> None:
    LlamaConfig(vocab_size=write_tokenizer(tmp_path, template=template), eos_token_id=2).save_pretrained(tmp_path)
    generation = Generation("chat", "messages", Sampling(), messages=({"role": "user", "content": "secret"},))
    with pytest.raises(RequestError) as caught:
        Prompts(tmp_path, 64).encode(generation)
    assert (caught.value.code, caught.value.param) == ("template_refused", "messages")
    assert "secret" not in caught.value.message
