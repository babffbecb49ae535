"""A container's output, copied from the node's file into the two files that the rest of the invoker reads.

The node's container runtime writes each line as ``<time> stdout|stderr F|P <text>`` (the CRI's format; P: the line goes
on in the next piece).  Reading that file costs the API server nothing and tells stdout from stderr, which the API
does not.  When the file is long the kubelet renames it and has the runtime begin another under the same name.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Final

from invoker.drivers import log_files
from invoker.drivers.base import Handle
from invoker.drivers.kubernetes.log_watch import LogWatch

_READ_BYTES: Final = 1 << 18
_LONGEST_LINE: Final = 1 << 20  # the runtime cuts lines at 16 KiB
_JOIN_S: Final = 5.0


def log_path(root: Path, namespace: str, pod: str, uid: str, container: str) -> Path:
    """The file of a container that is never restarted."""
    return root / f"{namespace}_{pod}_{uid}" / container / "0.log"


def pieces(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Return (stream, text) of each whole line; lines in another format are left out."""
    for line in data.split(b"\n"):
        stamp_stream_tag = line.split(b" ", 3)
        if len(stamp_stream_tag) == 4:
            _, stream, tag, text = stamp_stream_tag
            yield stream.decode("ascii", "replace"), text if tag.startswith(b"P") else text + b"\n"


class PodLogs:
    """One thread that copies until the container has ended.  ``only_new`` leaves out the lines that are there
    already."""

    def __init__(self, watch: LogWatch, path: Path, handle: Handle, *, only_new: bool = False) -> None:
        """Raises OSError when the node's directory cannot be read."""
        self._watch, self._path, self._handle = watch, path, handle
        self._ending = os.eventfd(0, os.EFD_CLOEXEC)
        self._changed = os.eventfd(0, os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = self._ended = False
        self._grown = threading.Condition()
        self._part = b""
        with ExitStack() as undo:
            for fd in (self._ending, self._changed):
                undo.callback(os.close, fd)
            self._watched = watch.watch(path.parent, self._changed)
            undo.callback(watch.forget, self._watched)
            self._source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if only_new:
                os.lseek(self._source, 0, os.SEEK_END)
            undo.pop_all()
        self._thread = threading.Thread(target=self._run, name="container-logs", daemon=True)
        self._thread.start()

    def wait_ended(self, deadline_s: float) -> None:
        """The container has ended: wait until its last line is in the files."""
        with self._lock:
            if not self._closed:  # else its number may be another file's
                os.eventfd_write(self._ending, 1)
        self._thread.join(deadline_s)

    def wait_grown(self, cursors: tuple[int, int], deadline_s: float) -> bool:
        """Whether there is more than ``cursors`` (stdout, stderr); waits for it while the container runs."""
        with self._grown:
            self._grown.wait_for(lambda: self._ended or log_files.more_than(self._handle, cursors), deadline_s)
            return log_files.more_than(self._handle, cursors)

    def close(self) -> None:
        self.wait_ended(_JOIN_S)
        with self._lock:
            if self._closed or self._thread.is_alive():
                return
            self._closed = True
            self._watch.forget(self._watched)
            for fd in (self._ending, self._changed, self._source):
                os.close(fd)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._changed, select.POLLIN)
        poll.register(self._ending, select.POLLIN)
        try:
            with self._handle.stdout.open("ab", buffering=0) as out, self._handle.stderr.open("ab", buffering=0) as err:
                self._copy(out, err)
                ending = False
                while not ending:
                    ready = [fd for fd, _ in poll.poll()]
                    ending = self._ending in ready
                    if self._changed in ready:
                        os.eventfd_read(self._changed)
                    self._copy(out, err)
                    if self._renamed(out, err):
                        self._copy(out, err)
        finally:
            with self._grown:
                self._ended = True
                self._grown.notify_all()

    def _copy(self, out: FileIO, err: FileIO) -> None:
        while data := os.read(self._source, _READ_BYTES):
            whole, newline, self._part = (self._part + data).rpartition(b"\n")
            if not newline and len(self._part) > _LONGEST_LINE:
                self._part = b""
            for stream, text in pieces(whole):
                log_files.append(err if stream == "stderr" else out, text)
            with self._grown:
                self._grown.notify_all()

    def _renamed(self, out: FileIO, err: FileIO) -> bool:
        """Go on with the file that has the name now, if that is another one and the old one has been read."""
        try:
            newer = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False  # between the two names, or the pod is being removed
        if os.path.sameopenfile(newer, self._source):
            os.close(newer)
            return False
        self._copy(out, err)  # the lines written between our last look and the new name
        os.dup2(newer, self._source, inheritable=False)
        os.close(newer)
        return True
