"""A peer's process: waited for until it answers, gone afterwards; what it said when it does not come up."""

import sys
from pathlib import Path

import pytest
import requests

from benchmarks.lineup import Peer
from benchmarks.process import Process
from scripts.lib.errors import UserError

# Not ready at the first question, then it says its threads; it has a child.
SERVER = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    asked = 0

    def do_POST(self):
        Handler.asked += 1
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(503 if Handler.asked == 1 else 200)
        self.end_headers()
        self.wfile.write(os.environ["OMP_NUM_THREADS"].encode())

subprocess.Popen(["sleep", "600"])
port = next(int(each.partition("=")[2]) for each in sys.argv if each.startswith("--port="))
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def process(directory: Path, source: str) -> Process:
    (directory / "server.py").write_text(source)
    peer = Peer("tiny", "tiny", (), (), "as it comes", str(directory / "server.py"))
    return Process(peer, Path(sys.executable), directory, directory, 3, directory / "output")


def test_a_peer_answers_inside_and_is_gone_after(tmp_path: Path) -> None:
    with process(tmp_path, SERVER) as running:
        answer = requests.post(running.url, json={"text": "x"}, timeout=30)
        assert (answer.status_code, answer.text) == (200, "3")
        listed = running.processes()
        assert len(listed) == 2
    assert not any(each.is_running() for each in listed)
    assert running.processes() == []


def test_a_peer_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"did not start: .*no such model") as caught,
        process(tmp_path, "raise SystemExit('no such model')"),
    ):
        pytest.fail("it is not there")
    assert str(tmp_path / "output") in caught.value.hint
