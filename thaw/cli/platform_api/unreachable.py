"""Explains a failed connection and its remedy: a wrong scheme, a private certificate, no server."""

from __future__ import annotations

from thaw.errors import Unavailable


class Unreachable(Unavailable):
    """No platform has answered.  As with wsk, the command's exit code is 3."""


def unreachable(apihost: str, error: Exception) -> Unreachable:
    """``error``: of a request to ``apihost``, which is a URL."""
    text = str(error)
    bare = apihost.partition("://")[2]
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return Unreachable(
            f"{apihost} has a certificate that nobody known here has signed",
            hint="name the signer's: SSL_CERT_FILE=ca.pem thaw …; or take any certificate: -i",
        )
    if apihost.startswith("https://") and ("WRONG_VERSION_NUMBER" in text or "record layer" in text):
        return Unreachable(f"{apihost} does not speak https", hint=f"thaw property set --apihost http://{bare}")
    if apihost.startswith("http://") and ("Connection aborted" in text or "Connection broken" in text):
        return Unreachable(
            f"{apihost} ended the connection without an answer",
            hint=f"if it speaks https: thaw property set --apihost https://{bare}",
        )
    reason = (
        "connection refused" if "Connection refused" in text else text.splitlines()[0][:200] if text else repr(error)
    )
    return Unreachable(
        f"{apihost} does not answer: {reason}", hint="is the platform up?  thaw dev status; thaw property get"
    )


def no_api(apihost: str, status: int) -> Unreachable:
    return Unreachable(
        f"{apihost} answers with {status}, but not as the API of a platform",
        hint="the API host is the URL before /api/v1: thaw property get --apihost",
    )
