"""The operator's settings."""

from __future__ import annotations

from dataclasses import dataclass

from thaw.settings import setting


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    gateway_url: str = setting("THAW_GATEWAY_URL", "the platform's API, http://host:port")
    key: str = setting("THAW_API_KEY", "a key of the namespace in which models are deployed; a tenant's is enough")
    pod_namespace: str = setting(
        "THAW_POD_NAMESPACE", "namespace of the cluster whose ModelFunctions are deployed", "thaw"
    )
    kubeconfig: str = setting("KUBECONFIG", "credentials; empty: those of this pod", "")
