"""sentence-transformers' files of a sparse encoder (SPLADE), as keys of the `handler:` section."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.lib import pipeline
from scripts.lib.errors import UserError

_POOLING = "SpladePooling"
_SERVED = ("Transformer", "MLMTransformer", _POOLING)


def settings(files: Mapping[str, Path], config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What the files say of a sparse encoder; SPLADE with max pooling for a masked language model without any.

    Args:
        files: path below the model's directory → file.
        config: config.json.

    Raises:
        UserError: modules or settings that are not served, and which.
    """
    prompts, default = pipeline.prompts_of(files)
    own: dict[str, Any] = {"prompts": prompts, "default_prompt_name": default}
    if pipeline.other_family(files) is None:
        return own, ["SPLADE with max pooling, as sentence-transformers' SparseEncoder takes a masked language model"]
    found = pipeline.kinds(files, _SERVED)
    names = [name for name, _ in found]
    if names not in (["Transformer", _POOLING], ["MLMTransformer", _POOLING]):
        raise UserError(
            f"{pipeline.MODULES} has the modules {', '.join(names) or 'of none'}; served is a Transformer, then a "
            f"{_POOLING}",
            "a sparse encoder of another shape can't be served",
        )
    (_, home), (_, pooling) = found
    if home:
        raise UserError(f"{pipeline.MODULES} puts the Transformer into {home}", "its files belong in the model's root")
    limit, lower_case = pipeline.transformer_settings(files, home, task="fill-mask", reads="logits")
    how = pipeline.load_json(files, f"{pooling}/config.json")
    own |= {
        "splade_strategy": how.get("pooling_strategy", "max"),
        "splade_activation": how.get("activation_function", "relu"),
        "max_active_dims": pipeline.load_json(files, pipeline.ABOUT).get("max_active_dims"),
        "lower_case": lower_case,
    }
    return own | ({"max_tokens": limit} if limit is not None else {}), []
