"""Settings that a typo must not change silently."""

from __future__ import annotations

import pytest

from gateway.scheduler.settings import SchedulerSettings
from thaw import settings
from thaw.errors import ThawError


@pytest.mark.parametrize("variable", ["THAW_LEDGER_DISCIPLINE", "THAW_SELECT_VARIANT"])
def test_a_misspelt_policy_is_refused_by_the_name_of_its_variable(variable: str) -> None:
    with pytest.raises(ThawError, match=f"{variable}='fastest' is not known"):
        settings.load(SchedulerSettings, {"THAW_STATE_URL": "redis://", variable: "fastest"})


def test_an_address_without_a_port_is_refused_by_the_name_of_its_variable() -> None:
    with pytest.raises(ThawError, match="THAW_SCHEDULER_BIND='localhost' names no port"):
        settings.load(SchedulerSettings, {"THAW_STATE_URL": "redis://", "THAW_SCHEDULER_BIND": "localhost"})


@pytest.mark.parametrize("scheme", ["https", "http", ""])
def test_a_relay_server_that_stages_cannot_reach_is_refused_without_its_password(scheme: str) -> None:
    with pytest.raises(ThawError, match=f"THAW_RELAY_URL has the scheme '{scheme}'") as refused:
        settings.load(
            SchedulerSettings, {"THAW_STATE_URL": "redis://", "THAW_RELAY_URL": f"{scheme}://:secret@relay/0"}
        )
    assert "rediss://" in refused.value.hint
    assert "secret" not in f"{refused.value.message} {refused.value.hint}"


def test_a_relay_server_with_tls_is_taken_unless_an_option_is_unknown() -> None:
    address = "rediss://:secret@relay/0?ssl_ca_certs=/etc/relay.pem"
    assert settings.load(SchedulerSettings, {"THAW_STATE_URL": "redis://", "THAW_RELAY_URL": address})
    with pytest.raises(ThawError, match="THAW_RELAY_URL: .* the option ssl_cert_reqs"):
        settings.load(
            SchedulerSettings, {"THAW_STATE_URL": "redis://", "THAW_RELAY_URL": "rediss://relay/0?ssl_cert_reqs=none"}
        )
