"""Packages of a requirements.txt: real uv, an index of the test's own wheels."""

from __future__ import annotations

import hashlib
import os
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from invoker.drivers.layer_directory import layers_of
from invoker.packages import installer as installer_module
from invoker.packages.index import from_pip
from invoker.packages.installer import UID, Installer, others_can_reach
from invoker.packages.layers import Layers
from tests.wheels import add_source, add_wheel
from thaw.errors import BadRequest, InitFailed, Unavailable
from thaw.logs import Log

DEADLINE_S = 60.0
MakeLayers = Callable[..., Layers]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder that the installer's own user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="thaw-", dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def make(tmp_path: Path, index: Path) -> MakeLayers:
    def made(
        most_bytes: int = 4 << 30, in_use: Collection[tuple[str, ...]] = (), url: str = "", name: str = "run"
    ) -> Layers:
        log = Log("invoker")
        found = Installer(url or index.as_uri(), log)
        return Layers(layers_of(tmp_path / name), found, most_bytes, lambda: in_use, log)

    return made


def layer(tmp_path: Path, layers: Layers, packages: tuple[str, ...]) -> Path:
    return tmp_path / "run" / "packages" / layers.name(packages)


def left(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "run" / "packages").iterdir() if path.name.startswith("work-")]


def test_what_is_asked_for_is_locked_and_installed_with_what_it_needs(
    tmp_path: Path, index: Path, make: MakeLayers
) -> None:
    add_wheel(index, "below", "1.0", {"below.py": "WHAT = 'below'"})
    add_wheel(index, "above", "2.0", {"above.py": "from below import WHAT", "above.pth": "import os"}, ["below>=1"])
    add_wheel(index, "above", "3.0", {"above.py": ""})
    layers = make()
    found = layers.lock(("above<3",), "guest", deadline_s=DEADLINE_S)
    assert [line.partition(" --hash=sha256:")[0] for line in found] == ["above==2.0", "below==1.0"]
    assert all("--hash=sha256:" in line for line in found)
    made = layer(tmp_path, layers, found)
    code = f"import sys; sys.path.insert(1, {str(made)!r}); import above; print(above.WHAT)"
    said = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "below\n"
    for path in (made, *made.rglob("*")):
        mode = path.lstat().st_mode
        assert stat.S_ISDIR(mode) or stat.S_ISREG(mode)
        assert path.lstat().st_uid == os.geteuid()
        assert not mode & 0o022
    assert stat.S_IMODE((tmp_path / "run" / "packages").stat().st_mode) == 0o711
    assert left(tmp_path) == []
    shutil.rmtree(index)
    assert make().ensure(found, deadline_s=DEADLINE_S) == made.name  # another start finds it, without the index


def test_another_host_installs_the_same_files_or_none(index: Path, make: MakeLayers) -> None:
    wheel = add_wheel(index, "it", "1.0", {"it.py": "A = 1"})
    found = make().lock(("it",), "guest", deadline_s=DEADLINE_S)
    wheel.unlink()
    add_wheel(index, "it", "1.0", {"it.py": "A = 2"})
    with pytest.raises(InitFailed, match="it==1.0|`it`"):
        make(name="other").ensure(found, deadline_s=DEADLINE_S)


def test_hosts_do_not_have_the_same_names_so_nobody_guesses_one(make: MakeLayers) -> None:
    assert make().name(("it==1",)) == make().name(("it==1",))
    assert make().name(("it==1",)) != make(name="other").name(("it==1",))


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("absent>=1", "absent"),
        ("it==7", "it==7"),
        ("source", "source"),
        ("bypath", "evil"),
        ("it; nonsense == '1'", ""),
    ],
)
def test_what_cannot_be_installed_is_named(
    asked: str, names: str, tmp_path: Path, index: Path, make: MakeLayers
) -> None:
    add_wheel(index, "it", "1.0", {"it.py": ""})
    add_source(index, "source", "1.0", "")
    evil = tmp_path / "evil-1.0.tar.gz"
    evil.write_bytes(b"")
    add_wheel(index, "bypath", "1.0", {}, [f"evil @ {evil.as_uri()}"])
    with pytest.raises(BadRequest, match="The packages of requirements.txt cannot be installed: ") as caught:
        make().lock((asked,), "guest", deadline_s=DEADLINE_S)
    assert names in caught.value.message
    assert left(tmp_path) == []


def test_no_code_of_a_source_package_runs(tmp_path: Path, index: Path, make: MakeLayers) -> None:
    """Neither when it is asked for, nor when another package needs it, by name or by URL, nor when it is locked."""
    seen = tmp_path / "seen"
    seen.mkdir()
    seen.chmod(0o777)  # whoever runs the code could write there
    hostile = f"import os\nopen({str(seen / 'ran')!r}, 'w').write(open('/etc/shadow').read() + str(os.environ))\n"
    source = add_source(index, "hostile", "1.0", hostile)
    add_wheel(index, "needs", "1.0", {"needs.py": ""}, ["hostile"])
    add_wheel(index, "points", "1.0", {"points.py": ""}, [f"hostile @ {source.as_uri()}"])
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    for asked in ("hostile", "needs", "points", f"hostile==1.0 --hash=sha256:{digest}"):
        with pytest.raises(BadRequest, match="The packages of requirements.txt cannot be installed: .*hostile"):
            make().lock((asked,), "guest", deadline_s=DEADLINE_S)
    assert list(seen.iterdir()) == []


def test_an_index_that_does_not_answer_is_the_platforms_failure(make: MakeLayers) -> None:
    with pytest.raises(Unavailable, match="The package index does not answer"):
        make(url="http://127.0.0.1:9/simple").lock(("it",), "guest", deadline_s=DEADLINE_S)


def test_an_operator_can_turn_installing_off(make: MakeLayers) -> None:
    with pytest.raises(BadRequest, match="installs no packages"):
        make(url="off").lock(("it",), "guest", deadline_s=DEADLINE_S)


def test_a_wheel_that_unpacks_to_more_than_the_bound_is_refused_and_leaves_nothing(
    tmp_path: Path, index: Path, make: MakeLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer_module, "LAYER_BYTES", 4 << 20)
    add_wheel(index, "bomb", "1.0", {"bomb.bin": bytes(64 << 20)})
    with pytest.raises(BadRequest, match="larger than 4 MiB"):
        make().lock(("bomb",), "guest", deadline_s=DEADLINE_S)
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["../outside.py", "/outside.py"])
def test_a_wheel_writes_nothing_outside_its_layer(name: str, tmp_path: Path, index: Path, make: MakeLayers) -> None:
    add_wheel(index, "climber", "1.0", {name: "evil", "climber.py": ""})
    layers = make()
    found = layers.lock(("climber",), "guest", deadline_s=DEADLINE_S)
    assert (layer(tmp_path, layers, found) / "climber.py").exists()
    assert not list(tmp_path.rglob("outside.py"))
    assert not Path("/outside.py").exists()


def test_a_link_in_a_wheel_becomes_no_link(tmp_path: Path, index: Path, make: MakeLayers) -> None:
    wheel = add_wheel(index, "linked", "1.0", {"linked.py": ""})
    with zipfile.ZipFile(wheel, "a") as archive:
        entry = zipfile.ZipInfo("secrets.txt")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc/passwd")
    (index / "linked" / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    layers = make()
    made = layer(tmp_path, layers, layers.lock(("linked",), "guest", deadline_s=DEADLINE_S))
    assert (made / "secrets.txt").read_text() == "/etc/passwd"
    assert not (made / "secrets.txt").is_symlink()


def test_deploys_at_once_install_once(tmp_path: Path, index: Path, make: MakeLayers) -> None:
    add_wheel(index, "it", "1.0", {"it.py": ""})
    layers, answers = make(), []

    def deploy(namespace: str) -> None:
        answers.append(layers.lock(("it",), namespace, deadline_s=DEADLINE_S))

    threads = [threading.Thread(target=deploy, args=(name,)) for name in ("a", "a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(answers) == 3
    assert len(set(answers)) == 1
    assert layer(tmp_path, layers, answers[0]).is_dir()
    assert left(tmp_path) == []


def test_layers_in_use_stay_and_others_make_room(tmp_path: Path, index: Path, make: MakeLayers) -> None:
    for name in ("a", "b", "c"):
        add_wheel(index, name, "1.0", {f"{name}.py": os.urandom(200_000).hex()})
    used = make().lock(("a",), "guest", deadline_s=DEADLINE_S)
    unused = make().lock(("b",), "guest", deadline_s=DEADLINE_S)
    layers = make(most_bytes=installer_module.LAYER_BYTES + 600_000, in_use={used})
    layers.lock(("c",), "guest", deadline_s=DEADLINE_S)
    assert layer(tmp_path, layers, used).is_dir()
    assert not layer(tmp_path, layers, unused).exists()
    with pytest.raises(Unavailable, match="fill their space"):
        make(most_bytes=1000, in_use={used}).lock(("b",), "guest", deadline_s=DEADLINE_S)


def test_what_a_killed_invoker_left_goes_and_layers_of_another_boot_too(
    tmp_path: Path, index: Path, make: MakeLayers
) -> None:
    add_wheel(index, "it", "1.0", {"it.py": ""})
    layers = make()
    found = layers.lock(("it",), "guest", deadline_s=DEADLINE_S)
    root = tmp_path / "run" / "packages"
    (root / "work-old").mkdir()
    os.utime(root / "work-old", (1, 1))
    (root / "boot").write_text("another one")
    again = make()
    assert not layer(tmp_path, layers, found).exists()
    again.lock(("it",), "guest", deadline_s=DEADLINE_S)
    assert left(tmp_path) == []


def test_the_program_ends_with_the_invoker(tmp_path: Path) -> None:
    """The parent is killed; the program, which would sleep, is gone with it."""
    confined = Path(installer_module.__file__).with_name("confined.py")
    code = (
        "import subprocess, sys, os\n"
        f"p = subprocess.Popen([sys.executable, '-I', {str(confined)!r}, '0', '1000', '60', '/bin/sh', '-c', "
        "'echo ready; exec sleep 60'], start_new_session=True, stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout
    pid = int(said)
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([descriptor], [], [], 10.0)[0]
    os.close(descriptor)


def test_the_program_runs_as_a_user_of_its_own_that_cannot_go_back() -> None:
    """This test needs root, as tests of disks do, too."""
    confined = Path(installer_module.__file__).with_name("confined.py")
    program = ("/bin/sh", "-c", "grep -E 'Uid|Groups|CapEff' /proc/self/status")
    command = [sys.executable, "-I", str(confined), str(UID), "1000", "60", *program]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert said == ["Uid:", *[str(UID)] * 4, "Groups:", "CapEff:", "0" * 16]


def test_an_installer_with_a_defect_finds_no_secret(
    tmp_path: Path, make: MakeLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in uv's place does what it can.  It is not root, and has neither the invoker's files nor variables."""
    secret, program = tmp_path / "secret", tmp_path / "uv"
    secret.write_text("of the platform")
    secret.chmod(0o600)
    program.write_text(
        f"#!/bin/sh\nid -u; env; cat {secret}; cat /proc/{os.getpid()}/environ; touch {tmp_path}/written; exit 9\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("THAW_STATE_URL", "redis://:of-the-state@host")
    monkeypatch.setattr(installer_module, "find_uv_bin", lambda: str(program))
    said: list[str] = []
    monkeypatch.setattr(installer_module, "_why", lambda end: said.append(end.said) or BadRequest("it failed"))
    with pytest.raises(BadRequest, match="it failed"):
        make().lock(("it",), "guest", deadline_s=DEADLINE_S)
    assert said[0].splitlines()[0] == str(UID)
    assert said[0].count("Permission denied") == 3
    assert "of the platform" not in said[0]
    assert "THAW_STATE_URL" not in said[0]
    assert not (tmp_path / "written").exists()


def test_pips_configuration_says_where_packages_are() -> None:
    assert from_pip(
        "global.index-url='https://a/simple'\nglobal.find-links='/w\\n/v'\nglobal.timeout='9'\n:env:.index-url='https://b'\n"
    ) == {"UV_DEFAULT_INDEX": "https://b", "UV_FIND_LINKS": "/w,/v"}


def test_a_program_below_a_closed_folder_cannot_be_run_by_others(tmp_path: Path) -> None:
    program = tmp_path / "p"
    program.write_text("")
    program.chmod(0o755)
    tmp_path.chmod(0o700)
    assert not others_can_reach(str(program))
    assert others_can_reach("/bin/sh")
