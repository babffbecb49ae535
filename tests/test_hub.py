"""The hub of the tests against a client that knows the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub import LoopbackHub

WEIGHTS = bytes(range(256)) * 5000
FILES = {"config.json": b'{"a": 1}', "model.safetensors": WEIGHTS}

CLIENT = """
import sys
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
endpoint, directory = sys.argv[1:]
api = HfApi(endpoint=endpoint, token="good")
print(api.model_info("org/open", revision="main").sha)
print(sorted((f.path, f.size, f.lfs.sha256 if f.lfs else "") for f in api.list_repo_tree("org/open")))
def get(repository, name="config.json", token=False, **more):
    return hf_hub_download(repository, name, endpoint=endpoint, cache_dir=directory, token=token, **more)
print(sorted(len(open(get("org/open", name), "rb").read()) for name in ("config.json", "model.safetensors")))
for arguments in ({"repository": "org/gated"}, {"repository": "org/none"}, {"repository": "org/open", "revision": "v9"},
                  {"repository": "org/open", "name": "none.json"}):
    try:
        get(**arguments)
    except Exception as e:
        print(type(e).__name__)
get("org/gated", token="good")  # last: what is in the cache is not asked for again
"""


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub(page_size=1) as running:
        running.tokens = {"good"}
        running.add("org/open", FILES)
        running.add("org/gated", FILES, opens=frozenset({"good"}), is_gated=True)
        yield running


def test_the_hub_of_the_tests_is_understood_by_the_client_of_the_real_one(hub: LoopbackHub, tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}  # no offline mode
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, hub.endpoint, str(tmp_path / "cache")],
        env=kept | {"HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    sha, listed, lengths, *errors = done.stdout.splitlines()
    assert sha == hub.repositories["org/open"].branches["main"]
    assert f"('model.safetensors', {len(WEIGHTS)}, '" in listed
    assert lengths == f"[{len(FILES['config.json'])}, {len(WEIGHTS)}]"
    assert errors == ["GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError", "RemoteEntryNotFoundError"]
