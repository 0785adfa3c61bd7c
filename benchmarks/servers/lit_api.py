"""MiniLM in LitServe, batched by its own means."""

import argparse
from typing import Any

import litserve
import orjson
from fastapi import Response
from sentence_transformers import SentenceTransformer

TIMEOUT_S = 120  # its default of 30 would fail requests that wait their turn, which no other server here does


class Embedder(litserve.LitAPI):
    """One text a request: `{"text": …}` → `{"embedding": […]}`.

    Args:
        model: the model's directory.
        max_batch_size, batch_timeout: as LitServe has them; the timeout in seconds.
    """

    def __init__(self, model: str, max_batch_size: int, batch_timeout: float) -> None:
        super().__init__(max_batch_size=max_batch_size, batch_timeout=batch_timeout)
        self._directory, self._size = model, max_batch_size

    def setup(self, device: str) -> None:
        """Load the model, once in each worker."""
        self._model = SentenceTransformer(self._directory, device=device)

    def decode_request(self, request: dict[str, str]) -> str:
        """The text of a request."""
        return request["text"]

    def batch(self, inputs: list[str]) -> list[str]:
        """Texts need no stacking."""
        return inputs

    def predict(self, x: list[str]) -> Any:
        """Vectors (batch × hidden)."""
        return self._model.encode(x, batch_size=self._size, show_progress_bar=False)

    def unbatch(self, output: Any) -> list[Any]:
        """A vector a request."""
        return list(output)

    def encode_response(self, output: Any) -> Response:
        """JSON by orjson: FastAPI's own way with a dict of floats is slower."""
        content = orjson.dumps({"embedding": output}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(content, media_type="application/json")


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    for number in ("port", "workers", "batch-size", "delay-ms"):
        parser.add_argument(f"--{number}", type=int, required=True)
    options = parser.parse_args()
    api = Embedder(options.model, options.batch_size, options.delay_ms / 1e3)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=options.workers, timeout=TIMEOUT_S)
    server.run(
        host="127.0.0.1",
        port=options.port,
        num_api_servers=1,
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )


if __name__ == "__main__":
    main()
