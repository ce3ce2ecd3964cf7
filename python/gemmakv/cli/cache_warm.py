"""`gemmakv cache warm`: prompts computed for processes that come later."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import typer

from gemmakv import _core
from gemmakv.cache._folders import parse_folder
from gemmakv.cache._kv_cache import create_kv_cache
from gemmakv.cache._prefix import PrefixCache
from gemmakv.chat._gemma import Gemma
from gemmakv.chat._messages import Message
from gemmakv.chat._transcript import common_exact
from gemmakv.cli import console
from gemmakv.cli.arguments import MODEL, QUANTIZE, THREADS, examples
from gemmakv.cli.failures import InputError
from gemmakv.generation._prompts import TokenArray, prompt_ids

EXAMPLES = examples(
    "gemmakv cache warm ~/.cache/prefixes -m gemma-3-270m book.txt",
    "gemmakv cache warm ~/.cache/prefixes:20GiB -m org/repo --chat system.txt",
    'gemmakv cache warm /dev/shm/kv -m model.gguf --prompt "You are ..."',
)
_IN_MEMORY = ("tmpfs", "ramfs")
_FLUSH_S = 600.0


@dataclasses.dataclass
class _Warmed:
    """The result for one prompt."""

    prompt: str  # the file, or which --prompt
    tokens: int
    computed: int
    known: int
    written_bytes: int


def warm(
    folder: str = typer.Argument(
        ...,
        metavar="DIR[:BYTES]",
        help="A folder for the prefix cache and its limit, as in ~/kv:20GiB; "
        "created if missing. On a memory file system it is the shared tier.",
    ),
    files: list[Path] | None = typer.Argument(
        None, metavar="[FILE]...", help="Text files, each one prompt."
    ),
    model: str = MODEL,
    prompt: list[str] | None = typer.Option(
        None, "--prompt", metavar="TEXT", help="A prompt; repeatable."
    ),
    chat: bool = typer.Option(
        False,
        "--chat",
        help="Each prompt is the system text of chats: compute what all of "
        "these begin with.",
    ),
    threads: int | None = THREADS,
    quantize: str | None = QUANTIZE,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Compute prompts now, so that later processes need not.

    Processes that use the folder then have these beginnings of prompts, in
    whole pages of 256 tokens: with --prefix-cache-disk DIR, or on a memory file
    system with --prefix-cache-shared DIR.
    """
    prompts = [
        (f"prompt {i + 1}", text) for i, text in enumerate(prompt or ())
    ]
    prompts += [
        (str(file), console.prompt_of(str(file), file.read_bytes()))
        for file in files or ()
    ]
    if not prompts:
        raise typer.BadParameter("expected a FILE or --prompt TEXT, found none")
    for name, text in prompts:
        if not text:
            raise InputError(f"{name}: expected a text, found nothing")
    tier, cache = _open(folder)
    with cache:
        gemma = console.load(model, threads, True, quantize, cache)
        rows = []
        for name, text in prompts:
            ids = _ids(gemma, name, text, chat)
            rows.append(_warm(gemma, cache, tier, name, ids))
            if not as_json:
                row = rows[-1]
                console.write(
                    f"{name}: {row.computed:,} tokens computed, {row.known:,} "
                    f"known, {row.written_bytes:,} bytes written\n"
                )
    if as_json:
        document = [dataclasses.asdict(row) for row in rows]
        console.write(json.dumps({"tier": tier, "prompts": document}) + "\n")


def _open(folder: str) -> tuple[str, PrefixCache]:
    path, size = parse_folder("folder", folder)
    _core.FolderStore(  # makes it, or says why it cannot be one
        path, tier="disk", mapped=False, budget_bytes=size or 1
    )
    tier = "disk"
    if _core.FolderStore.describe(path)["file_system"] in _IN_MEMORY:
        tier = "shared"
    budget = {} if size is None else {f"{tier}_bytes": size}
    return tier, PrefixCache(**{tier: path}, **budget)  # type: ignore[arg-type]


def _ids(gemma: Gemma, name: str, text: str, chat: bool) -> TokenArray:
    """Gives the tokens of a text, or of the beginning of all chats that have it
    as their system text.
    """
    if not chat:
        ids, _ = prompt_ids(name, text, gemma.config, gemma.tokenizer, False)
        return ids
    system = Message("system", text)
    one, other = (
        gemma.apply_chat_template([system, Message("user", user)])
        for user in ("a", "1")
    )
    return one[: common_exact(one, other)]


def _warm(
    gemma: Gemma, cache: PrefixCache, tier: str, name: str, ids: TokenArray
) -> _Warmed:
    before = cache.stats()
    usage = gemma.prefill(create_kv_cache(gemma.config), ids).usage
    flushed = cache.flush(_FLUSH_S)
    after = cache.stats()
    failed = after.failed_writes[tier] - before.failed_writes[tier]
    lost = after.dropped - before.dropped
    if failed or lost or not flushed:
        raise InputError(
            f"{name}: {failed + lost + after.queued} objects could not be "
            "written (is the file system full, or BYTES of DIR:BYTES too few?)"
        )
    evicted = after.evictions[tier] - before.evictions[tier]
    if evicted:
        raise InputError(
            f"{name}: {evicted} objects went for its own, expected a folder "
            "that may take all prompts (DIR:BYTES)"
        )
    return _Warmed(
        name,
        usage.prompt_tokens,
        usage.prompt_tokens - usage.cached_tokens,
        usage.cached_tokens,
        after.bytes[tier] - before.bytes[tier],
    )
