"""An HTTP server that answers as it is told, for what a client makes of refusals and of strangers."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = tuple[int, bytes]


@contextmanager
def serve(answer: Callable[[str, str], Reply]) -> Iterator[str]:
    """A server that answers (method, path) with a status and a body; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            status, body = answer(self.command, self.path)
            with suppress(BrokenPipeError):  # the client gave up
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = _reply  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def refusal(code: int, kind: str, message: str) -> Reply:
    """How TorchServe refuses."""
    return code, json.dumps({"code": code, "type": kind, "message": message}).encode()
