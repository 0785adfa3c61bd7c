"""`batchserve build` makes an archive of a model; `batchserve inspect` says what is in one and whether it is intact."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from scripts.lib import archive, integrity, store
from scripts.lib.console import console, err_console, progress
from scripts.lib.errors import UserError
from scripts.lib.interrupts import stop_on_signals
from scripts.lib.names import check_model_name, check_version
from scripts.lib.recipe import Order, Recipe, prepare
from scripts.lib.source import resolve
from scripts.lib.tasks import SERVED
from scripts.lib.verification import verify

_FEW = 8  # files listed one by one


def build(
    model: Annotated[
        str, typer.Argument(help="A model's directory, a hub id (owner/name), or bundled:minilm or :smollm2.")
    ],
    name: Annotated[str, typer.Option(help="The model's name in TorchServe; the archive is NAME.mar.")],
    task: Annotated[
        str, typer.Option(help=f"auto finds it in the model's files; or one of {', '.join(SERVED)}.")
    ] = "auto",
    version: Annotated[
        str, typer.Option(help='The version in TorchServe and in URLs, an exact string: "1" is not "1.0".')
    ] = "1.0",
    model_store: Annotated[
        Path, typer.Option("--store", help="The directory of archives; made when it is not there.")
    ] = Path("model_store"),
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (float16 on CUDA, float32 on a CPU), float32, float16 or bfloat16.")
    ] = "auto",
    attention: Annotated[
        str, typer.Option(help="auto packs texts without padding where the model allows it; packed or padded insist.")
    ] = "auto",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longest text in tokens, special ones counted, or a generation model's context; the model's own limit"
            " if not given."
        ),
    ] = None,
    max_items: Annotated[int | None, typer.Option(help="Most texts in one request (1024).")] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens run at once; lower it when memory is short (by device).")
    ] = None,
    max_batch_items: Annotated[int | None, typer.Option(help="Texts run at once (256).")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each worker; cores ÷ workers if not given.")] = None,
    pooling: Annotated[
        str | None, typer.Option(help="Replace the model's pooling: cls, mean, max …; several with commas.")
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="Replace what the model's files say about unit-length vectors.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Texts, one a line, like those to be embedded: int8 and uint8 take their ranges from them."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Of a generation model: transformers (the default) or vllm, where installed.")
    ] = None,
    engine_options: Annotated[
        str | None, typer.Option(help="What vLLM is given, as JSON: '{\"tensor_parallel_size\": 2}'.", metavar="JSON")
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(help="Tokens in a block of a generation model's cache (32 on a CPU, 256 on CUDA).")
    ] = None,
    cache_gib: Annotated[
        float | None, typer.Option(help="Memory for that cache (2 GiB on a CPU, most of what is free on CUDA).")
    ] = None,
    handler: Annotated[
        Path | None, typer.Option(help="Your own handler: a file with one subclass of ours, e.g. of EmbeddingHandler.")
    ] = None,
    requirements: Annotated[
        Path | None,
        typer.Option(help="A requirements.txt for your handler; must not install torch or transformers again."),
    ] = None,
    response_timeout: Annotated[
        int, typer.Option(min=1, help="Seconds that a batch may take before TorchServe restarts the worker.")
    ] = 120,
    convert: Annotated[
        bool,
        typer.Option("--convert", help="Read pickled weights (without running code) and pack them as safetensors."),
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the model's own Python code run, here and in every worker.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an archive of that name.")] = False,
    if_changed: Annotated[
        bool, typer.Option("--if-changed", help="Replace an archive of that name only when the new one would differ.")
    ] = False,
) -> None:
    """Make a model archive that stock TorchServe serves, and prove that it loads and answers."""
    final = model_store / f"{check_model_name(name)}.mar"
    check_version(version)
    if final.exists() and not force and not if_changed:
        raise store.exists(final)
    overrides: dict[str, Any] = {"dtype": dtype, "attention": attention}
    overrides |= _given(
        engine=engine, engine_options=_options(engine_options),
        page_size=page_size, cache_gib=cache_gib,
        max_items=max_items, max_batch_tokens=max_batch_tokens, max_batch_items=max_batch_items, threads=threads,
        normalize=normalize, pooling=None if pooling is None else [mode.strip() for mode in pooling.split(",")],
    )  # fmt: skip
    with progress(f"Finding {model}"):
        source = resolve(model, revision=revision)
    if model_store.resolve().is_relative_to(source.directory.resolve()):
        raise UserError(
            f"the model store {model_store} lies inside the model's directory, and would become a part of the archive",
            "name another one with --store",
        )
    order = Order(
        source=source, name=name, version=version, task=task, max_tokens=max_tokens, overrides=overrides,
        handler=handler, requirements=requirements, convert=convert, trust_remote_code=trust_remote_code,
        response_timeout=response_timeout, calibration=calibrate,
    )  # fmt: skip
    with stop_on_signals(), _disk_errors(), store.workspace(model_store, name) as work:
        with progress("Reading the model's files"):
            recipe = prepare(order, work)
            unchanged = if_changed and _same(final, recipe)
        if unchanged:
            console.print(f"{final} is unchanged", markup=False)
            return
        _tell(recipe)
        built = work / final.name
        with progress(f"Writing {final.name}"):
            digest = archive.write(built, recipe.contents, recipe.members)
        with progress("Verifying it: checksums, then one text in a clean process"):
            card = verify(built, recipe.members, work)["card"]
        size = built.stat().st_size
        store.publish(built, final, replace=force or if_changed)
    console.print(f"{final}: {_size(size)}, {len(recipe.members)} members", markup=False)
    console.print(f"sha256 {digest}", markup=False)
    if card:
        console.print(_answers_with(card), markup=False)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """A full disk, or a store that goes away, is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise UserError(f"the archive can't be written: {error}", "nothing was put in place; see the disk") from error


def _options(text: str | None) -> dict[str, Any] | None:
    """The engine's options from JSON."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"--engine-options is no JSON: {error}", """for example '{"tensor_parallel_size": 2}'"""
        ) from None
    if not isinstance(value, dict):
        raise UserError("--engine-options is no JSON object", """for example '{"tensor_parallel_size": 2}'""")
    return value


def _given(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _same(final: Path, recipe: Recipe) -> bool:
    """Whether the archive at `final` is intact and holds just what the recipe would write."""
    if not final.is_file():
        return False
    try:
        with archive.opened(final) as old:
            if old.read(archive.PROVENANCE) != recipe.contents[archive.PROVENANCE]:
                return False
        return not integrity.problems(final)
    except (UserError, KeyError):
        return False  # damaged or somebody else's: replaced


def _tell(recipe: Recipe) -> None:
    for note in recipe.notes:
        err_console.print(f"note: {note}", markup=False)
    reasons: dict[str, list[str]] = {}
    for item in recipe.left_out:
        reasons.setdefault(item.reason, []).append(item.path)
    for reason, paths in reasons.items():
        more = f" and {len(paths) - _FEW} more" if len(paths) > _FEW else ""
        err_console.print(f"left out ({reason}): {', '.join(paths[:_FEW])}{more}", markup=False)


def _answers_with(card: dict[str, Any]) -> str:
    """What the verified archive said of itself, in a line."""
    said = [f"{card['dimensions']} dimensions"] if "dimensions" in card else []
    said += [f"{key} {card[key]}" for key in ("dtype", "attention") if key in card]
    said += [f"texts of at most {card['max_tokens']} tokens"] if "max_tokens" in card else []
    said += [f"a context of {card['max_model_len']} tokens"] if "max_model_len" in card else []
    if "cache_tokens" in card:
        said.append(f"a cache of {card['cache_tokens']} tokens: {card['longest_at_once']} of the longest at once")
    if "suits" in card:
        said.append("batch_size {batch_size} and queue {queue} suit it".format(**card["suits"]))
    return f"verified on {card.get('device', 'this machine')}: {', '.join(said)}"


def _size(count: int) -> str:
    """Bytes for people."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def inspect(
    path: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="A .mar file, ours or any other of TorchServe's.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Say what is in an archive, and whether it is intact; a damaged or changed one exits 1."""
    try:
        whole = archive.read(path)
        wrong = integrity.problems(path)
    except UserError as error:
        if not as_json:
            raise
        console.print_json(json.dumps({"path": str(path), "intact": False, "problems": [str(error)]}))
        raise typer.Exit(1) from error
    facts = _facts(whole, wrong)
    if as_json:
        console.print_json(json.dumps(facts))
    else:
        console.print(_table(facts))
    if wrong:
        raise typer.Exit(1)


def _facts(whole: archive.Archive, wrong: list[str]) -> dict[str, Any]:
    origin = whole.provenance or {}
    return {
        "path": str(whole.path),
        "intact": not wrong,
        "problems": wrong,
        "provenance": whole.provenance is not None,
        "name": whole.name,
        "version": whole.version,
        "handler": whole.handler,
        "task": whole.settings.get("task") or origin.get("task"),
        "source": origin.get("source"),
        "settings": whole.settings,
        "response_timeout": whole.config.get("responseTimeout"),
        "startup_timeout": whole.config.get("startupTimeout"),
        "batchserve": origin.get("batchserve"),
        "created_with": origin.get("created_with", {}),
        "left_out": origin.get("left_out", {}),
        "size": whole.path.stat().st_size,
        "sha256": archive.file_sha256(whole.path),
        "members": whole.sizes,
    }


def _table(facts: dict[str, Any]) -> Table:
    settings = facts["settings"]
    limits = (
        *("max_tokens", "max_items", "max_model_len", "max_batch_tokens", "max_batch_items"),
        *("page_size", "num_blocks", "cache_gib", "threads"),
    )
    largest = sorted(facts["members"].items(), key=lambda item: -item[1])[:3]
    verdict = "intact: every member has the checksum that provenance names"
    if not facts["provenance"]:
        verdict = "no provenance: built by something else; nothing to verify against but the ZIP's own CRCs, which "
        verdict += "don't match" if facts["problems"] else "match"
    if facts["problems"]:
        verdict = "NOT intact: " + "; ".join([*([] if facts["provenance"] else [verdict]), *facts["problems"]])
    pooling = settings.get("pooling")
    rows = {
        "archive": f"{facts['path']}, {_size(facts['size'])}",
        "sha256": facts["sha256"],
        "state": verdict,
        "model": f"{facts['name']}, version {facts['version']}",
        "handler": facts["handler"],
        "task": facts["task"],
        "source": facts["source"],
        "dtype": settings.get("dtype"),
        "attention": settings.get("attention"),
        "limits": ", ".join(f"{key} {settings[key]}" for key in limits if settings.get(key) is not None),
        "pooling": " + ".join(pooling) if isinstance(pooling, list) else pooling,
        "normalize": settings.get("normalize"),
        "prompts": ", ".join(f"{key}: {text!r}" for key, text in (settings.get("prompts") or {}).items() if text),
        "dense": ", ".join(settings.get("dense") or []),
        "timeouts": f"response {facts['response_timeout']} s, startup {facts['startup_timeout']} s",
        "built with": ", ".join(f"{key} {value}" for key, value in facts["created_with"].items()),
        "members": f"{len(facts['members'])}; largest "
        + ", ".join(f"{member} {_size(size)}" for member, size in largest),
        "left out": ", ".join(facts["left_out"]),
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in rows.items():
        if value not in (None, ""):
            table.add_row(key, _plain(str(value)))
    return table


def _plain(text: str) -> str:
    """`text` with nothing in it that the console would take for markup."""
    return text.replace("[", r"\[")
