"""Tiny models with random weights, written to disk as a hub would deliver them.

Every builder is deterministic (a seed), takes well under a second and needs no network.
"""

import json
from pathlib import Path
from typing import Any

WORDS = [
    "the", "at", "an", "is", "are", "was", "in", "on", "of", "and", "to", "cat", "dog", "house", "man", "woman",
    "child", "plays", "runs", "eats", "guitar", "sits", "red", "blue", "green", "old", "young", "hello", "world",
    "query", "text",
]  # fmt: skip
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'\"-()<>/"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
HIDDEN = 32

LEGACY_POOLING = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as JSON, making the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def write_tokenizer(directory: Path, *, pad_id: int = 0, model_max_length: int | None = 64, types: bool = True) -> None:
    """Write a small lower-casing WordPiece tokenizer: words, characters and their continuations.

    `pad_id` is the padding token's id (RoBERTa-like models count positions from it); `types` says whether the model
    takes token_type_ids.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokens = SPECIAL + WORDS + list(CHARACTERS) + [f"##{character}" for character in CHARACTERS]
    tokens[0], tokens[pad_id] = tokens[pad_id], tokens[0]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    tokenizer.add_special_tokens(SPECIAL)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]",
        "model_input_names": ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"],
    }  # fmt: skip
    if model_max_length is not None:
        config["model_max_length"] = model_max_length
    write_json(directory / "tokenizer_config.json", config)


def _transformer(family: str, *, pad_id: int, positions: int, seed: int) -> Any:
    import torch
    import transformers

    shape = {
        "vocab_size": len(SPECIAL) + len(WORDS) + 2 * len(CHARACTERS),
        "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "max_position_embeddings": positions, "pad_token_id": pad_id, "initializer_range": 0.2,
    }  # fmt: skip
    if family == "distilbert":
        shape = {
            "vocab_size": shape["vocab_size"], "dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 64,
            "max_position_embeddings": positions, "pad_token_id": pad_id, "initializer_range": 0.2,
        }  # fmt: skip
    names = {
        "bert": "Bert",
        "roberta": "Roberta",
        "xlm-roberta": "XLMRoberta",
        "mpnet": "MPNet",
        "distilbert": "DistilBert",
    }
    torch.manual_seed(seed)
    config = getattr(transformers, names[family] + "Config")(**shape)
    return getattr(transformers, names[family] + "Model")(config).eval()


def tiny_bert(
    directory: Path,
    *,
    family: str = "bert",
    sentence_transformers: bool = True,
    pooling: str | list[str] = "mean",
    normalize: bool = True,
    dense: int | None = None,
    include_prompt: bool | None = None,
    prompts: dict[str, str] | None = None,
    default_prompt_name: str | None = None,
    max_seq_length: int | None = 48,
    lower_case: bool = False,
    positions: int = 64,
    model_max_length: int | None = 64,
    transformer_path: str = "",
    legacy: bool = True,
    seed: int = 0,
) -> Path:
    """Write a 2-layer encoder of width 32 to `directory` (made if need be) and return it.

    Args:
        directory: where the model goes.
        family: bert, roberta, xlm-roberta, mpnet or distilbert; the RoBERTa-like ones pad with id 1.
        sentence_transformers: also write modules.json and what belongs to it; else a plain transformers directory.
        pooling: one pooling mode or several, sentence-transformers' names.
        normalize: end with a Normalize module.
        dense: width of a Dense module (tanh) after the pooling; None for none.
        include_prompt, prompts, default_prompt_name: as in sentence-transformers' files; None leaves them out.
        max_seq_length, lower_case: sentence_bert_config.json.
        positions: the position table's rows.
        model_max_length: the tokenizer's limit; None leaves it out.
        transformer_path: the Transformer module's sub-folder ("" is the root, as most models have it).
        legacy: sentence-transformers' file forms before version 5.3 (pooling_mode_*), else the newest.
        seed: another seed, other weights.
    """
    pad_id = 1 if family in ("roberta", "xlm-roberta", "mpnet") else 0
    home = directory / transformer_path if transformer_path else directory
    home.mkdir(parents=True, exist_ok=True)
    _transformer(family, pad_id=pad_id, positions=positions, seed=seed).save_pretrained(home)
    write_tokenizer(home, pad_id=pad_id, model_max_length=model_max_length, types=family == "bert")
    if not sentence_transformers:
        return directory

    old = "sentence_transformers.models."
    new = "sentence_transformers."
    kinds = [("Transformer", transformer_path, f"{new}base.modules.transformer.Transformer")]
    kinds.append(("Pooling", "1_Pooling", f"{new}sentence_transformer.modules.pooling.Pooling"))
    modes = [pooling] if isinstance(pooling, str) else pooling
    pooling_config: dict[str, Any]
    if legacy:
        pooling_config = {"word_embedding_dimension": HIDDEN} | {
            key: mode in modes for mode, key in LEGACY_POOLING.items()
        }
    else:
        pooling_config = {"embedding_dimension": HIDDEN, "pooling_mode": pooling}
    if include_prompt is not None:
        pooling_config["include_prompt"] = include_prompt
    write_json(directory / "1_Pooling" / "config.json", pooling_config)
    if dense is not None:
        kinds.append(("Dense", "2_Dense", f"{new}base.modules.dense.Dense"))
        write_dense(directory / "2_Dense", HIDDEN * len(modes), dense, seed=seed)
    if normalize:
        name = f"{len(kinds)}_Normalize"
        kinds.append(("Normalize", name, f"{new}base.modules.normalize.Normalize"))
        (directory / name).mkdir(exist_ok=True)
        if not legacy:
            keys = ("module_input_name", "module_output_name")
            write_json(directory / name / "config.json", dict.fromkeys(keys, "sentence_embedding"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": old + kind if legacy else full}
        for index, (kind, path, full) in enumerate(kinds)
    ]
    write_json(directory / "modules.json", modules)
    bert_config: dict[str, Any] = {} if max_seq_length is None else {"max_seq_length": max_seq_length}
    write_json(home / "sentence_bert_config.json", bert_config | {"do_lower_case": lower_case})
    about: dict[str, Any] = {"__version__": {"sentence_transformers": "3.0.0"}}
    if prompts is not None:
        about["prompts"] = prompts
    if default_prompt_name is not None:
        about["default_prompt_name"] = default_prompt_name
    write_json(directory / "config_sentence_transformers.json", about)
    return directory


def write_dense(directory: Path, width: int, out: int, *, seed: int = 0, pickled: bool = False) -> None:
    """Write a Dense module (linear `width` → `out`, then tanh) as sentence-transformers saves it."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "linear.weight": torch.randn(out, width, generator=generator) / width**0.5,
        "linear.bias": torch.randn(out, generator=generator) / 10,
    }
    write_json(
        directory / "config.json",
        {
            "in_features": width,
            "out_features": out,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
    )
    if pickled:
        torch.save(weights, directory / "pytorch_model.bin")
    else:
        save_file(weights, directory / "model.safetensors")


def pickle_weights(directory: Path, *, keep: bool = False) -> None:
    """Turn `directory`'s model.safetensors into the pytorch_model.bin of old; `keep` leaves both."""
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    if not keep:
        (directory / "model.safetensors").unlink()
