"""One answer is made by one version of its action: another version may be another model.

An instance of that version may go on with the answer, wherever it is.  A new one can be started only while the action
has that version.
"""

from __future__ import annotations

from collections.abc import Callable

from thaw.action import Action
from thaw.errors import Conflict, NotFound, PlatformError, WorkerLost
from thaw.ids import ActionName
from thaw.pools import is_pool_name


class Versions:
    """``action`` returns an action as it is deployed now, and raises NotFound and PlatformError."""

    def __init__(self, action: Callable[[ActionName], Action]) -> None:
        self._action = action

    def of_waiting(self, action: Action) -> Action:
        """The action that a request of ``action`` waits for now: another one when an update has given it other
        instances, or another adapter.  Raises NotFound, and Conflict when it has become something that takes no such
        request."""
        try:
            now = self._action(action.name)
        except NotFound:
            raise deleted_while_waiting() from None
        except PlatformError:
            return action
        if (now.served_by, now.adapter) == (action.served_by, action.adapter):
            return action
        if now.is_llm != action.is_llm:
            raise Conflict("The action became one of another kind while the request waited for it.")
        return now

    def check(self, name: ActionName, version: str, called: ActionName | None) -> None:
        """Raises WorkerLost when no further instance of this version will be started.  While the state server is away
        nobody knows, and the wait goes on.  ``called`` is the function of which the client knows, if ``name`` is its
        pool."""
        try:
            now = self._action(name).version
        except NotFound:
            now = ""
        except PlatformError:
            return
        if now != version:
            became = f"is version {now} now" if now else "was deleted"
            began = f"Version {version} of {name} began this answer, and the action {became}"
            if is_pool_name(name):  # it has one version, and goes with the last function that has its settings
                began = f"{called or 'The action'} was deleted, or has other settings than when it began this answer"
            raise WorkerLost(f"{began}: no worker can go on with it.", hint="send the request again")


def deleted_while_waiting() -> NotFound:
    return NotFound("The action was deleted while the request waited for it.")
