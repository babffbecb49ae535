"""A process ends when it is asked to, also if the signal does not interrupt the wait of its main thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_a_signal_that_another_thread_caught_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


WAITS = """
import threading
from thaw.process.ending import end_within

end_within(0.2, lambda: print("unheard", flush=True))
threading.Thread(target=threading.Event().wait).start()  # as for a server that is away; it keeps the process alive
threading.Event().wait()
"""


def test_a_process_that_is_bounded_ends_whatever_its_threads_wait_for() -> None:
    done = subprocess.run([sys.executable, "-c", WAITS], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "unheard\n"), done.stderr
