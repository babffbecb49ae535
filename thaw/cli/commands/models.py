"""``thaw model push|list|versions|inspect|verify|delete|gc|demo``."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thaw.cli.context import err, out, say_ok

if TYPE_CHECKING:
    from thaw.cli.model_uses import Uses

app = typer.Typer(no_args_is_help=True, help="Push and inspect models in the model store.")

Uri = Annotated[
    str,
    typer.Argument(help="The model: s3://bucket/prefix, hf://org/name, file:///absolute/path, http(s)://host/path."),
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="DIRECTORY", help="A directory that save_pretrained wrote, a GGUF file, or hf://org/name@revision."
    ),
]

DEMO_NAME = "smollm2-135m"
_UNBOUND = (
    "version  not bound: without an index it stands for names, lengths and etags of the files, not for their bytes.\n"
    "         Whoever may write to this place can change the weights.  To bind every byte: thaw model push DIR URI"
)
_INTERRUPTED = 130  # as shells say it of a program that Ctrl-C ended


@app.command()
def push(
    directory: Source,
    uri: Uri,
    force: Annotated[
        bool, typer.Option("--force", help="Push it even if a check says that it would not start.")
    ] = False,
) -> None:
    """Check a model, upload it as a version of its own with an index of its checksums, and make the name mean it.

    The next start of each function takes the new version; one that names URI@VERSION keeps its version.  Before the
    name means it, the platform's engine says whether it would start.
    """
    from thaw.hub.models import is_hub

    try:
        if is_hub(directory):
            _push_copy(directory, uri, force=force)
        else:
            _push(Path(directory), uri, force=force)
    except KeyboardInterrupt:
        err().print(f"stopped: {uri} is what it was; the same command goes on where this one stopped", soft_wrap=True)
        raise typer.Exit(_INTERRUPTED) from None


def _push_copy(of: str, uri: str, *, force: bool) -> None:
    """Push a model of a hub.  Its copy stays in the cache until the push has ended well."""
    from thaw.cli.model_stores.demo_model import cache_dir
    from thaw.cli.model_stores.hub import HubStore, copied
    from thaw.cli.output.progress import progress

    store = HubStore(of)
    with ExitStack() as stack:
        with progress("copying", store.index().n_bytes) as advance:
            directory = stack.enter_context(copied(store, cache_dir(), advance))
        _push(directory, uri, force=force)


def _push(path: Path, uri: str, *, force: bool = False) -> None:
    from thaw.cli.model_stores import checkpoints, conversion
    from thaw.cli.model_stores.stores import open_store

    if conversion.is_needed(path):  # it may take minutes
        checkpoints.check_pushable(open_store(uri))
    with conversion.pushable(path, _say, force=force) as directory:
        _push_directory(directory, uri, force=force)


def _say(line: str) -> None:
    err().print(line, soft_wrap=True, markup=False)


def _push_directory(directory: Path, uri: str, *, force: bool) -> None:
    from thaw.checkpoints import fitness
    from thaw.checkpoints.versions import pin
    from thaw.cli.model_stores import checkpoints
    from thaw.cli.model_stores.stores import open_store
    from thaw.cli.output.progress import progress
    from thaw.cli.output.tables import size
    from thaw.cli.preflight import check_pushed

    store = open_store(uri)
    total = checkpoints.check(directory)
    force = force or checkpoints.is_adapter(directory)  # it is looked at beside its base, when a function names both
    if not force:
        fitness.check_files([path.name for path in checkpoints.files_of(directory)], str(directory))
    checkpoints.check_pushable(store)
    before = checkpoints.pointer(store)
    with progress("hashing", total) as advance:
        hashed = checkpoints.hash_files(directory, advance)
    with progress("pushing", total) as advance:
        pushed = checkpoints.upload(hashed, store, advance, before, (lambda _: None) if force else check_pushed)
    index = pushed.index
    was_there = f"; {size(index.n_bytes - pushed.sent_bytes)} were there" if pushed.sent_bytes < index.n_bytes else ""
    say_ok(f"pushed {len(index.files)} files, {size(index.n_bytes)} ({index.n_bytes} bytes) to {uri}{was_there}")
    out().print(f"version {pin(uri, index.sha256)}", soft_wrap=True)
    out().print(f"sha256 {index.sha256}", soft_wrap=True)


@app.command("list")
def list_() -> None:
    """List the models in the store of the platform on this machine, or in the one that THAW_S3_ENDPOINT names, with the
    functions that name them."""
    from thaw.checkpoints.versions import plain_name, short
    from thaw.cli.model_stores.listing import models
    from thaw.cli.output.tables import show, size, table

    rows, known = table("model", "bytes", "tensors", "newest version", "versions", "used by"), _uses_if_known()
    for found in models():
        index, n_versions = found.index, str(found.n_versions or "")
        users = "?" if known is None else ", ".join(known.of_name(plain_name(found.uri)))
        if index is None:
            rows.add_row(found.uri, "?", "?", "(not indexed: push it again)", n_versions, users)
        else:
            newest = short(index.sha256)
            rows.add_row(found.uri, size(index.n_bytes), str(len(index.tensors)), newest, n_versions, users)
    show(rows)


def _uses_if_known() -> Uses | None:
    from thaw.cli.model_uses import uses
    from thaw.errors import ThawError

    try:
        return uses()
    except ThawError:
        return None


@app.command("versions")
def versions_(uri: Uri) -> None:
    """List the versions of a model that its store has: their bytes, when they were pushed, and who uses them."""
    from thaw.checkpoints.versions import plain_name
    from thaw.cli.model_stores.removal import versions_of
    from thaw.cli.output.tables import moment, show, size, table

    rows, known, name = table("version", "bytes", "pushed", "", "used by"), _uses_if_known(), plain_name(uri)
    for one in versions_of(name):
        what = "newest" if one.newest else "" if one.finished else "unfinished"
        users = "?" if known is None else ", ".join(known.of_version(name, one.digits, newest=one.newest))
        rows.add_row(one.digits, size(one.n_bytes), moment(round(1000 * one.pushed_s)), what, users)
    show(rows)


@app.command()
def delete(
    uri: Uri,
    force: Annotated[bool, typer.Option("--force", help="Ask no platform who uses it.")] = False,
) -> None:
    """Delete one version (URI@VERSION), or a model with all of its versions. What a function uses is not deleted."""
    from thaw.cli.model_stores import removal
    from thaw.cli.model_uses import uses
    from thaw.cli.output.tables import size

    removed = removal.delete(uri, (lambda: removal.NOBODY) if force else uses)
    for one in removed:
        if one.kept:
            err().print(f"note: {one.uri} stays: {one.kept}", soft_wrap=True, markup=False)
    say_ok(f"deleted {uri}: {size(sum(one.n_bytes for one in removed if not one.kept))}")


@app.command()
def gc(
    uri: Annotated[str | None, typer.Argument(help="Only this model; without it, every model in the store.")] = None,
    older_than: Annotated[
        float, typer.Option(help="Keep what may have been the newest version within so many hours.")
    ] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
) -> None:
    """Remove the versions that are not the newest and that no function, instance or start uses (needs an operator's
    key)."""
    from thaw.checkpoints.versions import plain_name
    from thaw.cli.model_stores import removal
    from thaw.cli.model_stores.listing import models
    from thaw.cli.model_uses import uses
    from thaw.cli.output.tables import size

    n_bytes, n_removed = 0, 0
    for name in [plain_name(uri)] if uri else sorted({plain_name(found.uri) for found in models()}):
        for one in removal.collect(name, uses, 3600.0 * older_than, dry_run=dry_run):
            said = f"stays: {one.kept}" if one.kept else "would go" if dry_run else "removed"
            out().print(f"{one.uri} {said}", soft_wrap=True, markup=False)
            n_bytes, n_removed = (n_bytes, n_removed) if one.kept else (n_bytes + one.n_bytes, n_removed + 1)
    say_ok(f"{n_removed} versions, {size(n_bytes)}{' would go' if dry_run else ''}")


@app.command()
def inspect(uri: Uri) -> None:
    """Show a model's layers, bytes and files."""
    from thaw.cli.model_stores import checkpoints
    from thaw.cli.model_stores.stores import open_store
    from thaw.cli.output.tables import show, size, table
    from thaw.hub.models import is_hub

    store, root = checkpoints.resolve(open_store(uri))
    if not (root or is_hub(uri) or checkpoints.has_index(store)):
        out().print(f"[bold]{uri}[/bold]  {checkpoints.read_architecture(store)}", soft_wrap=True)
        out().print(_UNBOUND, soft_wrap=True)
        return
    index = checkpoints.index_of(store, root)
    facts = checkpoints.read_facts(store, index)
    out().print(f"[bold]{uri}[/bold]  {facts.architecture}", soft_wrap=True)
    if store.uri != uri:
        out().print(f"newest   {store.uri}", soft_wrap=True)
    if facts.sha256:
        out().print(f"sha256   {facts.sha256}", soft_wrap=True)
    out().print(f"bytes    {facts.n_bytes} ({size(facts.n_bytes)}), weights {size(facts.weight_bytes)}")
    per_layer = f", {size(max(facts.layer_bytes))} the largest" if facts.layer_bytes else ""
    out().print(f"layers   {facts.n_layers}{per_layer}; outside of layers {size(facts.outer_bytes)}")
    rows = table("file", "bytes", "chunks")
    for file in index.files:
        rows.add_row(file.name, str(file.n_bytes), str(len(file.chunks_blake3)))
    show(rows)


@app.command()
def verify(uri: Uri) -> None:
    """Read a model from its store and compare every byte with its version: the hash tree, and every chunk with it."""
    from thaw.cli.model_stores import checkpoints
    from thaw.cli.model_stores.stores import open_store
    from thaw.cli.output.progress import progress

    store, root = checkpoints.resolve(open_store(uri))
    index = checkpoints.read_index(store, root)
    with progress("verifying", index.n_bytes) as advance:
        checkpoints.verify(store, index, advance)
    n_chunks = sum(len(f.chunks_blake3) for f in index.files)
    say_ok(f"{n_chunks} chunks of {len(index.files)} files are what was pushed ({index.n_bytes} bytes)")
    out().print(f"sha256 {index.sha256}", soft_wrap=True)


@app.command()
def demo(
    path_only: Annotated[
        bool, typer.Option("--path-only", help="Print the model's directory and push nothing.")
    ] = False,
) -> None:
    """Download a small real model (SmolLM2-135M-Instruct) and push it to the store that THAW_S3_ENDPOINT names, else to
    the platform on this machine."""
    from thaw.cli.model_stores.demo_model import cache_dir, obtain_quietly

    if path_only:
        print(obtain_quietly(cache_dir(), lambda text: err().print(text, style="dim")))
        return
    uri = _demo_uri()
    with out().status("obtaining SmolLM2-135M-Instruct") as status:
        directory = obtain_quietly(cache_dir(), lambda text: status.update(text))
    _push(directory, uri)
    out().print(
        f"deploy it: put {uri} into a config as model.uri, then thaw action create NAME --config FILE.json",
        soft_wrap=True,
    )


def _demo_uri() -> str:
    """The URI to which the demo model is pushed.  Its bucket exists after this call."""
    from thaw.cli.model_stores.s3 import make_bucket, names_a_store
    from thaw.dev.layout import default_layout
    from thaw.errors import Unavailable

    if names_a_store(os.environ):
        make_bucket(None, "models")
        return f"s3://models/{DEMO_NAME}"
    platform = default_layout().read_platform()
    if platform is None:
        raise Unavailable("no platform runs on this machine", hint="start one: thaw dev up")
    return platform.model_uri(DEMO_NAME)
