"""What a model is for: it computes embeddings, or it generates text.  The gateway and the container say it alike."""

from __future__ import annotations

from relay.protocol.messages import EMBEDDINGS, TEXT_ENDPOINTS
from thaw.errors import BadParameter


def check_kind(endpoint: str, *, embeds: bool, since: str = "") -> None:
    """``since`` is a further sentence of the error.  Raises BadParameter for a request of the other kind."""
    if endpoint in TEXT_ENDPOINTS or embeds == (endpoint == EMBEDDINGS):
        return
    problem = (
        "this model computes embeddings and generates no text: use /v1/embeddings"
        if embeds
        else "this model generates text and computes no embeddings: use /v1/chat/completions"
    )
    raise BadParameter("model", f"{problem}. {since}" if since else problem)
