"""A private registry of images: Debian's docker-registry, the distribution project's own program, on loopback.

Its users are in a file in htpasswd's form, which it reads again when it changes.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from docker.models.images import Image

from tests.conftest import free_port
from tests.docker.engine import DockerEngine

USER: Final = "team"
PASSWORDS: Final = {
    "first": "$2y$04$firstfirstfirstfirstfuddiouS9q1pNCEL3B2Ic1d6CV6nGC7yO",
    "second": "$2y$04$secondsecondsecondsecuyPTNL0LlHYueFb2y9tO/kU4IHhyZPni",
}
"""The registry takes bcrypt only, which Python lacks.  These are hashes of the lowest cost."""
_READY_S: Final = 30.0


class PrivateRegistry:
    def __init__(self, directory: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._directory = directory
        self.set_password("first")

    def set_password(self, password: str) -> None:
        """From now on the user has this one and no other."""
        new = self._directory / "users.new"
        new.write_text(f"{USER}:{PASSWORDS[password]}\n")
        new.rename(self._directory / "users")

    @contextmanager
    def running(self) -> Iterator[None]:
        program = shutil.which("docker-registry")
        assert program is not None, "these tests need a registry: apt-get install -y docker-registry"
        config = self._directory / "registry.yml"
        config.write_text(
            f"version: 0.1\nlog: {{accesslog: {{disabled: true}}}}\nhttp: {{addr: '{self.address}', secret: none}}\n"
            f"storage: {{filesystem: {{rootdirectory: {self._directory / 'data'}}}}}\n"
            f"auth: {{htpasswd: {{realm: thaw, path: {self._directory / 'users'}}}}}\n"
        )
        with subprocess.Popen([program, "serve", str(config)], stderr=subprocess.PIPE, text=True) as process:
            try:
                _await_listening(process)
                yield
            finally:
                process.terminate()

    def push(self, engine: DockerEngine, image: str, name: str) -> str:
        """Move an image of the engine to this registry, and return its name there."""
        tag = f"{self.address}/{name}:1"
        engine.client.images.get(image).tag(tag)
        said = engine.client.images.push(tag, auth_config={"username": USER, "password": "first"})
        assert '"error"' not in said, said
        engine.client.images.remove(tag)
        engine.client.images.remove(image)
        return tag

    def images_on(self, engine: DockerEngine) -> list[Image]:
        """Those that the engine has pulled from here."""
        return [
            image
            for image in engine.client.images.list()
            if any(digest.startswith(self.address) for digest in image.attrs["RepoDigests"] or ())
        ]


def log_in(folder: Path, registry: str, password: str) -> None:
    """Write what `docker login` writes into a folder that DOCKER_CONFIG names."""
    folder.mkdir(exist_ok=True)
    secret = base64.b64encode(f"{USER}:{password}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {registry: {"auth": secret}}}))


def _await_listening(process: subprocess.Popen[str]) -> None:
    listening = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if "listening on" in line:
                listening.set()

    threading.Thread(target=read, name="registry-log", daemon=True).start()
    assert listening.wait(_READY_S), "the registry does not listen"
