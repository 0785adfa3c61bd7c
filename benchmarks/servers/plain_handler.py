"""MiniLM in TorchServe as tutorials write it: pad the batch to its longest text, one forward, mean pooling."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer
from ts.torch_handler.base_handler import BaseHandler

MAX_TOKENS = 256  # as the model's own sentence_bert_config.json says


class PlainHandler(BaseHandler):
    """One text a request: `{"text": …}` → `{"embedding": […]}`."""

    def initialize(self, context: Any) -> None:
        """Load the model that the archive holds in its directory `model`."""
        directory = Path(context.system_properties["model_dir"]) / "model"
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModel.from_pretrained(directory).eval()
        self.initialized = True

    def preprocess(self, data: list[dict[str, Any]]) -> Any:
        """Tokenise the batch's texts together."""
        texts = [row["body"]["text"] for row in data]
        return self.tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")

    def inference(self, data: Any) -> torch.Tensor:
        """Unit vectors (batch × hidden)."""
        with torch.inference_mode():
            states = self.model(**data).last_hidden_state
        mask = data["attention_mask"].unsqueeze(-1)
        pooled = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled, dim=1)

    def postprocess(self, data: torch.Tensor) -> list[bytes]:
        """Compact JSON: of a dict, TorchServe would make indented JSON, which is slower."""
        return [json.dumps({"embedding": vector}).encode() for vector in data.tolist()]
