"""The pods that an invoker asks for, and the directories of its node that they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from invoker.drivers import io_directory
from invoker.drivers.base import Handle, Spec
from invoker.drivers.confined import Limits
from invoker.drivers.kubernetes import spec as pod_spec
from invoker.drivers.kubernetes.place import Place
from invoker.drivers.kubernetes.spec import TERMINATION_FILE, Asked, Mounts
from invoker.drivers.layer_directory import layers_of
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import PlatformError


class Bodies:
    def __init__(
        self, place: Place, owner_label: str, limits: Limits, claimant: str, run_dir: Path, relays: Path
    ) -> None:
        """Raises PlatformError when a directory cannot be made."""
        self._place, self._owner, self._limits, self._claimant = place, owner_label, limits, claimant
        self._packages, self._relays = layers_of(run_dir.absolute()), relays.absolute()
        self._closed = run_dir.absolute() / "closed"
        _make_closed(self._closed)

    def of(self, handle: Handle, spec: Spec) -> dict[str, Any]:
        return pod_spec.pod(spec, self._asked(handle, spec))

    def pulling(self, handle: Handle, spec: Spec) -> dict[str, Any]:
        """A pod whose node pulls the image and runs nothing of it."""
        return pod_spec.pulling_pod(spec, self._asked(handle, spec))

    def _asked(self, handle: Handle, spec: Spec) -> Asked:
        mounts = Mounts(
            str(io_directory.of(handle).absolute()),
            spec.descriptor_socket,
            str(self._relays) if spec.kind == KIND_LLM else "",
            str(self._packages) if spec.kind == KIND_PYTHON else "",
        )
        place = self._place
        return Asked(
            place.images[spec.kind],
            place.node,
            self._owner,
            Mounts(mounts.io, closed=str(self._closed)) if spec.image else mounts,
            self._limits,
            place.request_mb[spec.kind],
            place.pull,
            place.owner,
            self._claimant,
        )


def _make_closed(path: Path) -> None:
    """A directory that only root gets into.  A node mounts a file there for the last words of a user's image: everybody
    may write to that file, which is on the node's disk and has no bound, and the image may open any directory of its
    own."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        path.chmod(0o700)
        (path / TERMINATION_FILE).touch()  # the file's mount needs one to lie on, and the directory's is read-only
    except OSError as e:
        raise PlatformError(f"{path} cannot be made: {e.strerror}") from e
