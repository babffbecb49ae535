"""A process ends when it is asked to, also if the signal does not interrupt the wait of its main thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import signal, threading
from thaw.process.ending import Ending

def ask():
    threading.Event().wait(0.3)  # the main thread waits by now
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # caught here, by a thread that runs no handlers

ending = Ending()
threading.Thread(target=ask).start()
ending.wait()
print("ended")
"""
WAITS = """
import threading
from thaw.process.ending import end_within

end_within(0.2, lambda: print("unheard", flush=True))
threading.Thread(target=threading.Event().wait).start()  # as for a server that is away; it keeps the process alive
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [(PROGRAM, "ended\n"), (WAITS, "unheard\n")],
    ids=["a signal that another thread caught", "bounded, whatever its threads wait for"],
)
def test_a_process_ends(program: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, said), done.stderr
