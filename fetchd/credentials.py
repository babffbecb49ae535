"""Which identity a model of S3 or of a hub is read with, by the prefix of its URI.

This process's own credentials go only to the platform's own store (THAW_FETCHD_OWN_STORE).  The file
THAW_FETCHD_CREDENTIALS has those of other prefixes::

    [{"prefix": "s3://team-a", "endpoint": "https://s3.team-a.example", "key_id": "…", "secret": "…"},
     {"prefix": "s3://team-b", "profile": "team-b"},
     {"prefix": "s3://public", "anonymous": true},
     {"prefix": "hf://meta-llama", "token_file": "/run/secrets/hub-token"}]

The longest prefix decides.  A model that is below none of all these is asked for without any credentials.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from fetchd.settings import FetchdSettings
from thaw import wire
from thaw.errors import BadRequest, ProtocolError
from thaw.model_uri import HUB, ModelUri
from thaw.settings import SettingError

_HINT = "docs/fetchd.md shows such a file"


@dataclass(frozen=True, slots=True)
class Identity:
    """One entry of the file: a server, and the credentials for the URIs below ``prefix``.  Without an endpoint the
    server is this process's.  Without keys and profile, and not ``anonymous``, the credentials are this process's.  On
    a hub it is a token, or the file that has it."""

    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    key_id: str = ""
    secret: str = ""
    token: str = ""
    token_file: str = ""
    profile: str = ""
    anonymous: bool = False

    def __repr__(self) -> str:
        return f"Identity({self.prefix!r})"  # no key gets into a log


@dataclass(frozen=True, slots=True)
class Credentials:
    """``by_prefix`` has the longest prefixes first."""

    own: Identity
    by_prefix: tuple[tuple[ModelUri, Identity], ...]

    def of(self, model: ModelUri) -> Identity:
        nobody = replace(self.own, anonymous=True)
        return next((identity for prefix, identity in self.by_prefix if model.is_below(prefix)), nobody)


def credentials_of(settings: FetchdSettings) -> Credentials:
    """Raises SettingError."""
    return _credentials(settings.s3_endpoint, settings.s3_region, settings.own_store, settings.credentials)


@lru_cache(maxsize=4)
def _credentials(endpoint: str, region: str, own_store: str, path: str) -> Credentials:
    own = Identity(endpoint=endpoint, region=region)
    named = [(_prefix("THAW_FETCHD_CREDENTIALS", e.prefix, "s3", HUB), _checked(e, own)) for e in _read(path)]
    ours = (text.strip() for text in own_store.split(",") if text.strip())
    named += [(_prefix("THAW_FETCHD_OWN_STORE", text, "s3"), own) for text in ours]
    longest_first = sorted(named, key=lambda one: (bool(one[0].place), len(one[0].path)), reverse=True)
    return Credentials(own, tuple(longest_first))


def _checked(entry: Identity, own: Identity) -> Identity:
    if ModelUri.parse_prefix(entry.prefix).scheme == HUB:
        return _checked_of_hub(entry)
    sources = (bool(entry.key_id or entry.secret or entry.token), bool(entry.profile), entry.anonymous)
    if sum(sources) != 1 or bool(entry.key_id) != bool(entry.secret) or entry.token_file:
        raise SettingError(
            f"THAW_FETCHD_CREDENTIALS: {entry.prefix} needs key_id and secret, or profile, or anonymous", hint=_HINT
        )
    return replace(entry, endpoint=entry.endpoint or own.endpoint, region=entry.region or own.region)


def _checked_of_hub(entry: Identity) -> Identity:
    if len(ModelUri.parse_prefix(entry.prefix).path) > 1:  # a start asks for a name, and then for its commit
        raise SettingError(
            f"THAW_FETCHD_CREDENTIALS: {entry.prefix} has a revision, and a token is for all of them",
            hint=f"write {entry.prefix.partition('@')[0]}",
        )
    sources = (bool(entry.token), bool(entry.token_file), entry.anonymous)
    if sum(sources) != 1 or entry.key_id or entry.secret or entry.profile or entry.endpoint or entry.region:
        raise SettingError(
            f"THAW_FETCHD_CREDENTIALS: {entry.prefix} needs token, or token_file, or anonymous, and nothing else",
            hint=_HINT,
        )
    return entry


def _prefix(variable: str, text: str, *schemes: str) -> ModelUri:
    try:
        found = ModelUri.parse_prefix(text)
    except BadRequest as e:
        raise SettingError(f"{variable}: {e.message}", hint=_HINT) from None
    if found.scheme not in schemes:
        raise SettingError(
            f"{variable}: {text!r} does not begin with {' or '.join(f'{s}://' for s in schemes)}", hint=_HINT
        )
    return found


def _read(path: str) -> tuple[Identity, ...]:
    if not path:
        return ()
    try:
        return wire.loads(tuple[Identity, ...], Path(path).read_bytes())
    except OSError as e:
        raise SettingError(f"THAW_FETCHD_CREDENTIALS={path!r} cannot be read: {e.strerror}", hint=_HINT) from None
    except (ProtocolError, UnicodeError):  # its text may repeat a secret
        raise SettingError(f"THAW_FETCHD_CREDENTIALS={path!r} is no such list", hint=_HINT) from None
