"""The cluster of two nodes that ``scripts/kubernetes.sh`` makes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LONGEST_S = 3600.0
"""The first start builds Kubernetes."""


class OwnCluster:
    home = os.environ.get("THAW_CLUSTER_DIR", "/var/tmp/thaw-cluster")

    def run(self, *words: str) -> str:
        """Return the script's stdout; its messages on stderr go to the test's output."""
        done = subprocess.run(
            [ROOT / "scripts/kubernetes.sh", *words], stdout=subprocess.PIPE, text=True, timeout=_LONGEST_S
        )
        assert done.returncode == 0, f"scripts/kubernetes.sh {' '.join(words)} failed"
        return done.stdout.strip()

    def load(self, archive: Path) -> None:
        subprocess.run([sys.executable, ROOT / "scripts/kubernetes_images.py", archive], check=True, timeout=_LONGEST_S)
        self.run("load", str(archive))
        archive.unlink()
