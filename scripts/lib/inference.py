"""TorchServe's inference API: send a request, ask whether the server lives."""

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import requests

from scripts.lib.bounded import Answer, TooLarge, ask
from scripts.lib.errors import UserError
from scripts.lib.refusals import token_rejected

DEFAULT_URL = "http://127.0.0.1:8080"
#: A request that any of our handlers answers; of a model that generates text one token is asked.
PROBE = b'{"text": "ready?"}'
PROBE_ONE_TOKEN = b'{"text": "ready?", "max_tokens": 1}'


class InferenceClient:
    """Calls one server's inference API over a kept connection. Not for several threads at once.

    A status is a result, not an error (but for `ask`); what raises UserError is a server that cannot be reached or does
    not answer. As a context manager it closes its connection.

    Args:
        url: where it listens, without a path.
        token: the inference key; None when the server uses no tokens.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, url: str = DEFAULT_URL, token: str | None = None, timeout: float = 120.0) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy, no .netrc: the header below is all there is
        if token:
            self._session.headers["Authorization"] = f"Bearer {token}"

    def predict(
        self,
        name: str,
        body: bytes,
        content_type: str = "application/json",
        path: str = "",
        version: str | None = None,
    ) -> Answer:
        """One request to a model.

        Args:
            name, version: the model; without a version the default one answers.
            body: sent as it is.
            path: what follows the version in the URL, such as v1/embeddings; it needs a version.

        Raises:
            UserError: a path without a version, which TorchServe would take for one; or no answer.
        """
        if path and version is None:
            raise UserError(f"the path {path} needs a version: TorchServe takes what follows the name for one")
        url = f"{self.url}/predictions/{quote(name, safe='')}"
        if version is not None:
            url += f"/{quote(version, safe='')}"
        if path:
            url += "/" + path.strip("/")
        return self._send("POST", url, body, {"Content-Type": content_type})

    def ask(self, name: str, body: Mapping[str, Any]) -> Any:
        """Send JSON to a model's default version; its decoded answer.

        Raises:
            UserError: no answer, or another one than 200 with JSON.
        """
        answer = self.predict(name, json.dumps(body).encode())
        if answer.status != 200:
            said = answer.body.decode("utf-8", "replace").strip()[:300]
            raise UserError(f"{name} at {self.url} answers a request with {answer.status}: {said}")
        try:
            return json.loads(answer.body)
        except ValueError:
            raise UserError(f"{name} at {self.url} answers a request with something else than JSON") from None

    def ping(self) -> bool:
        """Whether the frontend says Healthy. It says so for a while when every worker is dead: see `probe`."""
        return self._send("GET", f"{self.url}/ping").status == 200

    def probe(self, name: str, body: bytes = PROBE, version: str | None = None) -> bool:
        """Whether a worker answers: any answer of the handler counts, also that it refuses this body (4xx).

        Raises:
            UserError: the token is missing or wrong; or no answer.
        """
        answer = self.predict(name, body, version=version)
        if token_rejected(answer.status, answer.body):
            raise UserError(
                f"{self.url}: missing or wrong token (TorchServe answers 400, not 401)",
                hint="get one with: batchserve token inference",
            )
        # 404: no such model; 503: no worker, a full queue, or a handler that fails.
        return answer.status < 500 and answer.status != 404

    def close(self) -> None:
        """Close the connection."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, method: str, url: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        try:
            return ask(self._session, method, url, self.timeout, data=body, headers=headers)
        except requests.Timeout:
            raise UserError(f"{self.url} did not answer within {self.timeout:g} s") from None
        except TooLarge as error:
            raise UserError(f"{self.url}: {error}") from None
        except requests.RequestException as error:
            raise UserError(
                f"no answer from {self.url}: {error}", hint="is it running there? try: batchserve status"
            ) from None
