"""The classic faults of handlers, and what looks like them and is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.diagnosis.handler_source import HandlerSource, examine


def look(body: str) -> HandlerSource:
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    return examine(f"class Handler(BaseHandler):\n{lines}\n", "handler.py")


@pytest.mark.parametrize(
    "body",
    [
        "def preprocess(self, data):\n    return self.tokenizer(data[0].get('body'))",
        "def preprocess(self, requests):\n    requests = requests[0]\n    return self.tokenizer(requests['body'])",
        "def handle(self, data, context):\n    if data is None or not data:\n        return None\n"
        "    print(len(data))\n    return [self.model(data[0]['body'])]",
        "def preprocess(self, data):\n    for item in data[0]['instances']:\n        self.add(item)",
    ],
)
def test_only_the_first_row(body: str) -> None:
    assert look(body).first_row is not None


@pytest.mark.parametrize(
    "body",
    [
        "def preprocess(self, data):\n    first = data[0]\n    return [row.get('body') for row in data]",
        "def preprocess(self, data):\n    if data[0]: pass\n    return [data[i] for i in range(len(data))]",
        "def preprocess(self, data):\n    kind = data[0]\n    return self.parse_all(data)",
        "def handle(self, data, context):\n    return [data[0], data[1]]",
        "def handle(self, data, context):\n    kind = data[0]\n    return data",
        "def initialize(self, context):\n    self.x = context[0]",
        "def preprocess(self, data):\n    first = data[0]\n    rows = data\n    return [row for row in rows]",
    ],
)
def test_all_rows(body: str) -> None:
    assert look(body).first_row is None


@pytest.mark.parametrize(
    "body",
    [
        "def preprocess(self, data):\n    for row in data:\n        text = json.loads(row.get('body'))",
        "def preprocess(self, data):\n    return [row['body'] for row in data]",
        "def preprocess(self, data):\n    for i, row in enumerate(data):\n        raise ValueError(i)",
        "def preprocess(self, data):\n    return [self.one(row) for row in data]\n"
        "def one(self, row):\n    return row['body'].decode()",
        "def handle(self, data, context):\n    try:\n        for row in data:\n            x = float(row.get('body'))\n"
        "    except ValueError:\n        return None",
    ],
)
def test_one_fails_all(body: str) -> None:
    assert look(body).fails_together is not None


@pytest.mark.parametrize(
    "body",
    [
        "def preprocess(self, data):\n    for row in data:\n        try:\n            text = json.loads(row)\n"
        "        except ValueError:\n            text = None",
        "def preprocess(self, data):\n    return [row.get('body') for row in data]",
        "def preprocess(self, data):\n    return [self.one(row) for row in data]\n"
        "def one(self, row):\n    try:\n        return row['body']\n    except KeyError:\n        return None",
        "def handle(self, data, context):\n    for i, row in enumerate(data):\n        text = json.loads(row['body'])\n"
        "    context.set_response_status(400, 'Bad Request', i)",
    ],
)
def test_rows_on_their_own(body: str) -> None:
    assert look(body).fails_together is None


@pytest.mark.parametrize(
    "body",
    [
        "def postprocess(self, data):\n    return torch.softmax(data, 1)",
        "def postprocess(self, data):\n    return list(data.logits)",
        "def postprocess(self, data):\n    out = data.detach().cpu()\n    return [row for row in out]",
        "def postprocess(self, data):\n    out = []\n    for row in data.logits:\n        out.append([row[0]])\n"
        "    return out",
        "def handle(self, data, context):\n    return [{'score': np.mean(data)}]",
    ],
)
def test_arrays_returned(body: str) -> None:
    assert look(body).tensors is not None


@pytest.mark.parametrize(
    "body",
    [
        "def postprocess(self, data):\n    return torch.softmax(data, 1).tolist()",
        "def postprocess(self, data):\n    return [float(row) for row in data.logits]",
        "def postprocess(self, data):\n    return [json.dumps(row) for row in data.logits]",
        "def inference(self, data):\n    return self.model(data).logits",
        "def postprocess(self, data):\n    data = data.cpu()\n    data = data.tolist()\n    return data",
    ],
)
def test_plain_values_returned(body: str) -> None:
    assert look(body).tensors is None


@pytest.mark.parametrize(
    ("body", "pads"),
    [
        ("def preprocess(self, data):\n    return self.tokenizer(data, padding='max_length')", True),
        ("def preprocess(self, data):\n    return self.tokenizer(data, pad_to_max_length=True)", True),
        ("def preprocess(self, data):\n    return self.tokenizer(data, padding=True, max_length=512)", False),
        ("def preprocess(self, data):\n    return self.tokenizer(data, padding='longest')", False),
    ],
)
def test_padding(body: str, pads: bool) -> None:
    assert (look(body).pads is not None) is pads


def test_a_function_that_the_manifest_names() -> None:
    text = "def entry(data, context):\n    return [data[0]]\n"
    assert examine(text, "handler.py", "entry").first_row == 2
    assert examine(text, "handler.py").first_row is None


def test_what_is_no_python() -> None:
    assert examine("def f(:\n", "handler.py").error.startswith("line 1")
    assert examine(b"\x00", "handler.py").error
    assert examine("(" * 5000, "handler.py").error


@given(st.binary(max_size=60) | st.text(st.sampled_from("def handle(data):\n [0]return for in x.=,'"), max_size=60))
def test_no_source_breaks_it(text: bytes | str) -> None:
    assert isinstance(examine(text, "handler.py"), HandlerSource)
