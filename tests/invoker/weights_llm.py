"""A container of kind llm:vllm that answers with the checksum of the weights in its segment, and computes nothing."""

from __future__ import annotations

import hashlib
import os

from relay.clients.fetch import DescriptorClient
from tests.invoker import fake_llm


class Handler(fake_llm.Handler):
    weights = ""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/init":
            Handler.weights = _weights()
        self._json(200, {"ok": True, "weights": self.weights})


def _weights() -> str:
    """The SHA-256 of every byte of the safetensors files, in the order of the segment."""
    descriptors = DescriptorClient.connect(os.environ["THAW_DOOR"])
    reader = descriptors.segment(deadline_s=20)
    reader.wait(reader.n_bytes, 20)
    digest = hashlib.sha256()
    for part in reader.offer.layout:
        if part.file.endswith(".safetensors"):
            digest.update(reader.view(part.segment_offset, part.n_bytes))
    reader.close()
    descriptors.close()
    return digest.hexdigest()


if __name__ == "__main__":
    fake_llm.Server(os.environ["THAW_SOCKET"], Handler).serve_forever()
