"""OpenWhisk's contract for action containers, sentence by sentence (BasicActionRunnerTests)."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest

from relay.clients.http_unix import UnixConnection
from tests.runtime_python.conftest import ROOT, WAIT_S, Proxy, packed, running, zipped
from thaw_runtime.action import child

SENTINEL = "XXX_THE_END_OF_A_WHISK_ACTIVATION_XXX\n"
ECHO = "def main(args):\n    return args\n"


def test_init_then_run(proxy: Proxy) -> None:
    assert proxy.init(ECHO) == (200, {"ok": True})
    for value in ({}, {"a": [1, None, "ü"]}, {"nested": {"x": 1.5}}):
        assert proxy.run(value) == (200, value)


def test_a_list_is_a_result_and_another_main_is_called_by_name(proxy: Proxy) -> None:
    proxy.init("def niam(args):\n    return [1, 2]\n", main="niam")
    assert proxy.run() == (200, [1, 2])


def test_a_second_init_is_refused(proxy: Proxy) -> None:
    proxy.init(ECHO)
    status, body = proxy.init(ECHO)
    assert (status, body["error"]) == (403, "Cannot initialize the action more than once.")


def test_an_init_without_code_or_whose_body_is_no_object_is_refused_and_may_be_repeated(proxy: Proxy) -> None:
    for value in ({}, {"code": ""}, {"name": "f"}):
        status, answer = proxy.post("/init", {"value": value})
        assert (status, answer["error"]) == (403, "Missing main/no code to execute."), value
    for body in (b"", b"{", b"[]", b"\xff"):
        assert proxy.post("/init", body)[0] == 400, body
    assert proxy.init(ECHO)[0] == 200


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def main(args:", """/main__.py", line 1\n    def main(args:"""),
        ("raise RuntimeError('at load')", "RuntimeError: at load"),
        ("def niam(args): pass", "Invalid action: it has no function 'main'"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import os; os._exit(3)", ""),
        ("import sys; sys.exit('enough')", "Invalid action: it exits while it is loaded: enough"),
    ],
    ids=["syntax error", "raises", "no main", "no module", "ends", "exits"],
)
def test_code_that_does_not_load_is_502_and_says_why(proxy: Proxy, code: str, said: str) -> None:
    status, body = proxy.init(code)
    assert status == 502
    assert body["error"] == "The action failed to generate or locate a binary. See logs for details."
    assert body["info"]["code"] == "InitFailed"
    assert said in proxy.err
    assert "thaw_runtime" not in proxy.err


def test_env_is_exported_before_the_code_is_loaded(proxy: Proxy) -> None:
    code = "import os\nSEEN = os.environ['KEY'], os.environ['N']\ndef main(args):\n    return {'seen': SEEN}\n"
    proxy.init(code, env={"KEY": "value", "N": 5})
    assert proxy.run() == (200, {"seen": ["value", "5"]})


def test_the_runs_context_is_fresh_each_time(proxy: Proxy) -> None:
    code = "import os\ndef main(args):\n    return {k: v for k, v in os.environ.items() if k.startswith(('__OW', 'THAW'))}\n"
    proxy.init(code, env={"__OW_API_HOST": "h"})
    _, first = proxy.run(activation_id="1", namespace="guest", deadline="99", extra={"a": 1})
    assert first == {
        "__OW_API_HOST": "h",
        "__OW_ACTIVATION_ID": "1",
        "__OW_NAMESPACE": "guest",
        "__OW_DEADLINE": "99",
        "__OW_EXTRA": "{'a': 1}",
    }
    assert proxy.run(activation_id="2")[1] == {"__OW_API_HOST": "h", "__OW_ACTIVATION_ID": "2"}


def test_a_runs_key_is_gone_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that the function left behind would find it."""
    monkeypatch.setattr(os, "environ", {})
    seen: list[str] = []

    def main(_: object) -> dict[str, object]:
        seen.append(os.environ["__OW_API_KEY"])
        raise ValueError

    child._answer(main, b'{"api_key": "k"}')
    assert (seen, "__OW_API_KEY" in os.environ) == (["k"], False)


def test_an_exception_is_the_result_and_its_traceback_is_on_stderr(proxy: Proxy) -> None:
    proxy.init("def main(args):\n    raise KeyError('k')\n")
    assert proxy.run() == (200, {"error": "'k'"})
    assert "KeyError: 'k'" in proxy.err
    assert proxy.err.endswith(SENTINEL)
    assert proxy.out == SENTINEL


def test_what_is_no_json_object_or_array_is_502_and_the_container_still_works(proxy: Proxy) -> None:
    proxy.init("def main(args):\n    return eval(args['result'])\n")
    for result in ("'x'", "1", "None", "True", "{'a': object()}", "{1, 2}"):
        said = proxy.run({"result": result})
        assert said == (502, {"error": "The action did not return a dictionary or array."}), result
    assert proxy.run({"result": "{}"}) == (200, {})


def test_the_sentinel_follows_every_run_on_both_streams(proxy: Proxy) -> None:
    code = "import sys\ndef main(args):\n    print('out', end='')\n    print('err', file=sys.stderr)\n    return {}\n"
    proxy.init(code)
    proxy.run()
    proxy.run()
    assert proxy.out == f"out\n{SENTINEL}" * 2
    assert proxy.err == f"err\n{SENTINEL}" * 2


@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(1)"])
def test_a_child_that_ends_is_command_exited(proxy: Proxy, how: str) -> None:
    proxy.init(f"import os, sys\ndef main(args):\n    print('last words', flush=True)\n    {how}\n")
    status, body = proxy.run()
    assert (status, body["error"]) == (400, "command exited")
    assert proxy.process.wait(WAIT_S) == 70
    assert proxy.out == f"last words\n{SENTINEL}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGRTMIN + 1])
def test_a_child_that_was_killed_is_a_lost_worker_and_says_by_what(proxy: Proxy, number: int) -> None:
    killed = f"print('last words', flush=True)\n    os.kill(os.getpid(), {number:d})"
    proxy.init(f"import os\ndef main(args):\n    {killed}\n")
    status, body = proxy.run()
    name = number.name if isinstance(number, signal.Signals) else f"signal {number}"
    said = f"The function's process was killed by {name} while it ran."
    hint = "it used more memory than its limit, crashed, or was killed from outside"
    assert (status, body) == (500, {"error": said, "info": {"code": "WorkerLost", "message": said, "hint": hint}})
    assert proxy.process.wait(WAIT_S) == 128 + number
    assert proxy.out == f"last words\n{SENTINEL}"


def test_a_child_killed_while_it_loads_the_function_is_no_fault_of_the_code(proxy: Proxy) -> None:
    status, body = proxy.init("import os\nos.kill(os.getpid(), 9)\n")
    assert (status, body["info"]["code"]) == (500, "WorkerLost")
    assert body["error"] == "The function's process was killed by SIGKILL while it was loaded."
    assert proxy.init("import os\n")[0] == 403


def test_a_child_that_ends_between_runs_takes_its_container_along(proxy: Proxy) -> None:
    proxy.init("import os\ndef main(args):\n    return {'pid': os.getpid()}\n")
    os.kill(proxy.run()[1]["pid"], 9)
    assert proxy.process.wait(WAIT_S) == 128 + 9


def test_a_child_that_ends_before_its_init_takes_its_container_along(proxy: Proxy) -> None:
    pid = proxy.process.pid
    os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text()), 9)
    assert proxy.process.wait(WAIT_S) == 128 + 9


HALF_AN_ANSWER = """
    import stat, struct
    fds = [fd for fd in range(3, 100) if os.path.exists(f'/proc/self/fd/{fd}') and stat.S_ISSOCK(os.fstat(fd).st_mode)]
    os.write(fds[0], struct.pack('<IQH', 1000, 1, 200) + b'{')
"""


@pytest.mark.parametrize("last", ["", HALF_AN_ANSWER])
def test_a_process_that_the_function_left_behind_does_not_hide_its_end(proxy: Proxy, last: str) -> None:
    """The fork has the child's socket and its output."""
    code = (
        "import os, signal\ndef main(args):\n    if not (left := os.fork()):\n        signal.pause()\n"
        f"    open('left', 'w').write(str(left))\n{last}\n    os.kill(os.getpid(), 9)\n"
    )
    proxy.init(f"import os\nos.chdir({str(proxy.directory)!r})\n{code}")
    try:
        status, body = proxy.run()
        assert (status, body["info"]["code"]) == (500, "WorkerLost")
        assert proxy.process.wait(WAIT_S) == 128 + 9
    finally:
        os.kill(int((proxy.directory / "left").read_text()), 9)


def test_every_run_is_answered_when_the_child_ends(proxy: Proxy) -> None:
    code = (
        "import os, threading\nb = threading.Barrier(4, timeout=10)\ndef main(args):\n    b.wait()\n    os._exit(1)\n"
    )
    proxy.init(code, concurrency=4)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        statuses = [status for status, _ in pool.map(proxy.run, [{}] * 4)]
    assert statuses == [400] * 4
    assert proxy.process.wait(WAIT_S) == 70


def test_a_hundred_megabytes_are_cut_and_the_next_run_is_whole(proxy: Proxy) -> None:
    proxy.init("def main(a):\n    for _ in range(a['n']):\n        print('x' * 999999)\n    return {}\n")
    assert proxy.run({"n": 100}) == (200, {})
    assert len(proxy.out) < 11 * 1024 * 1024
    assert proxy.out.endswith("exceeds the limit of 10485760 bytes.\n" + SENTINEL)
    assert proxy.run({"n": 1}) == (200, {})
    assert proxy.out.endswith("x" * 999999 + "\n" + SENTINEL)


def test_a_large_result_comes_whole(proxy: Proxy) -> None:
    proxy.init("def main(args):\n    return {'x': 'y' * args['n']}\n")
    assert proxy.run({"n": 20_000_000}) == (200, {"x": "y" * 20_000_000})


def hang_up(connection: UnixConnection) -> None:
    assert connection.sock is not None
    connection.sock.shutdown(2)
    connection.close()


def test_a_caller_that_hangs_up_ends_the_run_with_its_container(proxy: Proxy) -> None:
    proxy.init("import time\ndef main(args):\n    print('began', flush=True)\n    time.sleep(60)\n")
    connection = UnixConnection(proxy.socket, WAIT_S)
    connection.request("POST", "/run", b'{"value": {}}')
    hang_up(connection)
    assert proxy.process.wait(WAIT_S) == 71


BESIDE = """\
import os, threading
both = threading.Barrier(2, timeout=10)
def main(args):
    if not args:
        return {}
    both.wait()
    if args['fifo'] == 'never':
        threading.Event().wait()
    return {'read': open(args['fifo']).read()}
"""


def beside(proxy: Proxy) -> tuple[UnixConnection, UnixConnection, Path]:
    """Begin two runs in one container: one never ends, and one returns the text that is written to the named pipe."""
    fifo = proxy.directory / "fifo"
    os.mkfifo(fifo)
    proxy.init(BESIDE, concurrency=3)
    endless, other = UnixConnection(proxy.socket, WAIT_S), UnixConnection(proxy.socket, WAIT_S)
    endless.request("POST", "/run", json.dumps({"value": {"fifo": "never"}}))
    other.request("POST", "/run", json.dumps({"value": {"fifo": str(fifo)}}))
    return endless, other, fifo


def test_a_caller_that_hangs_up_leaves_its_container_to_those_who_wait(proxy: Proxy) -> None:
    endless, other, fifo = beside(proxy)
    with fifo.open("w") as pipe:  # the run has opened the pipe, so both runs have begun
        hang_up(endless)
        assert proxy.run() == (200, {})  # its answer comes after the hangup
        pipe.write("text")
    response = other.getresponse()
    assert (response.status, json.loads(response.read())) == (200, {"read": "text"})
    other.close()
    assert proxy.process.wait(WAIT_S) == 71  # no caller waits any more


def test_a_container_whose_callers_have_all_hung_up_ends(proxy: Proxy) -> None:
    endless, other, fifo = beside(proxy)
    with fifo.open("w"):
        hang_up(endless)
        hang_up(other)
        assert proxy.process.wait(WAIT_S) == 71


def test_runs_overlap_when_the_action_allows_it(proxy: Proxy) -> None:
    code = "import threading\nb = threading.Barrier(3, timeout=10)\ndef main(args):\n    b.wait()\n    return args\n"
    proxy.init(code, concurrency=3)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = list(pool.map(proxy.run, [{"n": n} for n in range(1, 4)]))
    assert results == [(200, {"n": n}) for n in range(1, 4)]


def test_a_zip_brings_its_modules_and_files(proxy: Proxy) -> None:
    main = "import m\ndef main(args):\n    return {'m': m.X, 'f': open('data.txt').read()}\n"
    code = zipped({"__main__.py": main, "m.py": "X = 1\n", "data.txt": "text"})
    assert proxy.init(code, binary=True) == (200, {"ok": True})
    assert proxy.run() == (200, {"m": 1, "f": "text"})


def test_an_action_is_imported_as_openwhisk_imports_it(proxy: Proxy) -> None:
    """What a file does as a program it does not do, its file is there, and a traceback shows its lines."""
    code = """\ufeff
import os, pickle
class Kept: pass
def main(args):
    kept = type(pickle.loads(pickle.dumps(Kept()))) is Kept
    if args: raise ValueError('in a line')
    return {'name': __name__, 'file': os.path.basename(__file__), 'source': 'Kept' in open(__file__).read(), 'kept': kept}
if __name__ == '__main__':
    raise SystemExit('run as a program')
"""
    assert proxy.init(code) == (200, {"ok": True})
    assert proxy.run() == (200, {"name": "main__", "file": "main__.py", "source": True, "kept": True})
    assert proxy.run({"a": 1}) == (200, {"error": "in a line"})
    assert "if args: raise ValueError('in a line')" in proxy.err


def test_a_zip_keeps_modes_links_and_the_encoding_of_its_source(proxy: Proxy) -> None:
    main = b"""# -*- coding: latin-1 -*-
import subprocess
def main(args):
    said = subprocess.run(['bin/tool'], capture_output=True, text=True, check=True).stdout
    return {'said': said, 'link': open('link').read(), 'letter': '\xe9'}
"""
    files = [
        ("__main__.py", 0o100644, main),
        ("bin/tool", 0o100755, b"#!/bin/sh\nprintf ran\n"),
        ("data/text", 0o100600, b"linked"),
        ("link", 0o120777, b"data/text"),
    ]
    assert proxy.init(packed(files), binary=True) == (200, {"ok": True})
    assert proxy.run() == (200, {"said": "ran", "link": "linked", "letter": "é"})


def test_a_zip_whose_link_leads_out_of_it_is_refused(proxy: Proxy) -> None:
    files = [("__main__.py", 0o100644, ECHO.encode()), ("out", 0o120777, b"../../etc")]
    assert proxy.init(packed(files), binary=True)[0] == 502
    assert "Invalid action: its zip has a link that leads out of it: out to ../../etc" in proxy.err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("not base64 at all", "its code is not a zip file that can be read"),
        (base64.b64encode(b"not a zip").decode(), "its code is not a zip file that can be read"),
        (zipped({"other.py": ECHO, "data": "x"}), "the zip has no __main__.py at its top, only data, other.py"),
    ],
    ids=["no base64", "no zip", "no __main__"],
)
def test_a_broken_zip_is_502_and_says_why(proxy: Proxy, code: str, said: str) -> None:
    assert proxy.init(code, binary=True)[0] == 502
    assert f"Invalid action: {said}" in proxy.err


def test_health_says_where_it_stands_and_a_container_without_code_runs_nothing(proxy: Proxy) -> None:
    def health() -> object:
        connection = UnixConnection(proxy.socket, WAIT_S)
        connection.request("GET", "/health")
        plain = json.loads(connection.getresponse().read())
        connection.close()
        return plain

    assert health() == {"state": "new", "inflight": 0}
    status, body = proxy.run()
    assert (status, body["error"]) == (500, "no action defined yet")
    proxy.init(ECHO)
    assert health() == {"state": "ready", "inflight": 0}


def test_sigterm_ends_proxy_and_child(proxy: Proxy) -> None:
    proxy.init("import os\ndef main(args):\n    return {'pid': os.getpid()}\n")
    child = proxy.run()[1]["pid"]
    watched = os.pidfd_open(child)
    proxy.process.send_signal(signal.SIGTERM)
    assert proxy.process.wait(WAIT_S) == 0
    assert select.select([watched], [], [], WAIT_S)[0]  # its socket was closed, so it ends by itself
    os.close(watched)


AS_A_CONTAINER = [
    "unshare",
    "--user",
    "--map-user=65534",
    "--map-group=65534",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
REACH = """\
import os
def opens(pid, name):
    try:
        os.close(os.open(f'/proc/{pid}/{name}', os.O_WRONLY))
    except PermissionError:
        return False
    return True
def main(args):
    print('printed')
    pids = os.getpid(), os.getppid()
    return {'pids': pids, 'opened': [[opens(pid, name) for name in ('mem', 'fd/1')] for pid in pids]}
"""


def test_user_code_cannot_reach_into_the_proxy_of_its_container() -> None:
    """Otherwise it could send messages as the platform, because both have the same uid."""
    with running(*AS_A_CONTAINER) as proxy:
        proxy.init(REACH)
        assert proxy.run() == (200, {"pids": [ANY, 1], "opened": [[True, True], [False, False]]})
        assert proxy.out == f"printed\n{SENTINEL}"


def test_the_launcher_needs_the_standard_library_only() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'runtime-python')!r}); import thaw_runtime.action.proxy; "
        "print([m for m in sys.modules if m.partition('.')[0] in ('thaw', 'relay', 'torch', 'vllm', 'redis')])"
    )
    out = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"


def test_a_proxy_ends_when_it_is_asked_however_it_waits(proxy: Proxy) -> None:
    """A signal handler would run in the main thread, which a signal just before its wait does not wake."""
    blocked = re.search(r"^SigBlk:\t(\w+)$", Path(f"/proc/{proxy.process.pid}/status").read_text(), re.M)
    assert blocked is not None
    assert int(blocked[1], 16) & 1 << signal.SIGTERM - 1  # the main thread leaves the signal to the other thread
    proxy.process.terminate()
    assert proxy.process.wait(WAIT_S) == 0


def test_a_function_may_import_the_packages_of_its_image(tmp_path: Path) -> None:
    (tmp_path / "of_the_image.py").write_text("name = 'of the image'\n")
    with running("env", f"THAW_PACKAGES={tmp_path}") as proxy:
        proxy.init("import of_the_image\ndef main(args):\n    return {'found': of_the_image.name}\n")
        assert proxy.run() == (200, {"found": "of the image"})


def test_a_function_may_import_what_its_zip_brings_in_a_virtualenv(proxy: Proxy) -> None:
    packages = f"virtualenv/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    main = "import brought\ndef main(args):\n    return {'found': brought.name}\n"
    code = zipped({"__main__.py": main, f"{packages}/brought.py": "name = 'brought'\n"})
    assert proxy.init(code, binary=True) == (200, {"ok": True})
    assert proxy.run() == (200, {"found": "brought"})
