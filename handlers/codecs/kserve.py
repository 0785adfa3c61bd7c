"""KServe's two protocols: `instances` → `predictions` (v1, Vertex AI's too), and the Open Inference Protocol (v2)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from handlers.codecs.codec import Draft, ErrorText, as_list, as_object, ascii_json, limited, with_parameters
from handlers.decoding import Call
from handlers.errors import RequestError, shown
from handlers.options import is_integer, json_type, string
from handlers.request import Request, Task, Usage, inside
from handlers.serialise import dumps

_INTEGERS = ("INT64", "INT32", "INT16", "INT8", "UINT64", "UINT32", "UINT16", "UINT8")
# numpy's name of a type → the protocol's
_DATATYPES = {
    "float32": "FP32", "float64": "FP64", "int8": "INT8", "uint8": "UINT8", "int32": "INT32", "int64": "INT64",
}  # fmt: skip
LONGEST_ID = 256  # bytes: it goes back, also with an error, and what is sent must stay within TorchServe's limit


class V1(ErrorText):
    """`{"instances": […], "parameters": {…}}` → `{"predictions": […]}`."""

    def read(self, call: Call, task: Task) -> Draft:
        """A list of instances, texts or objects; KServe takes it under `inputs` too."""
        body = as_object(call)
        name = "inputs" if "inputs" in body and "instances" not in body else "instances"
        body = as_object(call, name)
        values = as_list(body.pop(name), name)
        return Draft(values, with_parameters(body), name, listed=True)

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """One prediction per instance."""
        return dumps({"predictions": list(results)})


class _Tensor(NamedTuple):
    """An input tensor, its data in row-major order."""

    datatype: str
    shape: list[int]
    data: list[Any]


class V2(ErrorText):
    """`{"id", "inputs": [{"name", "datatype", "shape", "data"}], "parameters"}` → `{"id", "outputs": […]}`.

    A tensor of BYTES holds texts. Several, named as the task's fields, hold those fields of each instance. One of
    integers, (texts, tokens) or (tokens,), holds token ids; an `attention_mask` of the same shape says which are
    padding. Results that are arrays leave as one tensor, all others as BYTES that hold JSON. Errors name a tensor
    `inputs[0]`, an instance `data[0]`.
    """

    item_bytes = 64
    growth = 2.0  # quotes and backslashes of JSON inside a string

    def echo(self, call: Call) -> Mapping[str, Any]:
        """The request's id, if it is one."""
        identity = call.body.get("id") if isinstance(call.body, dict) else None
        return {"id": identity} if _is_id(identity) else {}

    def read(self, call: Call, task: Task) -> Draft:
        """The instances, put together from the tensors."""
        body = as_object(call, "inputs")
        identity = body.pop("id", None)
        if identity is not None and not _is_id(identity):
            raise RequestError(
                f"'id' must be a string of at most {LONGEST_ID} bytes.", code="invalid_value", param="id"
            )
        _check_outputs(body.pop("outputs", None), task)
        values = _instances(_named(as_list(body.pop("inputs"), "inputs")), task)
        return Draft(values, with_parameters(body), "data", listed=True)

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """One output tensor, named with the task's noun."""
        kinds = {(str(getattr(result, "dtype", "")), getattr(result, "shape", ())) for result in results}
        kind, shape = kinds.pop()
        output: dict[str, Any] = {"name": task.nouns.one}
        if not kinds and kind in _DATATYPES:
            data = np.concatenate([result.reshape(-1) for result in results])
            output |= {"datatype": _DATATYPES[kind], "shape": [len(results), *shape], "data": data}
        else:
            texts = [result if isinstance(result, str) else dumps(result).decode() for result in results]
            output |= {"datatype": "BYTES", "shape": [len(results)], "data": texts}
        return dumps({"model_name": model, **request.echo, "outputs": [output]})

    def refuse(self, error: RequestError, echo: Mapping[str, Any]) -> bytes:
        """`error` is the message; the request's id goes back too."""
        return ascii_json({**self.complaint(error, echo), **echo})


def _is_id(value: Any) -> bool:
    if not isinstance(value, str) or len(value) > LONGEST_ID:
        return False
    try:
        return len(string(value).encode()) <= LONGEST_ID
    except RequestError:
        return False


def _check_outputs(outputs: Any, task: Task) -> None:
    """Whether the outputs that are asked for are there: there is one."""
    if outputs is None:
        return
    for i, output in enumerate(as_list(outputs, "outputs")):
        name = output.get("name") if isinstance(output, dict) else None
        if name != task.nouns.one:
            raise RequestError(
                f"outputs[{i}] names no output; there is {task.nouns.one!r}.",
                code="unknown_output",
                param=f"outputs[{i}]",
            )


def _named(inputs: list[Any]) -> dict[str, _Tensor]:
    """Input tensors by name."""
    tensors: dict[str, _Tensor] = {}
    for i, tensor in enumerate(inputs):
        param = inside("inputs", i)
        if not isinstance(tensor, dict):
            raise RequestError(
                f"{param} is {json_type(tensor)}; it must be a tensor.", code="invalid_type", param=param
            )
        name, datatype, shape = tensor.get("name"), tensor.get("datatype"), tensor.get("shape")
        if not isinstance(name, str):
            raise RequestError(f"{param}.name must be a string.", code="invalid_type", param=f"{param}.name")
        if name in tensors:
            raise RequestError(f"There are two inputs {shown(name)}.", code="ambiguous_input", param=f"{param}.name")
        if datatype not in ("BYTES", *_INTEGERS):
            raise RequestError(
                f"{param}.datatype must be BYTES or an integer type.", code="invalid_value", param=f"{param}.datatype"
            )
        if (
            not isinstance(shape, list)
            or not 1 <= len(shape) <= 2
            or not all(is_integer(size) and size >= 1 for size in shape)
        ):
            raise RequestError(
                f"{param}.shape must be one or two sizes from 1.", code="invalid_value", param=f"{param}.shape"
            )
        _check_content_type(tensor.get("parameters"), f"{param}.parameters")
        data = _flat(as_list(tensor.get("data"), f"{param}.data"), f"{param}.data")
        size = shape[0] * (shape[1] if len(shape) == 2 else 1)
        if len(data) != size:
            said = size if size < 1 << 62 else "more"
            raise RequestError(
                f"{param}.data holds {len(data)} values; its shape says {said}.",
                code="invalid_value",
                param=f"{param}.data",
            )
        tensors[name] = _Tensor(datatype, shape, data)
    return tensors


def _check_content_type(parameters: Any, param: str) -> None:
    """MLServer's clients say here how data is to be read: as it is, or as base64 or a data frame."""
    kind = parameters.get("content_type") if isinstance(parameters, dict) else None
    if kind not in (None, "str", "np"):
        raise RequestError(f"{param}.content_type must be 'str' or 'np'.", code="invalid_value", param=param)


def _flat(data: list[Any], param: str) -> list[Any]:
    """Data in row-major order; a client may also send it nested."""
    if not any(isinstance(row, list) for row in data):
        return data
    return [value for i, row in enumerate(data) for value in as_list(row, inside(param, i))]


def _instances(tensors: dict[str, _Tensor], task: Task) -> list[Any]:
    mask = tensors.pop("attention_mask", None)
    tensors.pop("token_type_ids", None)  # the handler numbers segments itself
    for tensor in tensors.values():
        limited(tensor.shape[0] if tensor.datatype == "BYTES" or len(tensor.shape) == 2 else 1, "data", task)
    if len(tensors) == 1:
        tensor = next(iter(tensors.values()))
        if tensor.datatype != "BYTES":
            return _token_ids(tensor, mask)
        width = tensor.shape[-1] if len(tensor.shape) == 2 else 1
        return _rows(tensor.data, width) if width > 1 else tensor.data
    unknown = [name for name in tensors if name not in task.fields]
    if unknown or not tensors:
        known = ", ".join(task.fields)
        raise RequestError(
            f"There is no input {shown(unknown[0]) if unknown else 'tensor'}; known are {known}.",
            code="unknown_field",
            param="inputs",
        )
    counts = {tensor.shape[0] for tensor in tensors.values()}
    if len(counts) > 1 or any(len(tensor.data) != tensor.shape[0] for tensor in tensors.values()):
        raise RequestError(
            "The input tensors must have one value per instance each, and equally many.",
            code="invalid_value",
            param="inputs",
        )
    return [{name: tensor.data[i] for name, tensor in tensors.items()} for i in range(counts.pop())]


def _rows(data: list[Any], width: int) -> list[list[Any]]:
    return [data[i : i + width] for i in range(0, len(data), width)]


def _token_ids(tensor: _Tensor, mask: _Tensor | None) -> list[Any]:
    """Rows of token ids, without what the mask calls padding."""
    width = tensor.shape[-1]
    if mask is None:
        return _rows(tensor.data, width)
    if mask.shape != tensor.shape or not all(is_integer(one) and one in (0, 1) for one in mask.data):
        raise RequestError(
            "attention_mask must hold 0 or 1 for every id, in the same shape.", code="invalid_value", param="inputs"
        )
    pairs = zip(_rows(tensor.data, width), _rows(mask.data, width), strict=True)
    return [[token for token, one in zip(tokens, seen, strict=True) if one] for tokens, seen in pairs]
