"""The namespaces' quotas as this gateway knows them: read when it connects, and when an event says they changed."""

from __future__ import annotations

import threading

from relay.state.quotas import NamespaceQuotas
from thaw.ids import Namespace
from thaw.quotas import OwnQuotas, Quotas


class QuotaBook:
    """Thread-safe.  Only one thread at a time reads the server and replaces the known quotas, so older ones never
    replace newer ones."""

    def __init__(self, default: Quotas, stored: NamespaceQuotas) -> None:
        self.default, self.stored = default, stored
        self._own: dict[Namespace, Quotas] = {}
        self._lock = threading.Lock()

    def of(self, namespace: Namespace) -> Quotas:
        return self._own.get(namespace, self.default)

    def weight_of(self, namespace: Namespace) -> float:
        return self.of(namespace).weight

    def reload(self) -> None:
        """Raises PlatformError."""
        with self._lock:
            self._own = {namespace: own.over(self.default) for namespace, own in self.stored.all().items()}

    def changed(self, namespace: Namespace) -> OwnQuotas:
        """Read one namespace's again.  Raises PlatformError."""
        with self._lock:
            own = self.stored.of(namespace)
            self._own[namespace] = own.over(self.default)
        return own
