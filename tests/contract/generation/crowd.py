"""Many requests at once, of which some are bad and some leave, for either engine."""

import random

from tests.contract.frontend import COMPLETIONS, GREEDY, Frontend, text_of
from tests.generation_models import Oracle, prompts


def mixed_requests_a_third_of_which_leave(frontend: Frontend, oracle: Oracle) -> None:
    """Sixty that come one after the other: those who stay get what they would have got alone, and nothing is kept."""
    chosen = random.Random(0)
    expected: dict[str, tuple[str, int]] = {}
    bad, leaving = [], []
    for prompt, count in prompts(60, seed=3):
        kind = chosen.random()
        body = {"prompt": prompt, "max_tokens": count, **GREEDY}
        if kind < 0.34:
            long = {"stream": kind < 0.17, "max_tokens": 60, "ignore_eos": True}
            leaving.append(frontend.send({**body, **long}, COMPLETIONS))
        elif kind < 0.44:
            bad.append(frontend.send({**body, "temperature": -1}, COMPLETIONS))
        else:
            expected[frontend.send({**body, "stream": kind < 0.7}, COMPLETIONS)] = prompt, count
        if chosen.random() < 0.3:
            frontend.call()
        if leaving and chosen.random() < 0.3:
            frontend.leave(leaving.pop(chosen.randrange(len(leaving))))
    for id in leaving:
        frontend.leave(id)
    frontend.run(240)
    assert all(frontend.answers[id].status == 400 for id in bad)
    texts: dict[tuple[str, int], str] = {}
    for id, asked in expected.items():
        if asked not in texts:
            texts[asked] = oracle.text(*asked)
        assert text_of(frontend.answers[id]) == texts[asked], asked
    assert frontend.at_rest(), frontend.handler.engine.stats()
    assert not frontend.handler._exchanges
