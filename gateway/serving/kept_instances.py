"""The quota of instances that a namespace's actions keep while nobody calls (``min_instances``).

Nothing evicts them, so without a quota one namespace would have all hosts.
"""

from __future__ import annotations

import redis

from gateway.serving.quotas import QuotaBook
from gateway.serving.scaling import least_of, rescaled
from relay.state.records import Records
from relay.state.rewriting import rewrite_action
from thaw.action import Action
from thaw.errors import Forbidden
from thaw.quotas import who_raises


class KeptInstances:
    def __init__(self, client: redis.Redis, records: Records, quotas: QuotaBook) -> None:
        self._client, self._records, self._quotas = client, records, quotas

    def check(self, action: Action, before: int) -> None:
        """``before``: how many the action keeps so far; what it keeps already is refused to nobody.  Raises Forbidden
        when the namespace would keep too many."""
        least = least_of(action)
        if least <= before:
            return
        kept = least + sum(least_of(a) for a in self._records.actions(action.namespace) if a.name != action.name)
        allowed = self._quotas.of(action.namespace).kept
        if kept > allowed:
            raise Forbidden(
                f"The namespace's actions would keep too many instances (count: {kept}, allowed: {allowed}). "
                f"{who_raises('kept', action.namespace)}.",
                hint="keep fewer: thaw action scale NAME --min N",
            )

    def check_written(self, action: Action, before: int) -> None:
        """Check the action once more when it is written: of several that are written at once, each sees the others
        then.  Raises Forbidden, and the action keeps as many as before."""
        try:
            self.check(action, before)
        except Forbidden:
            less = {"min_instances": before}
            rewrite_action(self._client, action.namespace, action.name, lambda written: rescaled(written, less))
            raise
