"""A store's answers in XML are parsed strictly."""

from __future__ import annotations

import pytest

from thaw.errors import ProtocolError
from thaw.s3 import ListedObject, read_listing, read_refusal

OBJECT = "<Contents><Key>{key}</Key><Size>7</Size><LastModified>1970-01-01T00:01:00Z</LastModified></Contents>"
NAMESPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def page(*contents: str, more: str = "false", namespace: str = NAMESPACE) -> bytes:
    inside = f"{''.join(contents)}<IsTruncated>{more}</IsTruncated>"
    return f"<ListBucketResult{namespace}>{inside}</ListBucketResult>".encode()


@pytest.mark.parametrize("namespace", [NAMESPACE, ""])
def test_a_listing_is_read_with_its_entities_whatever_its_namespace(namespace: str) -> None:
    listed = page(OBJECT.format(key="a&amp;b/&#34;c&#34;"), OBJECT.format(key="d"), namespace=namespace)
    assert read_listing(listed) == ([ListedObject('a&b/"c"', 7, 60.0), ListedObject("d", 7, 60.0)], False)
    assert read_listing(page(more="true", namespace=namespace)) == ([], True)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "cannot be read"),
        (page()[:-1], "cannot be read"),
        (page().decode().encode("utf-16"), "cannot be read"),
        (b"<!DOCTYPE x [<!ENTITY a 'b'>]>" + page(), "document type"),
        (page(OBJECT.format(key="d").replace("<Size>7", "<Size>x")), "cannot be read"),
        (page(OBJECT.format(key="d").replace("1970", "MCMLXX")), "cannot be read"),
        (page(OBJECT.format(key="d").replace("Size", "Length")), "without Size"),
    ],
)
def test_a_listing_that_makes_no_sense_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        read_listing(body)


def test_of_a_refusal_only_its_code_is_read() -> None:
    error = "<Error><Code>{code}</Code><Message>the token is SECRET</Message></Error>"
    assert read_refusal(error.format(code="ExpiredToken").encode()) == "ExpiredToken"
    assert read_refusal(error.format(code="the token is SECRET").encode()) == ""
    assert read_refusal(b"<html>the token is SECRET") == ""
