"""Text generation: a decoder-only model behind TorchServe, spoken to like OpenAI, batched anew at every token."""

import importlib.util
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from handlers import decoding
from handlers.config import ConfigError
from handlers.errors import RequestError, UnknownRoute, shown
from handlers.generation import requests, responses
from handlers.generation.continuous import ContinuousEngine
from handlers.generation.engine import Engine, Sequence
from handlers.generation.exchange import Choice, Exchange
from handlers.generation.grammar import PACKAGE, Grammar, Grammars, version
from handlers.generation.mailbox import Later, MailboxHandler, Reply
from handlers.generation.prompts import Prompts
from handlers.generation.requests import DESCRIBE, MODELS, Generation
from handlers.generation.responses import Writer
from handlers.generation.settings import GenerationConfig
from handlers.options import checked
from handlers.serialise import dumps
from handlers.threads import Threads

logger = logging.getLogger(__name__)

FIRST_TOKEN, PER_TOKEN = "batchserve_time_to_first_token_seconds", "batchserve_time_per_token_seconds"


class GenerationHandler(MailboxHandler):
    """Chat and completions, whole or streamed; see `requests` for what may be asked."""

    def setup(self, context: Any) -> None:
        """Load the tokenizer and start the engine."""
        self.settings = GenerationConfig.from_mapping((context.model_yaml_config or {}).get("handler") or {})
        properties = context.system_properties
        directory = Path(properties["model_dir"]) / self.settings.model
        if self.settings.engine == "transformers":
            self.threads = Threads(self.settings.threads)
        self.engine = self._engine(directory, properties.get("gpu_id"))
        trust = self.settings.trust_remote_code
        self.prompts = Prompts(directory, self.engine.max_model_len, trust_remote_code=trust)
        self.grammars, self._no_grammars = self._constraints()
        self._exchanges: dict[str, tuple[Exchange, set[int]]] = {}  # with the choices that the engine still runs
        self._created = int(time.time())

    def admit(
        self, id: str, row: Mapping[str, Any], headers: decoding.Headers, arrived: float
    ) -> Exchange | Reply | Later:
        """See MailboxHandler.admit."""
        route = decoding.route_of(headers)
        requests.check_route(route)
        if route == DESCRIBE or (headers.get("describe") == "True" and not row):
            return Reply(dumps({**self.card(), "stats": vars(self.engine.stats())}))
        if route == MODELS or route.startswith(f"{MODELS}/"):
            return self._models(route)
        generation = requests.parse(decoding.decode(row, headers), self.engine.vocabulary)
        encoded = self.prompts.encode(generation)
        rules = self.prompts.rules(generation)
        if rules is None:
            return self._start(id, generation, encoded, arrived)
        param = "tools" if generation.toolbox.callable else "response_format"
        grammars = self.grammars
        if grammars is None:
            raise RequestError(f"{param} is not offered here: {self._no_grammars}.", code="not_offered", param=param)

        def start() -> Exchange:
            return self._start(id, generation, encoded, arrived, checked(rules, param, grammars.compile))

        return start() if grammars.quick(rules) else Later(start)

    def collect(self, timeout: float) -> bool:
        """See MailboxHandler.collect."""
        told = False
        for output in self.engine.collect(timeout):
            id, _, number = output.id.rpartition("/")
            found = self._exchanges.get(id)  # another thread may abandon it meanwhile
            if found is None:
                continue
            exchange, running = found
            index, waiting = int(number), exchange.first is None
            exchange.add(index, output)
            told = told or exchange.stream or exchange.done
            if waiting and exchange.first is not None:
                self.metrics.observe(FIRST_TOKEN, exchange.first - exchange.started)
            if exchange.finished(index) and index in running:
                running.discard(index)
                if output.finish is None:  # a stop string, of which the engine knows nothing
                    self.engine.cancel(output.id)
        return told

    def abandon(self, id: str) -> None:
        """See MailboxHandler.abandon."""
        exchange, running = self._exchanges.pop(id, (None, set()))
        for index in tuple(running):
            self.engine.cancel(f"{id}/{index}")
        if exchange is None:
            return
        self.metrics.count("batchserve_prompt_tokens_total", exchange.prompt_tokens)
        self.metrics.count("batchserve_generated_tokens_total", exchange.tokens)
        for seconds in exchange.paces():
            self.metrics.observe(PER_TOKEN, seconds)

    def look(self) -> None:
        """See MailboxHandler.look."""
        self.metrics.show(self.engine.stats())

    def sample(self) -> dict[str, Any]:
        """A body that any generation archive answers with one token."""
        return {"text": "hello", "max_tokens": 1}

    def card(self) -> dict[str, Any]:
        """What is served, for `GET /models/NAME?customized=true` and the log."""
        offered = self.grammars is not None
        return {
            "task": self.settings.task,
            **self.engine.card(),
            "slots": self.slots,
            "response_format": ["text", *(("json_object", "json_schema") if offered else ())],
            "tools": offered and self.prompts.calls is not None,
        }

    def _constraints(self) -> tuple[Grammars | None, str]:
        """What compiles grammars, or why nothing does."""
        if self.settings.engine != "transformers":
            return None, f"the engine {self.settings.engine} is served without it"
        if version() is None:
            return None, f"the package {PACKAGE} is not installed (pip install {PACKAGE})"
        try:
            return Grammars(self.prompts.tokenizer, self.engine.vocabulary, self.prompts.end), ""
        except Exception as error:  # noqa: BLE001 - whatever it is, all else can be served
            logger.warning("No response_format and tools: %s cannot use the tokenizer: %s", PACKAGE, error)
            return None, f"{PACKAGE} cannot use the model's tokenizer"

    def _engine(self, directory: Path, gpu_id: int | None) -> Engine:
        if self.settings.engine == "vllm":
            if importlib.util.find_spec("vllm") is None:
                raise ConfigError("handler: engine is 'vllm', which is not installed here: pip install vllm")
            from handlers.generation.vllm_engine import VllmEngine

            return VllmEngine(directory, self.settings, gpu_id)
        return ContinuousEngine(directory, self.settings, gpu_id, self.slots)

    def _models(self, route: str) -> Reply:
        name = route.removeprefix(MODELS).strip("/")
        if not name:
            return Reply(dumps(responses.models(self.model_name, self._created)))
        if name != self.model_name:
            raise UnknownRoute(f"There is no model {shown(name)} here.", code="model_not_found", param="model")
        return Reply(dumps(responses.model(self.model_name, self._created)))

    def _start(
        self,
        id: str,
        generation: Generation,
        encoded: list[tuple[int, ...]],
        arrived: float,
        grammar: Grammar | None = None,
    ) -> Exchange:
        """Hand a request's sequences to the engine."""
        calls = self.prompts.calls if generation.toolbox.callable else None
        end = frozenset() if generation.ignore_eos else self.prompts.end
        choices: list[Choice] = []
        sequences: list[Sequence] = []
        for prompt in encoded:
            for number in range(generation.n):
                sampling = generation.sampling
                if sampling.seed is not None:
                    sampling = replace(sampling, seed=sampling.seed + number)
                context = () if generation.shape == "chat" else prompt
                constraint = grammar.constraint() if grammar is not None else None
                choices.append(Choice(self.prompts.tokenizer, context, generation, self.prompts.end, calls, constraint))
                sequences.append(
                    Sequence(
                        id=f"{id}/{len(sequences)}",
                        prompt=prompt,
                        max_tokens=self.prompts.room(prompt, generation.max_tokens),
                        sampling=sampling,
                        end=end,
                        priority=generation.priority,
                        constraint=constraint,
                    )
                )
        kind = "chatcmpl" if generation.shape == "chat" else "cmpl"
        writer = Writer(generation, f"{kind}-{uuid.uuid4().hex}", self.model_name)
        most = self.settings.max_response_bytes
        exchange = Exchange(generation, choices, writer, sum(map(len, encoded)), most, arrived)
        self._exchanges[id] = exchange, set(range(len(sequences)))
        for sequence in sequences:
            self.engine.submit(sequence)
        return exchange
