"""``thaw model push|list|inspect|verify|demo``."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from thaw.cli.context import err, out, say_ok

app = typer.Typer(no_args_is_help=True, help="Push and inspect models in the model store.")

Uri = Annotated[
    str,
    typer.Argument(help="The model: s3://bucket/prefix, hf://org/name, file:///absolute/path, http(s)://host/path."),
]
Source = Annotated[
    str,
    typer.Argument(metavar="DIRECTORY", help="A directory that save_pretrained wrote, or hf://org/name@revision."),
]

DEMO_NAME = "smollm2-135m"
_INTERRUPTED = 130  # as shells say it of a program that Ctrl-C ended


@app.command()
def push(directory: Source, uri: Uri) -> None:
    """Check a model, upload it as a version of its own with an index of its checksums, and make the name mean it.

    The next start of each function takes the new version; one that names URI@VERSION keeps its version.
    """
    from thaw.hub import is_hub

    if is_hub(directory):
        _push_copy(directory, uri)
    else:
        _push(Path(directory), uri)


def _push_copy(of: str, uri: str) -> None:
    """Push a model of a hub.  Its copy stays in the cache until the push has ended well."""
    from thaw.cli.demo_model import cache_dir
    from thaw.cli.hub import HubStore, copied
    from thaw.cli.progress import progress

    store = HubStore(of)
    with ExitStack() as stack:
        with progress("copying", store.index().n_bytes) as advance:
            directory = stack.enter_context(copied(store, cache_dir(), advance))
        _push(directory, uri)


def _push(directory: Path, uri: str) -> None:
    from thaw.cli import checkpoints
    from thaw.cli.progress import progress
    from thaw.cli.stores import open_store
    from thaw.cli.tables import size
    from thaw.versions import pin

    store = open_store(uri)
    total = checkpoints.check(directory)
    checkpoints.check_pushable(store)
    before = checkpoints.pointer(store)
    with progress("hashing", total) as advance:
        hashed = checkpoints.hash_files(directory, advance)
    try:
        with progress("pushing", total) as advance:
            pushed = checkpoints.upload(hashed, store, advance, before)
    except KeyboardInterrupt:
        err().print(f"stopped: {uri} is what it was; the same command goes on where this one stopped", soft_wrap=True)
        raise typer.Exit(_INTERRUPTED) from None
    index = pushed.index
    was_there = f"; {size(index.n_bytes - pushed.sent_bytes)} were there" if pushed.sent_bytes < index.n_bytes else ""
    say_ok(f"pushed {len(index.files)} files, {size(index.n_bytes)} ({index.n_bytes} bytes) to {uri}{was_there}")
    out().print(f"version {pin(uri, index.sha256)}", soft_wrap=True)
    out().print(f"sha256 {index.sha256}", soft_wrap=True)


@app.command("list")
def list_() -> None:
    """List the models in the store of the platform on this machine, or in the one that THAW_S3_ENDPOINT names."""
    from thaw.cli.listing import models
    from thaw.cli.tables import show, size, table
    from thaw.versions import short

    rows = table("model", "bytes", "tensors", "newest version", "versions")
    for found in models():
        index, n_versions = found.index, str(found.n_versions or "")
        if index is None:
            rows.add_row(found.uri, "?", "?", "(not indexed: push it again)", n_versions)
        else:
            rows.add_row(found.uri, size(index.n_bytes), str(len(index.tensors)), short(index.sha256), n_versions)
    show(rows)


@app.command()
def inspect(uri: Uri) -> None:
    """Show a model's layers, bytes and files."""
    from thaw.cli import checkpoints
    from thaw.cli.stores import open_store
    from thaw.cli.tables import show, size, table

    store = checkpoints.newest(open_store(uri))
    index = checkpoints.index_of(store)
    facts = checkpoints.read_facts(store, index)
    out().print(f"[bold]{uri}[/bold]  {facts.architecture}", soft_wrap=True)
    if store.uri != uri:
        out().print(f"newest   {store.uri}", soft_wrap=True)
    if facts.sha256:
        out().print(f"sha256   {facts.sha256}", soft_wrap=True)
    out().print(f"bytes    {facts.n_bytes} ({size(facts.n_bytes)}), weights {size(facts.weight_bytes)}")
    per_layer = f", {size(max(facts.layer_bytes))} the largest" if facts.layer_bytes else ""
    out().print(f"layers   {facts.n_layers}{per_layer}; outside of layers {size(facts.outer_bytes)}")
    rows = table("file", "bytes", "sha256")
    for file in index.files:
        rows.add_row(file.name, str(file.n_bytes), file.sha256[:16])
    show(rows)


@app.command()
def verify(uri: Uri) -> None:
    """Read a model from its store and compare every chunk with its index."""
    from thaw.cli import checkpoints
    from thaw.cli.progress import progress
    from thaw.cli.stores import open_store

    store = checkpoints.newest(open_store(uri))
    expected = checkpoints.read_index(store)
    with progress("verifying", expected.n_bytes) as advance:
        index = checkpoints.verify(store, advance)
    n_chunks = sum(len(f.chunks_xxh3) for f in index.files)
    say_ok(f"{n_chunks} chunks of {len(index.files)} files are what was pushed ({index.n_bytes} bytes)")


@app.command()
def demo(
    path_only: Annotated[
        bool, typer.Option("--path-only", help="Print the model's directory and push nothing.")
    ] = False,
) -> None:
    """Download a small real model (SmolLM2-135M-Instruct) and push it to the store that THAW_S3_ENDPOINT names, else to
    the platform on this machine."""
    from thaw.cli.demo_model import cache_dir, obtain_quietly

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
    from thaw.cli.s3 import make_bucket, names_a_store
    from thaw.dev.layout import default_layout
    from thaw.errors import Unavailable

    if names_a_store(os.environ):
        make_bucket(None, "models")
        return f"s3://models/{DEMO_NAME}"
    platform = default_layout().read_platform()
    if platform is None:
        raise Unavailable("no platform runs on this machine", hint="start one: thaw dev up")
    return platform.model_uri(DEMO_NAME)
