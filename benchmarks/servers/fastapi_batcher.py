"""MiniLM in FastAPI with a dynamic batcher of asyncio's own means; encode runs in a thread, a batch at a time."""

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer


class Batcher:
    """Collects texts until a batch is full or its first text has waited long enough.

    Args:
        encode: texts → vectors, in order; it blocks.
        size: texts of a batch at most.
        delay_s: how long the first text of a batch waits for others.
    """

    def __init__(self, encode: Callable[[list[str]], Any], size: int, delay_s: float) -> None:
        self._encode = encode
        self._size = size
        self._delay_s = delay_s
        self._queue: asyncio.Queue[tuple[str, asyncio.Future[Any]]] = asyncio.Queue()

    async def ask(self, text: str) -> Any:
        """The vector of a text."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((text, future))
        return await future

    async def run(self) -> None:
        """Run batches, one at a time, until cancelled."""
        while True:
            batch = await self._collect()
            try:
                vectors = await asyncio.to_thread(self._encode, [text for text, _ in batch])
            except Exception as failure:  # noqa: BLE001 - whatever it is, those who wait must hear it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(failure)
                continue
            for (_, future), vector in zip(batch, vectors, strict=True):
                if not future.done():
                    future.set_result(vector)

    async def _collect(self) -> list[tuple[str, asyncio.Future[Any]]]:
        batch = [await self._queue.get()]
        deadline = asyncio.get_running_loop().time() + self._delay_s
        while len(batch) < self._size:
            try:
                batch.append(self._queue.get_nowait())
                continue
            except asyncio.QueueEmpty:
                pass
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                break
            try:
                batch.append(await asyncio.wait_for(self._queue.get(), left))
            except TimeoutError:
                break
        return batch


class Request(BaseModel):
    """A request about one text."""

    text: str


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    for number in ("port", "batch-size", "delay-ms"):
        parser.add_argument(f"--{number}", type=int, required=True)
    options = parser.parse_args()
    model = SentenceTransformer(options.model, device="cpu")
    batcher = Batcher(
        lambda texts: model.encode(texts, batch_size=options.batch_size, show_progress_bar=False),
        options.batch_size,
        options.delay_ms / 1e3,
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        vector = await batcher.ask(request.text)
        content = orjson.dumps({"embedding": vector}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(content, media_type="application/json")

    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
