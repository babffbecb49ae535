"""Settings that a typo must not change silently."""

from __future__ import annotations

import pytest

from gateway.scheduler.settings import SchedulerSettings
from thaw import settings
from thaw.errors import ThawError


def loaded(**env: str) -> SchedulerSettings:
    return settings.load(SchedulerSettings, {"THAW_STATE_URL": "redis://", **env})


@pytest.mark.parametrize(
    ("variable", "value", "refusal"),
    [
        ("THAW_LEDGER_DISCIPLINE", "fastest", "is not known"),
        ("THAW_SELECT_VARIANT", "fastest", "is not known"),
        ("THAW_SCHEDULER_BIND", "localhost", "names no port"),
    ],
)
def test_a_misspelt_value_is_refused_by_the_name_of_its_variable(variable: str, value: str, refusal: str) -> None:
    with pytest.raises(ThawError, match=f"{variable}='{value}' {refusal}"):
        loaded(**{variable: value})


@pytest.mark.parametrize("scheme", ["https", "http", ""])
def test_a_relay_server_that_stages_cannot_reach_is_refused_without_its_password(scheme: str) -> None:
    with pytest.raises(ThawError, match=f"THAW_RELAY_URL has the scheme '{scheme}'") as refused:
        loaded(THAW_RELAY_URL=f"{scheme}://:secret@relay/0")
    assert "rediss://" in refused.value.hint
    assert "secret" not in f"{refused.value.message} {refused.value.hint}"


def test_a_relay_server_with_tls_is_taken_unless_an_option_is_unknown() -> None:
    address = "rediss://:secret@relay/0?ssl_ca_certs=/etc/relay.pem"
    assert loaded(THAW_RELAY_URL=address)
    with pytest.raises(ThawError, match="THAW_RELAY_URL: .* the option ssl_cert_reqs"):
        loaded(THAW_RELAY_URL="rediss://relay/0?ssl_cert_reqs=none")
