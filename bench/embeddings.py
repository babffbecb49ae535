"""How many embeddings a second are there, against vLLM's own server on the same machine?

SmolLM2-135M, as an embedding model that takes the vector of the last token, is warm in both.  A round sends the same
texts to each of them in turn, in requests of several texts from several clients at once.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from bench import _common, _model
from bench._common import interleave, judge, median, say
from bench._platform import BenchPlatform, llm_config
from bench._vllm import VllmServer
from thaw.checkpoints import pooling
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.cli.platform_api.property_file import read_properties
from thaw.dev.smollm2 import obtain

_ACTION: Final = "chat"  # as vLLM's server calls its model
_CLIENTS: Final = 4
_TEXTS_EACH: Final = 32
_WORDS: Final = 48
_TIMEOUT_S: Final = 600
_AT_ONCE: Final = 128
_MODULES: Final = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


class Server:
    """Embeds lists of texts over one connection for each client."""

    def __init__(self, url: str, auth: str = "") -> None:
        self._headers = {"Content-Type": "application/json"}
        if auth:
            self._headers["Authorization"] = "Basic " + base64.b64encode(auth.encode()).decode()
        place = urlsplit(url).netloc
        self._connections = [http.client.HTTPConnection(place, timeout=_TIMEOUT_S) for _ in range(_CLIENTS)]

    def per_second(self, texts: Sequence[str]) -> float:
        """Texts a second.  Raises SystemExit when the server fails to answer: nothing was measured then."""
        parts = [texts[i : i + _TEXTS_EACH] for i in range(0, len(texts), _TEXTS_EACH)]
        for connection in self._connections:  # while the other server was measured, this one may have closed them
            connection.close()
            connection.connect()
        began_s = time.perf_counter()
        with ThreadPoolExecutor(_CLIENTS) as pool:
            counts = list(pool.map(lambda i: self._ask(i, parts[i::_CLIENTS]), range(_CLIENTS)))
        if sum(counts) != len(texts):
            raise SystemExit(f"{sum(counts)} vectors came for {len(texts)} texts")
        return len(texts) / (time.perf_counter() - began_s)

    def _ask(self, client: int, parts: Sequence[Sequence[str]]) -> int:
        connection, n = self._connections[client], 0
        for part in parts:
            body = json.dumps({"model": _ACTION, "input": list(part), "encoding_format": "base64"})
            connection.request("POST", "/v1/embeddings", body, self._headers)
            answer = connection.getresponse()
            data = answer.read()
            if answer.status != 200:
                raise SystemExit(f"{answer.status}: {data[:500]!r}")
            n += len(json.loads(data)["data"])
        return n

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def texts_of(n: int) -> list[str]:
    """All different, so that no prefix cache has them."""
    draws = random.Random(7)
    words = ["sea", "ship", "wind", "north", "star", "harbour", "rope", "sail", "night", "island"]
    return [f"{i} " + " ".join(draws.choice(words) for _ in range(_WORDS)) for i in range(n)]


def write_pooling(model: Path) -> None:
    (model / "1_Pooling").mkdir()
    (model / pooling.POOLING_NAME).write_text(json.dumps({"pooling_mode_lasttoken": True}))
    (model / pooling.MODULES_NAME).write_text(json.dumps(_MODULES))


def main() -> int:
    options = _common.options(__doc__ or "", texts=(0, "of a round"))
    rounds = options.n or (1 if options.quick else 7)
    n_texts = options.texts or (64 if options.quick else 2048)
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        model = work / "store" / "model"
        shutil.copytree(obtain(cache_dir(), say), model)
        write_pooling(model)
        _model.write_index(model)
        threads = len(os.sched_getaffinity(0))
        plain = stack.enter_context(VllmServer(model, work, threads=threads, max_num_seqs=_AT_ONCE))
        platform = stack.enter_context(BenchPlatform(work / "state", store=work / "store"))
        platform.deploy(_ACTION, llm_config(f"file://{model}"))
        auth = read_properties(platform.layout.wskprops)["AUTH"]
        thaw, vllm = Server(platform.platform.apihost, auth), Server(plain.url)
        stack.callback(thaw.close)
        stack.callback(vllm.close)
        numbers = iter(range(1_000_000))

        def measured(server: Server) -> float:
            """No text comes twice to a server, whose prefix cache may have it."""
            mark = next(numbers)
            return server.per_second([f"{mark} {text}" for text in texts_of(n_texts)])

        works = {"thaw": lambda: measured(thaw), "vllm": lambda: measured(vllm)}
        interleave(works, 1)
        found = interleave(works, rounds)
    ratios = [ours / theirs for ours, theirs in zip(found["thaw"], found["vllm"], strict=True)]
    per_second = {name: round(median(values), 1) for name, values in found.items()}
    goal = judge("vs_vllm", median(ratios), ">=", 0.97, floor=f"texts per second: {per_second}")
    return _common.report("embeddings", [goal], rounds=rounds, n_texts=n_texts, per_second=per_second)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
