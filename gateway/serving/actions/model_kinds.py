"""Refuses a request that the model of a function cannot answer, before it waits for a start.

The deploy's check found out what the model does, and the action keeps it.  A container says the same of the version
that it runs, so a request whose action does not know goes there.
"""

from __future__ import annotations

from typing import Final

from relay.protocol.model_kinds import check_kind
from thaw.action import Action

_SINCE: Final = (
    "That was so when the function was deployed: if the model has been pushed again since, update the function"
)
"""A plain name means the newest version at each start, and only a deploy looks at what the model does."""


def check_endpoint(action: Action, endpoint: str) -> None:
    """Raises BadParameter."""
    if action.embeds is not None:
        check_kind(endpoint, embeds=action.embeds, since=_SINCE)
