"""What --fix changes, and what it leaves alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.lib.diagnosis.diagnose import diagnose
from scripts.lib.diagnosis.repair import repair
from scripts.lib.diagnosis.settings import served
from scripts.lib.errors import UserError
from tests.scripts.lib.diagnosis.deployments import BASE, ENTRY, MODELS, deployment, stored

MULTI = 'models={\\\n  "m": {\\\n    "1.0": {\\\n      "batchSize": 8\\\n    }\\\n  }\\\n}\n# end\n'


def repaired(text: str, *archives: object) -> tuple[str, list[str]]:
    done, changes = repair(deployment(text, *archives))  # type: ignore[arg-type]
    assert done.file is not None
    again, nothing = repair(done)
    assert nothing == []
    assert again.file is not None
    assert again.file.text == done.file.text
    return done.file.text, changes


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("jobQueueSize=5\n", "job_queue_size=5\n"),
        ("max-request-size : 5\n", "max_request_size : 5\n"),
        ("# c\r\nnumber_of_gpu=1 \t\r\n", "# c\r\nnumber_of_gpu=1\r\n"),
        ("load_models=m=m.mar, n = m.mar\n", "load_models=m=m.mar,n=m.mar\n"),
        ('models={"m":{"1":{"batchSize":8}}}\n', 'models={"m":{"1.0":{"batchSize":8}}}\n'),
        ('load_models=ALL\nmodels={"M":{"1.0":{"x":1}}}', 'load_models=ALL\nmodels={"m":{"1.0":{"x":1}}}'),
        ('models={"m.mar":{"1.0":{}}}', 'models={"m":{"1.0":{}}}'),
        ('models={"m":{"1.0":{"batch_size":8}}}\n', 'models={"m":{"1.0":{"batchSize":8}}}\n'),
        ('models={"m":{"1.0":{"maxBatchDelay":0}}}\n', 'models={"m":{"1.0":{"maxBatchDelay":1}}}\n'),
        (MULTI.replace("1.0", "1"), MULTI),
        (MULTI.replace('"batchSize"', '"BatchSize"'), MULTI),
        (
            'models={\n# c\n "m": {"1.0": {"batchSize": 8}}\\ \n}\n\n# end\na=1',
            '# c\nmodels={ \\\n "m": {"1.0": {"batchSize": 8}} \\\n}\n\n# end\na=1',
        ),
        (
            "# c\nload_models=m=m.mar\nbatch_size = 8\n",
            '# c\nload_models=m=m.mar\nmodels={"m":{"1.0":{"batchSize":8}}}\n'
            "# (TorchServe ignores it here: see models) batch_size = 8\n",
        ),
        (
            "load_models=all\ninitial_workers=2",
            'load_models=all\nmodels={"m":{"1.0":{"minWorkers":2,"maxWorkers":2}}}\n'
            "# (TorchServe ignores it here: see models) initial_workers=2\n",
        ),
        (
            'load_models=m=m.mar\nmax_batch_delay=0\nmodels={"m":{"1":{}}}\n',
            "load_models=m=m.mar\n# (TorchServe ignores it here: see models) max_batch_delay=0\n"
            'models={"m":{"1.0":{"maxBatchDelay":1}}}\n',
        ),
    ],
)
def test_certain(before: str, after: str) -> None:
    text, changes = repaired(before)
    assert text == after
    assert changes


@pytest.mark.parametrize(
    "text",
    [
        BASE + MODELS,
        "disable_token_authorization=true \n",  # would open the server
        "enableModelApi=true\n",
        "job_queue_size=1\njobQueueSize=5\n",
        "load_models=m=m.mar, gone.mar\n",
        f'models={{"m":{{"2.0":{ENTRY}}}}}\n',
        f'models={{"other":{{"1.0":{ENTRY}}}}}\n',
        'models={"m":{"1.0":{"batch_size":8,"batchSize":9}}}\n',
        'models={"m":{"1":{},"1.0":{}}}\n',
        "models={'m':{'1':{}}}\n",  # TorchServe reads it, and a rewriting might lose something
        'models={"m":{"1":{}}}\nmodels={"m":{"1":{}}}\n',
        "batch_size=8\n",  # what is loaded is not known
        "load_models=m=m.mar\nbatch_size=many\n",
        f"{BASE}batch_size=9\n{MODELS}",  # two values: which was meant?
        "load_models=m=m.mar,gone.mar\nbatch_size=8\n",
        "number_of_gpu=one\n",
    ],
)
def test_uncertain(text: str) -> None:
    assert repaired(text) == (text, [])


def test_a_setting_of_the_archive_is_not_contradicted() -> None:
    text = "load_models=m=m.mar\nbatch_size=8\n"
    assert repaired(text, stored(config={"batchSize": 4})) == (text, [])


def test_what_was_repaired_takes_effect() -> None:
    text = f"{BASE}batch_size=16\nmax_batch_delay=5\nmin_workers=1\nmax_workers=1\n"
    done, changes = repair(deployment(text))
    assert len(changes) == 4
    assert diagnose(done) == []
    (model,) = served(done)
    assert (model.count("batchSize"), model.count("maxBatchDelay"), model.count("maxWorkers")) == (16, 5, 1)


lines = st.sampled_from(
    ["batch_size=8", "# c", "", "models={", '"m":{"1":{"batch_size":8}}', "}", "}\\", "load_models=m=m.mar", "a=\\",
     "load_models= m.mar", 'models={"m":{"1":{}}}', "jobQueueSize=1 ", "maxWorkers=2", 'models={"\\\\u00e9":{}}\\ ']
)  # fmt: skip


@given(st.lists(lines, max_size=8), st.sampled_from(["\n", "\r\n", "\r"]))
def test_comments_stay_and_a_second_time_changes_nothing(chosen: list[str], end: str) -> None:
    text = end.join(chosen)
    try:
        done, _ = repaired(text)
    except UserError:
        return
    assert done.count("# c") >= (text.count("# c") if "\\" not in text else 0)
