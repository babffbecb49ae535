"""The last lines that ended containers wrote to stderr, kept for an hour: a container's own files are removed with it.

Each container has one small file in ``<run_dir>/ended``, so an invoker that is restarted still has them.  The files are
bounded in size each and all together; the oldest go first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from invoker.drivers.activation_logs import last_lines
from invoker.drivers.base import Handle
from relay.protocol.data_port_messages import EndedOutput
from thaw import wire
from thaw.clock import wall_ms
from thaw.errors import ProtocolError
from thaw.ids import ActionName, InstanceId
from thaw.instance import InstanceRecord
from thaw.logs import Log

KEPT_S: Final = 3600
MOST_BYTES: Final = 64 * 1024
"""The bytes kept for one container: enough for an engine's traceback and the lines before it."""
MOST_BYTES_IN_ALL: Final = 16 << 20
_MOST_LINES: Final = 2000
_MOST_ANSWERED: Final = 20  # newest ones of an action: a bounded answer


def printed_by(handle: Handle) -> str:
    """The end of the container's stderr."""
    return last_lines(handle, _MOST_LINES, MOST_BYTES, of_last_run=True)


class LastOutput:
    def __init__(self, run_dir: Path, log: Log) -> None:
        self._root, self._log = run_dir / "ended", log
        self._lock = threading.Lock()

    def keep(self, record: InstanceRecord, text: str, reason: str) -> None:
        """``text`` is the container's last output, if there is any.  On a full disk only this output is lost."""
        if not text:
            return
        output = EndedOutput(
            record.instance_id, record.action, record.host_id, record.stage, record.n_stages, wall_ms(), reason, text
        )
        try:
            with self._lock:
                self._root.mkdir(mode=0o700, exist_ok=True)
                whole = self._root / f"{output.ended_wall_ms:015d}-{record.instance_id}"
                part = self._root / f".{whole.name}"
                part.write_bytes(wire.dumps(output))
                part.replace(whole)
                self._prune()
        except OSError as e:
            self._log.event("last_output_lost", instance_id=record.instance_id, error=str(e))

    def of_action(self, action: ActionName) -> tuple[EndedOutput, ...]:
        """The newest ones, oldest first."""
        return tuple([o for o in self._read(self._paths()) if o.action == action][-_MOST_ANSWERED:])

    def of_instance(self, instance_id: InstanceId) -> EndedOutput | None:
        return next(self._read(p for p in self._paths() if p.name.partition("-")[2] == instance_id), None)

    def _read(self, paths: Iterable[Path]) -> Iterator[EndedOutput]:
        """Those that are not too old."""
        since_ms = wall_ms() - 1000 * KEPT_S
        for path in paths:
            if path.name.startswith("."):
                continue
            try:
                output = wire.loads(EndedOutput, path.read_bytes())
            except (OSError, ProtocolError):
                continue  # removed meanwhile, or cut by a full disk
            if output.ended_wall_ms >= since_ms:
                yield output

    def _paths(self) -> list[Path]:
        """Return the files, the oldest first; a file that a full disk or a power cut left half written comes before all
        others."""
        return sorted(self._root.iterdir()) if self._root.is_dir() else []

    def _prune(self) -> None:
        oldest = f"{wall_ms() - 1000 * KEPT_S:015d}"
        left = 0
        for path in reversed(self._paths()):
            with suppress(FileNotFoundError):
                left += path.stat().st_size
                if left > MOST_BYTES_IN_ALL or path.name < oldest:
                    os.unlink(path)
