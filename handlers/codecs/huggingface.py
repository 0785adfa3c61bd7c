"""Hugging Face's inference style: `inputs` and `parameters`, and the pipelines' values as they are."""

from collections.abc import Sequence
from typing import Any

from handlers.codecs.codec import Draft, ErrorText, as_list, as_object, singly, with_parameters
from handlers.decoding import Call
from handlers.errors import RequestError
from handlers.options import json_type
from handlers.request import Request, Task, Usage


class HuggingFace(ErrorText):
    """`{"inputs": … or […], "parameters": {…}}` → what the pipeline of that name returns."""

    def read(self, call: Call, task: Task) -> Draft:
        """One input or a list of them; the clients' `options` about caches and queues have no meaning here."""
        body = as_object(call, "inputs")
        inputs = body.pop("inputs")
        if "options" not in task.options and isinstance(body.get("options"), dict):
            del body["options"]
        rest = with_parameters(body)
        if isinstance(inputs, list):
            return Draft(as_list(inputs, "inputs"), rest, "inputs", listed=True)
        if isinstance(inputs, str) or (isinstance(inputs, dict) and len(task.fields) > 1):
            return Draft([inputs], rest, "inputs")
        wanted = "a string or a list" if len(task.fields) == 1 else "a string, an object or a list"
        raise RequestError(
            f"'inputs' is {json_type(inputs)}; it must be {wanted}.", code="invalid_type", param="inputs"
        )

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """The values, in a list unless the task's clients expect the value of a single input bare."""
        return singly([task.pipeline_value(request, result) for result in results], request, task)
