"""`batchserve demo`: the whole path once, from the bundled model to batched answers. scripts/quickstart.sh runs it."""

import math
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.build import build
from scripts.configure import DEFAULT_OUTPUT, configure
from scripts.lib import deployment, properties
from scripts.lib.addresses import check_ports
from scripts.lib.benchmark import cosine, measure_window
from scripts.lib.chat import stream_chat
from scripts.lib.console import console, progress
from scripts.lib.errors import UserError
from scripts.lib.inference import InferenceClient
from scripts.lib.interrupts import stop_on_signals
from scripts.lib.load import Target, run
from scripts.lib.scrape import BatchingWindow
from scripts.lib.server import StartError, TorchServe
from scripts.lib.serving import DEFAULT_SERVING, ServedModel, Serving
from scripts.lib.stats import summarize
from scripts.lib.workloads import Body, Vocabulary, make_workload
from scripts.serve import ready_lines

MODEL, SOURCE = "minilm", "bundled:minilm"
CHAT_MODEL, CHAT_SOURCE = "smollm2", "bundled:smollm2"
#: How the chat model is served where serving.yaml does not declare it.
CHAT_ENTRY = {"archive": "smollm2.mar", "version": "1.0", "batch_size": 16, "max_batch_delay": 1, "queue": 64}
CHAT = [{"role": "user", "content": "Why is the sky blue? Answer in three sentences."}]
CLIENTS = 64
QUESTION = "How do I reset my password?"
LIKE = "I can't log in any more, I forgot my credentials."
UNLIKE = "The soup needs a little more salt."
SHOWN = 3


def demo(
    serving: Annotated[
        Path, typer.Option(help="The deployment to show; it must declare the model minilm.", metavar="FILE")
    ] = DEFAULT_SERVING,
    once: Annotated[bool, typer.Option("--once", help="Stop after the samples instead of serving on.")] = False,
    model: Annotated[
        str, typer.Option(help="minilm embeds texts; smollm2 answers in a chat, streamed.", metavar="NAME")
    ] = MODEL,
) -> None:
    """Build a bundled model, serve it, send sample requests and show how they were batched; then serve on.

    Ctrl-C stops everything. Exits with an error when any step fails.
    """
    declared = _declared(serving, model)
    source = CHAT_SOURCE if model == CHAT_MODEL else SOURCE
    # Before the work, not after it.
    check_ports(properties.from_serving(declared))
    store, name = declared.server.model_store, declared.models[model].archive.removesuffix(".mar")
    version = declared.models[model].version

    _say("build", source, "--name", name, "--version", version, "--store", str(store), "--if-changed")
    build(source, name=name, version=version, model_store=store, if_changed=True)
    if model == MODEL:
        _say("configure", "--serving", str(serving), "--output", str(DEFAULT_OUTPUT))
        configure(serving, DEFAULT_OUTPUT)
    else:
        deployment.check(declared)
        deployment.write(declared, DEFAULT_OUTPUT, str(serving), "demo")

    with stop_on_signals():
        server = TorchServe(DEFAULT_OUTPUT)
        try:
            _say("serve", "--serving", str(serving))
            with progress("starting TorchServe"):
                server.start()
                server.wait_ready()
            if model == MODEL:
                _samples(server)
            else:
                _chat(server, version)
            for line in ready_lines(declared, server):
                if not (once and line.startswith("stop with")):
                    console.print(line, markup=False)
            if not once:
                status = server.wait()
                raise StartError(
                    f"TorchServe ended by itself (status {status})", hint=f"see {server.work_dir / 'logs'}"
                )
        except KeyboardInterrupt:
            console.print("stopping", markup=False)
        finally:
            with progress("stopping TorchServe"):
                server.stop(graceful=server.running)


def _declared(serving: Path, model: str) -> Serving:
    """The deployment to show; the chat model alone, where that is asked for."""
    if model not in (MODEL, CHAT_MODEL):
        raise UserError(f"there is no demo of {model}", hint=f"--model {MODEL} or --model {CHAT_MODEL}")
    declared = Serving.load(serving)
    if model == CHAT_MODEL:
        entry = declared.models.get(CHAT_MODEL) or ServedModel.model_validate(CHAT_ENTRY)
        return declared.model_copy(update={"models": {CHAT_MODEL: entry}})
    if MODEL not in declared.models:
        raise UserError(
            f"{serving} declares no model {MODEL}, which this demo shows", hint="for your own: batchserve serve"
        )
    return declared


def _chat(server: TorchServe, version: str) -> None:
    """Send a question and show the answer as it comes.

    Raises:
        UserError: it was not answered.
    """
    console.print(f"\n{CHAT[0]['content']}\n", style="bold", markup=False)
    start = time.perf_counter()
    first: float | None = None
    usage: dict[str, int] = {}
    options: dict[str, Any] = {"max_tokens": 120, "temperature": 0, "stream_options": {"include_usage": True}}
    for event in stream_chat(server.urls.inference, CHAT_MODEL, version, CHAT, headers=server.headers(), **options):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text = choice["delta"].get("content") or ""
            if text and first is None:
                first = time.perf_counter() - start
            console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    took = time.perf_counter() - start
    if first is None or not usage:
        raise UserError(f"{CHAT_MODEL} said nothing")
    tokens = usage["completion_tokens"]
    console.print(f"\n\n{tokens} tokens in {took:.1f} s, the first after {first:.2f} s\n", markup=False)


def _say(*words: str) -> None:
    """Show the command that does by itself what comes next."""
    console.print(f"\n$ batchserve {shlex.join(words)}", markup=False)


def _samples(server: TorchServe) -> None:
    """Send the sample requests and show what came back.

    Raises:
        UserError: one was not answered as it should be.
    """
    with server.inference(timeout=60) as client:
        console.print("\none text", markup=False)
        _ask(client, {"text": QUESTION})
        console.print("a list of texts, in one request", markup=False)
        answer = _ask(client, {"texts": [QUESTION, LIKE, UNLIKE]})
    question, like, unlike = answer["embeddings"]
    console.print("similarity (cosine) by these vectors", markup=False)
    for vector, text in ((like, LIKE), (unlike, UNLIKE)):
        console.print(f"  {cosine(question, vector):.2f}  {QUESTION}  ~  {text}", markup=False)
    if cosine(question, like) <= cosine(question, unlike):
        raise UserError("the unrelated sentence came out as the more similar one: these are not the model's vectors")

    console.print(f"{CLIENTS} clients, one text each, all at once", markup=False)
    console.print(f"  {run(_crowd(server))}", markup=False)
    console.print("", markup=False)


def _ask(client: InferenceClient, body: dict[str, Any]) -> Any:
    """Send one body, show it and its answer, and return the decoded answer."""
    start = time.perf_counter()
    answer = client.ask(MODEL, body)
    took = time.perf_counter() - start
    console.print(f"  {_short_json(body)}  →  200 in {took * 1e3:.0f} ms", markup=False)
    console.print(f"  {_short_json(answer)}", markup=False)
    return answer


async def _crowd(server: TorchServe) -> str:
    """Send one text from each of many clients at once; how they were batched, in words."""
    result, batching = await measure_window(
        Target(f"{server.urls.inference}/predictions/{MODEL}", server.headers()),
        f"{server.urls.metrics}/metrics",
        MODEL,
        _bodies(),
        clients=CLIENTS,
        requests=CLIENTS,
        # So that the connections are there and the server has seen such a crowd before.
        warmup=CLIENTS,
    )
    summary = summarize(result)
    if summary.errors or summary.shed:
        raise UserError(
            f"{summary.errors + summary.shed} of {CLIENTS} concurrent requests failed: {summary.errors_by_status}, "
            f"{summary.shed} refused as too many"
        )
    return (
        f"{summary.requests} answers in {summary.wall_s:.2f} s, the slowest after {summary.max_ms:.0f} ms; "
        f"{describe_batches(batching)}"
    )


def _bodies() -> Sequence[Body]:
    """A short text for each client."""
    from scripts.lib.source import resolve

    return make_workload("short", Vocabulary.load(resolve(SOURCE).directory), CLIENTS).bodies


def describe_batches(batching: BatchingWindow) -> str:
    """How many batches of what size served a window, in words.

    Raises:
        UserError: the server's metrics counted no batch.
    """
    if not batching.batches:
        raise UserError(
            "the server's metrics count no batch", hint="is metrics_mode prometheus, and metrics_config ours?"
        )
    sizes, below = [], 0.0
    for bound in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, math.inf):
        count = batching.batch_sizes.get(bound, 0)
        if count:
            span = f"{bound:.0f}" if bound == below + 1 else f"{below + 1:.0f}–{bound:.0f}"
            sizes.append(f"{count} of {span if math.isfinite(bound) else f'over {below:.0f}'}")
        below = bound
    batches = "1 batch" if batching.batches == 1 else f"{batching.batches} batches"
    return f"{batches} served them ({', '.join(sizes)} requests)"


def _short_json(value: Any) -> str:
    """JSON with long arrays of numbers and long texts cut short."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}": {_short_json(item)}' for key, item in value.items()) + "}"
    if isinstance(value, list):
        if len(value) > SHOWN and all(isinstance(item, int | float) for item in value):
            return "[" + ", ".join(f"{item:.4f}" for item in value[:SHOWN]) + f", … {len(value)} numbers]"
        return "[" + ", ".join(_short_json(item) for item in value) + "]"
    if isinstance(value, str):
        return f'"{value}"' if len(value) <= 60 else f'"{value[:57]}…"'
    return str(value)
