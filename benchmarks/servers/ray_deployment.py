"""MiniLM in Ray Serve, batched by `@serve.batch`; encode runs in a thread, so that requests come in meanwhile."""

import argparse
import asyncio
import os
from typing import Any

import orjson
import ray
import torch
from ray import serve
from sentence_transformers import SentenceTransformer
from starlette.requests import Request
from starlette.responses import Response

# Its default of 5 requests a replica would never let a batch fill.
MAX_ONGOING_REQUESTS = 1000
OBJECT_STORE_BYTES = 100_000_000


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    for number in ("port", "workers", "threads", "batch-size", "delay-ms"):
        parser.add_argument(f"--{number}", type=int, required=True)
    options = parser.parse_args()

    @serve.deployment(
        num_replicas=options.workers,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": options.threads},
        logging_config={"enable_access_log": False},
    )
    class Embedder:
        def __init__(self) -> None:
            torch.set_num_threads(options.threads)
            self._model = SentenceTransformer(options.model, device="cpu")

        def _run(self, texts: list[str]) -> list[Any]:
            return list(self._model.encode(texts, batch_size=options.batch_size, show_progress_bar=False))

        @serve.batch(max_batch_size=options.batch_size, batch_wait_timeout_s=options.delay_ms / 1e3)
        async def _encode(self, texts: list[str]) -> list[Any]:
            return await asyncio.to_thread(self._run, texts)

        async def __call__(self, request: Request) -> Response:
            vector: Any = await self._encode((await request.json())["text"])
            content = orjson.dumps({"embedding": vector}, option=orjson.OPT_SERIALIZE_NUMPY)
            return Response(content, media_type="application/json")

    ray.init(
        num_cpus=options.workers * options.threads,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        _temp_dir=os.environ["TMPDIR"],
    )
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    deployment: Any = Embedder
    serve.run(deployment.bind(), route_prefix="/predict", blocking=True)


if __name__ == "__main__":
    main()
