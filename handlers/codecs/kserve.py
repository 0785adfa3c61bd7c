"""KServe's two protocols: `instances` → `predictions` (v1, Vertex AI's too), and the Open Inference Protocol (v2)."""

from collections.abc import Mapping, Sequence
from typing import Any

from handlers.codecs.codec import Draft, ErrorText, as_list, as_object, ascii_json, with_parameters
from handlers.decoding import Call
from handlers.errors import RequestError, shown
from handlers.options import is_integer, json_type
from handlers.request import Request, Task, Usage, inside
from handlers.serialise import dumps

_INTEGERS = ("INT64", "INT32", "INT16", "INT8", "UINT64", "UINT32", "UINT16", "UINT8")
# numpy's name of a type → the protocol's
_DATATYPES = {
    "float32": "FP32", "float64": "FP64", "int8": "INT8", "uint8": "UINT8", "int32": "INT32", "int64": "INT64",
}  # fmt: skip


class V1(ErrorText):
    """`{"instances": […], "parameters": {…}}` → `{"predictions": […]}`."""

    def read(self, call: Call, task: Task) -> Draft:
        """A list of instances: texts or objects."""
        body = as_object(call, "instances")
        values = as_list(body.pop("instances"), "instances")
        return Draft(values, with_parameters(body), "instances", listed=True)

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """One prediction per instance."""
        return dumps({"predictions": list(results)})


class V2(ErrorText):
    """`{"id", "inputs": [{"name", "datatype", "shape", "data"}], "parameters"}` → `{"id", "outputs": […]}`.

    A tensor of BYTES holds texts. Several, named as the task's fields, hold those fields of each instance. One of
    integers, (texts, tokens) or (tokens,), holds token ids; an `attention_mask` of the same shape says which are
    padding. Results that are arrays leave as one tensor, all others as BYTES that hold JSON.
    """

    item_bytes = 64

    def echo(self, call: Call) -> Mapping[str, Any]:
        """The request's id."""
        identity = call.body.get("id") if isinstance(call.body, dict) else None
        return {"id": identity} if isinstance(identity, str) else {}

    def read(self, call: Call, task: Task) -> Draft:
        """The instances, put together from the tensors."""
        body = as_object(call, "inputs")
        if not isinstance(body.pop("id", ""), str):
            raise RequestError("'id' must be a string.", code="invalid_type", param="id")
        body.pop("outputs", None)  # which outputs are wanted: there is only one
        tensors = _named(as_list(body.pop("inputs"), "inputs"))
        values = _instances(tensors, task)
        return Draft(values, with_parameters(body), "inputs", listed=True)

    def write(self, request: Request, results: Sequence[Any], task: Task, model: str, usage: Usage) -> bytes:
        """One output tensor, named with the task's noun."""
        datatype = _DATATYPES.get(str(getattr(results[0], "dtype", "")))
        output: dict[str, Any] = {"name": task.nouns.one}
        if datatype is not None:
            data = [number for result in results for number in result.tolist()] if len(results) > 1 else results[0]
            output |= {"datatype": datatype, "shape": [len(results), len(results[0])], "data": data}
        else:
            texts = [result if isinstance(result, str) else dumps(result).decode() for result in results]
            output |= {"datatype": "BYTES", "shape": [len(results)], "data": texts}
        return dumps({"model_name": model, **request.echo, "outputs": [output]})

    def refuse(self, error: RequestError, echo: Mapping[str, Any]) -> bytes:
        """`error` is the message; the request's id goes back too."""
        return ascii_json({**self.complaint(error, echo), **echo})


def _named(inputs: list[Any]) -> dict[str, tuple[str, list[int], list[Any]]]:
    """Input tensors: name → datatype, shape, flat data."""
    tensors: dict[str, tuple[str, list[int], list[Any]]] = {}
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
        data = _flat(as_list(tensor.get("data"), f"{param}.data"), f"{param}.data")
        size = shape[0] * (shape[1] if len(shape) == 2 else 1)
        if len(data) != size:
            raise RequestError(
                f"{param}.data holds {len(data)} values; its shape says {size}.",
                code="invalid_value",
                param=f"{param}.data",
            )
        tensors[name] = (datatype, shape, data)
    return tensors


def _flat(data: list[Any], param: str) -> list[Any]:
    """Data in row-major order; a client may also send it nested."""
    if not any(isinstance(row, list) for row in data):
        return data
    return [value for i, row in enumerate(data) for value in as_list(row, inside(param, i))]


def _instances(tensors: dict[str, tuple[str, list[int], list[Any]]], task: Task) -> list[Any]:
    mask = tensors.pop("attention_mask", None)
    for unused in ("token_type_ids",):  # the handler numbers segments itself
        tensors.pop(unused, None)
    if len(tensors) == 1:
        datatype, shape, data = next(iter(tensors.values()))
        if datatype != "BYTES":
            return _token_ids(shape, data, mask)
        if len(shape) == 2 and shape[1] != 1:
            return [data[i : i + shape[1]] for i in range(0, len(data), shape[1])]
        return data
    unknown = [name for name in tensors if name not in task.fields]
    if unknown or not tensors:
        known = ", ".join(task.fields)
        raise RequestError(
            f"There is no input {shown(unknown[0]) if unknown else 'tensor'}; known are {known}.",
            code="unknown_field",
            param="inputs",
        )
    counts = {shape[0] for _, shape, _ in tensors.values()}
    if len(counts) > 1 or any(len(data) != shape[0] for _, shape, data in tensors.values()):
        raise RequestError(
            "The input tensors must have one value per instance each, and equally many.",
            code="invalid_value",
            param="inputs",
        )
    columns = {name: data for name, (_, _, data) in tensors.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(counts.pop())]


def _token_ids(shape: list[int], data: list[Any], mask: tuple[str, list[int], list[Any]] | None) -> list[Any]:
    """Rows of token ids, without what the mask calls padding."""
    if mask is not None and mask[1] != shape:
        raise RequestError("attention_mask and the ids differ in shape.", code="invalid_value", param="inputs")
    width = shape[-1]
    seen = mask[2] if mask is not None else [1] * len(data)
    rows = range(0, len(data), width)
    return [[token for token, one in zip(data[i : i + width], seen[i : i + width], strict=True) if one] for i in rows]
