"""Who is measured: commands that can start, requests in each one's shape, and versions that can be installed."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.environments import CONSTRAINTS, pins
from benchmarks.lineup import PEERS, SERVERS, Peer, interleaved


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_option_of_a_command_is_one_that_its_script_reads(peer: Peer) -> None:
    if peer.script is None:
        return
    _, script, *options = peer.command(Path("python"), Path("/model"), 8000, 2)
    source = (SERVERS / peer.script).read_text(encoding="utf-8")
    named = {option.partition("=")[0].removeprefix("--") for option in options}
    assert Path(script) == SERVERS / peer.script
    assert {"model", "port", "batch-size", "delay-ms"} <= named
    assert all(f'"{name}"' in source or f'"--{name}"' in source for name in named)
    assert all(f"options.{name.replace('-', '_')}" in source for name in named)


def test_names_are_unique_and_peers_of_an_environment_have_the_same_requirements() -> None:
    assert max(Counter(peer.name for peer in PEERS).values()) == 1
    made = {(peer.environment, peer.requirements, peer.torch_only) for peer in PEERS}
    assert len(made) == len({environment for environment, *_ in made})


def test_the_machines_threads_are_shared_out() -> None:
    for peer in PEERS:
        for cores in (1, 2, 5):
            assert peer.workers(cores) == (cores if peer.per_core else 1)
            assert peer.workers(cores) * peer.threads(cores) == cores


def test_requests_and_answers_of_each_shape() -> None:
    plain, openai = (next(peer for peer in PEERS if peer.openai is kind) for kind in (False, True))
    assert plain.body("a") == {"text": "a"}
    assert openai.body("a")["input"] == "a"
    assert plain.vector({"embedding": [1.0]}) == openai.vector({"data": [{"embedding": [1.0]}]}) == [1.0]


def test_each_server_has_one_turn_a_round_and_nobody_is_always_first() -> None:
    rounds = interleaved(["a", "b", "c"], 4)
    assert rounds == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_torch_is_pinned_to_the_build_that_is_here() -> None:
    text = "numpy==2.0\ntorch==2.13.0\ntorchserve==0.12.0\n"
    assert pins(text, "2.13.0+cpu", torch_only=False) == "numpy==2.0\ntorchserve==0.12.0\ntorch==2.13.0+cpu\n"
    assert pins(text, "2.13.0+cpu", torch_only=True) == "torch==2.13.0+cpu\n"
    assert pins(CONSTRAINTS.read_text(encoding="utf-8"), "1", torch_only=False).splitlines().count("torch==1") == 1


def test_the_command_names_a_peer_that_it_does_not_know() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", "--peers", "nobody"],
        cwd=SERVERS.parents[1],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 1
    assert "--peers nobody: not known" in told.stderr
