"""A handler's source, read for the faults that only show with batches. Parsed, never imported.

What cannot be told from the text alone is left unsaid: a row list that is handed whole to another function may well
be gone through there.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_ENTRIES = ("handle", "preprocess", "inference", "postprocess")
#: Look at a list without going through it.
_LOOKS = frozenset({"len", "print", "isinstance", "type", "str", "repr", "bool", "debug", "info", "warning", "error"})
_GOES_THROUGH = frozenset({"enumerate", "zip", "map", "list", "tuple", "sorted", "reversed", "iter", "filter"})
#: Raise on a client's bad input.
_PARSERS = frozenset(
    {"loads", "decode", "b64decode", "float", "int", "open", "literal_eval", "frombuffer", "fromstring", "imread"}
)
_TENSOR_MODULES = frozenset({"torch", "F", "np", "numpy"})
_TENSOR_METHODS = frozenset({"detach", "cpu", "cuda", "numpy", "argmax", "softmax", "sigmoid", "squeeze", "unsqueeze"})
#: Of torch and numpy, but no array.
_NO_ARRAYS = frozenset({"device", "no_grad", "inference_mode", "load", "is_tensor", "save", "item", "tolist"})
_TENSOR_FIELDS = frozenset({"logits", "last_hidden_state", "pooler_output", "hidden_states", "embeddings"})
#: Turn an array into plain values.
_PLAIN = frozenset({"tolist", "item", "dumps", "decode", "tobytes", "float", "int", "str", "bool", "len", "encode"})


@dataclass(frozen=True)
class HandlerSource:
    """What a handler's text shows; a fault is the line where it is, None where there is none.

    Args:
        module: the file.
        first_row: only the first row of a batch is looked at.
        fails_together: rows are parsed in one loop with nothing that keeps one row's error from the others.
        tensors: arrays are returned instead of plain values or bytes.
        pads: every text is padded to the model's longest.
        error: why the text is no Python, "" when it is.
        strings: the string constants in it, by which it may read configuration.
    """

    module: str
    first_row: int | None = None
    fails_together: int | None = None
    tensors: int | None = None
    pads: int | None = None
    error: str = ""
    strings: frozenset[str] = frozenset()


def examine(text: str | bytes, module: str, function: str = "handle") -> HandlerSource:
    """Look for the classic faults.

    Args:
        text: the module's source.
        module: its name, for people.
        function: the module-level function that TorchServe calls, if it is there.
    """
    try:
        tree = ast.parse(text)
        return _examine(tree, module, function)
    except SyntaxError as error:
        return HandlerSource(module, error=f"line {error.lineno}: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:
        return HandlerSource(module, error=str(error) or type(error).__name__)


def _examine(tree: ast.Module, module: str, function: str) -> HandlerSource:
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    entries = [functions[name] for name in dict.fromkeys((*_ENTRIES, function)) if name in functions]
    return HandlerSource(
        module,
        first_row=next((line for entry in entries if (line := _first_row(entry)) is not None), None),
        fails_together=_fails_together(tree, entries, functions),
        tensors=next((line for entry in _answering(entries) if (line := _returned_array(entry)) is not None), None),
        pads=next((node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and _pads(node)), None),
        strings=frozenset(
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ),
    )


def _rows(function: ast.FunctionDef) -> str | None:
    """The name of the parameter that holds the batch."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    names = [name for name in names if name not in ("self", "cls")]
    return names[0] if names else None


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _called(node: ast.Call) -> str:
    """The last part of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _first_row(function: ast.FunctionDef) -> int | None:
    rows = _rows(function)
    if rows is None:
        return None
    lines: list[int] = []
    seen: set[ast.expr] = set()  # mentions of the batch that take its first row, or only look at it
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and _is_name(node.value, rows) and _is_zero(node.slice):
            lines.append(node.lineno)
            seen.add(node.value)
        elif isinstance(node, ast.Call) and _called(node) in _LOOKS:
            seen.update(node.args)
        elif isinstance(node, ast.Compare):
            seen.update((node.left, *node.comparators))
        elif isinstance(node, ast.BoolOp):
            seen.update(node.values)
        elif isinstance(node, ast.If | ast.IfExp | ast.Assert):
            seen.add(node.test)
        elif isinstance(node, ast.UnaryOp):
            seen.add(node.operand)
        elif isinstance(node, ast.FormattedValue):
            seen.add(node.value)
    if not lines:
        return None
    assignments = (node for node in ast.walk(function) if isinstance(node, ast.Assign))
    replaced = min((node.lineno for node in assignments if _rebinds(node, rows)), default=None)
    for node in ast.walk(function):
        # A batch that is gone through, handed on, returned: its other rows may well be answered.
        if not isinstance(node, ast.Name) or node.id != rows or not isinstance(node.ctx, ast.Load) or node in seen:
            continue
        if replaced is None or node.lineno <= replaced:
            return None
    return min(lines)


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0 and not isinstance(node.value, bool)


def _rebinds(node: ast.Assign, rows: str) -> bool:
    """Whether it is `rows = rows[0] …`: from there on the name is no batch."""
    return any(_is_name(target, rows) for target in node.targets) and any(
        isinstance(part, ast.Subscript) and _is_name(part.value, rows) and _is_zero(part.slice)
        for part in ast.walk(node.value)
    )


def _counts(iterated: ast.expr, rows: str) -> bool:
    """Whether it is `range(len(rows))`."""
    return any(
        isinstance(node, ast.Call) and _called(node) == "len" and any(_is_name(a, rows) for a in node.args)
        for node in ast.walk(iterated)
    )


def _fails_together(
    tree: ast.Module, entries: list[ast.FunctionDef], functions: dict[str, ast.FunctionDef]
) -> int | None:
    if any(isinstance(node, ast.Call) and _called(node) == "set_response_status" for node in ast.walk(tree)):
        return None  # rows have statuses of their own
    for entry in entries:
        if entry.name == "postprocess" or (rows := _rows(entry)) is None:
            continue
        for node in ast.walk(entry):
            line = _row_raises(node, rows, functions)
            if line is not None:
                return line
    return None


def _row_raises(node: ast.AST, rows: str, functions: dict[str, ast.FunctionDef]) -> int | None:
    """The line in a loop over the rows that raises on a bad row."""
    if isinstance(node, ast.For) and _goes_through(node.iter, rows):
        return _raises(node.body, functions)
    if isinstance(node, ast.ListComp | ast.GeneratorExp) and _goes_through(node.generators[0].iter, rows):
        return _raises([node.elt], functions)
    return None


def _goes_through(iterated: ast.expr, rows: str) -> bool:
    if isinstance(iterated, ast.Call) and _called(iterated) in _GOES_THROUGH:
        return any(_is_name(argument, rows) for argument in iterated.args)
    return _is_name(iterated, rows) or (
        isinstance(iterated, ast.Call) and _called(iterated) == "range" and _counts(iterated, rows)
    )


def _raises(body: list[ast.stmt] | list[ast.expr], functions: dict[str, ast.FunctionDef]) -> int | None:
    nodes = [node for part in body for node in ast.walk(part)]
    if any(isinstance(node, ast.Try) for node in nodes):
        return None
    for node in nodes:
        if isinstance(node, ast.Raise):
            return node.lineno
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_text(node.slice):
            return node.lineno
        if isinstance(node, ast.Call):
            helper = functions.get(_called(node))
            if helper is not None and helper.name not in _ENTRIES:
                if _own_try(helper):
                    return None
                if _raises(helper.body, {}) is not None:
                    return node.lineno
            elif _called(node) in _PARSERS:
                return node.lineno
    return None


def _own_try(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Try) for node in ast.walk(function))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _answering(entries: list[ast.FunctionDef]) -> list[ast.FunctionDef]:
    """The functions whose values leave: `postprocess`, and `handle` where it is written out."""
    return [entry for entry in entries if entry.name not in ("preprocess", "inference")]


def _returned_array(function: ast.FunctionDef) -> int | None:
    arrays: set[str] = set()
    for node in _in_order(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    (arrays.add if _is_array(node.value, arrays) else arrays.discard)(target.id)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name) and _is_array(node.iter, arrays):
            arrays.add(node.target.id)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _called(node.value) == "append":
            call = node.value
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            if isinstance(owner, ast.Name) and call.args and _holds_array(call.args[0], arrays):
                arrays.add(owner.id)
        elif isinstance(node, ast.Return) and node.value is not None and _holds_array(node.value, arrays):
            return node.lineno
    return None


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Everything in a function as it stands, functions inside it left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        yield child
        yield from _in_order(child)


def _is_array(node: ast.expr, arrays: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in arrays
    if isinstance(node, ast.Attribute):
        return node.attr in _TENSOR_FIELDS
    if isinstance(node, ast.Subscript):
        return _is_array(node.value, arrays)
    if isinstance(node, ast.BinOp):
        return _is_array(node.left, arrays) or _is_array(node.right, arrays)
    if not isinstance(node, ast.Call):
        return False
    name = _called(node)
    if name in _PLAIN or name in _NO_ARRAYS:
        return False
    if not isinstance(node.func, ast.Attribute):
        return False
    return name in _TENSOR_METHODS or _root(node.func) in _TENSOR_MODULES or _is_array(node.func.value, arrays)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _holds_array(node: ast.expr, arrays: set[str]) -> bool:
    """Whether a value is an array, or a list or dict with one in it."""
    if isinstance(node, ast.List | ast.Tuple):
        return any(_holds_array(element, arrays) for element in node.elts)
    if isinstance(node, ast.Dict):
        return any(_holds_array(value, arrays) for value in node.values)
    if isinstance(node, ast.ListComp):
        generator = node.generators[0]
        inner = set(arrays)
        if isinstance(generator.target, ast.Name) and _is_array(generator.iter, arrays):
            inner.add(generator.target.id)
        return _holds_array(node.elt, inner)
    if isinstance(node, ast.Call) and _called(node) == "list" and node.args:
        return _is_array(node.args[0], arrays)
    return _is_array(node, arrays)


def _pads(call: ast.Call) -> bool:
    for keyword in call.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if (keyword.arg == "padding" and value == "max_length") or (
            keyword.arg == "pad_to_max_length" and value is True
        ):
            return True
    return False
