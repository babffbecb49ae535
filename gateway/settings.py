"""The gateway's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from thaw.quotas import KEPT, LEAST, NAMES, RECORD_AGE_S, RECORDS, Quotas, setting_of
from thaw.settings import SettingError, setting

MIB = 1024 * 1024
COPIES: Final = 4
"""An action is in memory so often while an answer is made of it: as it is kept, as an object, as text, as bytes."""
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]", "unix")


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    state_url: str = setting("THAW_STATE_URL", "redis:// URL of the state server", "redis://127.0.0.1:6379/0")
    bind: str = setting("THAW_GATEWAY_BIND", "host:port of the public API", "127.0.0.1:3233")
    threads: int = setting("THAW_GATEWAY_THREADS", "requests held at once by this process", 1200)
    drain_s: int = setting("THAW_GATEWAY_DRAIN_S", "seconds a stopping gateway gives its requests", 30)
    first_key: str = setting(
        "THAW_FIRST_KEY", "an operator's key of the namespace guest, uuid:secret; empty: none is made known", ""
    )
    metrics_token: str = setting(
        "THAW_METRICS_TOKEN",
        "bearer token of /metrics, beside the installation's; empty: on loopback /metrics needs none",
        "",
    )
    models: str = setting(
        "THAW_MODELS",
        "prefixes of the models that every namespace may run, separated by commas; s3:// allows every bucket. Gateways "
        "and schedulers need the same; thaw namespace allow-models adds some for one namespace",
        "s3://models",
    )
    driver: str = setting("THAW_DRIVER", "the hosts' container driver, if this machine runs them", "")
    per_minute: int = setting("THAW_INVOCATIONS_PER_MINUTE", "per namespace; OpenWhisk's is 60", 100_000)
    concurrent: int = setting(
        "THAW_INVOCATIONS_CONCURRENT", "per namespace, at most 7/8 of the threads; OpenWhisk's is 30", 2_000
    )
    calls_per_minute: int = setting(
        "THAW_CALLS_PER_MINUTE", "requests of any kind with a key of one namespace, and as many web requests", 200_000
    )
    calls_concurrent: int = setting(
        "THAW_CALLS_CONCURRENT", "requests of a namespace at once that are no invocations", 128
    )
    queue_action: int = setting("THAW_QUEUE_PER_ACTION", "requests that may wait for one action's instances", 1_000)
    queue_namespace: int = setting("THAW_QUEUE_PER_NAMESPACE", "requests of a namespace that may wait", 1_100)
    quota_actions: int = setting("THAW_QUOTA_ACTIONS", "actions of a namespace", 1_000)
    quota_code_bytes: int = setting("THAW_QUOTA_CODE_BYTES", "a namespace's actions with their code", 512 * MIB)
    quota_record_bytes: int = setting(
        "THAW_QUOTA_RECORD_BYTES",
        "a namespace's records and 202s in the state server; beyond them the oldest record gives way",
        256 * MIB,
    )
    quota_records: int = setting(
        "THAW_QUOTA_RECORDS", "records of a namespace; beyond them the oldest gives way", RECORDS
    )
    quota_record_age_s: int = setting(
        "THAW_QUOTA_RECORD_AGE_S", "seconds that a namespace's records are kept, with their traces", RECORD_AGE_S
    )
    quota_held: int = setting(
        "THAW_QUOTA_HELD", "requests of a namespace that wait for an instance, at all gateways", 5_000
    )
    quota_accepted: int = setting("THAW_QUOTA_ACCEPTED", "202s of a namespace that have not ended", 20_000)
    quota_starts: int = setting(
        "THAW_QUOTA_STARTS", "starts of a namespace in progress; gateways and schedulers need the same", 1_000
    )
    quota_kept: int = setting(
        "THAW_QUOTA_KEPT", "instances that a namespace's actions keep while nobody calls (min_instances)", KEPT
    )
    web_policy: str = setting(
        "THAW_WEB_POLICY",
        "`Content-Security-Policy` of web actions' answers, whose pages are then of no origin; empty: none",
        "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts",
    )
    async_threads: int = setting("THAW_GATEWAY_ASYNC_THREADS", "202s this gateway runs at once", 64)
    payload_bytes: int = setting("THAW_PAYLOAD_BYTES", "largest argument of an ordinary function", MIB)
    result_bytes: int = setting("THAW_RESULT_BYTES", "largest result of an ordinary function", MIB)
    llm_result_bytes: int = setting(
        "THAW_LLM_RESULT_BYTES", "memory for the tokens of one answer of an LLM, some 200 bytes each", 64 * MIB
    )
    llm_payload_bytes: int = setting("THAW_LLM_PAYLOAD_BYTES", "largest request body of an LLM", 8 * MIB)
    code_bytes: int = setting("THAW_CODE_BYTES", "largest code of an action", 48 * MIB)
    parameters_bytes: int = setting("THAW_PARAMETERS_BYTES", "largest bound parameters of an action", MIB)
    entities_bytes: int = setting("THAW_ENTITIES_BYTES", "a namespace's packages, triggers and rules", 8 * MIB)
    sequence_length: int = setting(
        "THAW_SEQUENCE_LENGTH", "the most actions, and sequences, that one sequence runs", 50
    )
    blocking_s: float = setting("THAW_BLOCKING_S", "a blocking invocation becomes a 202 after this", 60.0)
    preflight_s: float = setting(
        "THAW_PREFLIGHT_S", "seconds that a deploy waits for a host to say whether its model would start; 0: none", 20.0
    )
    packages_s: float = setting(
        "THAW_PACKAGES_S", "seconds that a deploy waits for a host to install what its requirements.txt asks for", 60.0
    )
    images: str = setting(
        "THAW_IMAGES",
        "prefixes of the images that functions may name, separated by commas (docker.io/team, ghcr.io); empty: none",
        "docker.io",
    )
    image_deploy_s: float = setting(
        "THAW_IMAGE_DEPLOY_S", "seconds that a deploy waits for a host to pull the function's image", 300.0
    )
    reconnect_s: float = setting(
        "THAW_RECONNECT_S", "seconds that a resumable stream goes on for a client that hung up; 0: none does", 60.0
    )
    reconnect_bytes: int = setting(
        "THAW_RECONNECT_BYTES", "tokens and requests kept for clients that hung up, all together", 64 * MIB
    )
    reconnect_stream_bytes: int = setting(
        "THAW_RECONNECT_STREAM_BYTES",
        "tokens of one stream, and its request while it runs, kept without a client",
        4 * MIB,
    )
    connections: int = setting(
        "THAW_GATEWAY_CONNECTIONS", "open connections; beyond them those without a request give way", 16_384
    )
    per_address: int = setting(
        "THAW_GATEWAY_PER_ADDRESS", "connections of one address; 0, for a proxy that counts them: no limit", 4_096
    )
    head_s: float = setting(
        "THAW_GATEWAY_HEAD_S", "seconds that the head of a request may take, and its body be late", 10.0
    )
    client_rate: float = setting(
        "THAW_GATEWAY_CLIENT_RATE", "bytes a second at which a body must come and an answer be read", 65_536.0
    )
    answer_s: float = setting(
        "THAW_GATEWAY_ANSWER_S", "seconds without progress after which a client that reads no answer is cut", 60.0
    )
    body_bytes: int = setting("THAW_GATEWAY_BODY_BYTES", "memory for bodies above 64 KiB, all together", 128 * MIB)
    answer_bytes: int = setting(
        "THAW_GATEWAY_ANSWER_BYTES", "memory for answers that clients have not read, all together", 64 * MIB
    )
    heartbeat_s: float = setting("THAW_GATEWAY_HEARTBEAT_S", "seconds between two signs of life", 3.0)

    @property
    def is_on_loopback(self) -> bool:
        return self.bind.rpartition(":")[0] in _LOOPBACK

    def __post_init__(self) -> None:
        for name in NAMES:
            least = LEAST.get(name, 0)
            if name != "weight" and getattr(self, f"quota_{name}") < least:
                raise SettingError(f"{setting_of(name)} is below {least}", hint=f"set it to {least} or more")

    @property
    def quotas(self) -> Quotas:
        return Quotas(
            self.quota_actions,
            self.quota_code_bytes,
            self.quota_record_bytes,
            self.quota_held,
            self.quota_accepted,
            self.quota_starts,
            records=self.quota_records,
            record_age_s=self.quota_record_age_s,
            kept=self.quota_kept,
        )

    @property
    def held_per_namespace(self) -> int:
        """Each request holds a thread, so some threads stay for other namespaces, /health and /metrics."""
        return min(self.concurrent, self.threads - self.threads // 8)

    @property
    def action_bytes(self) -> int:
        """The longest body that describes an action."""
        return self.code_bytes + 2 * self.parameters_bytes

    @property
    def answered_action_bytes(self) -> int:
        """Memory for actions of which answers are made, beside code in pieces.  The longest one has to fit."""
        return max(256 * MIB, COPIES * self.action_bytes)

    @property
    def longest_body(self) -> int:
        return max(self.action_bytes, self.llm_payload_bytes, self.payload_bytes)
