"""fetchd's settings.  They are read once; docs/settings.md is generated from here."""

from __future__ import annotations

from dataclasses import dataclass

from thaw.hub.links import DEFAULT_ENDPOINT
from thaw.settings import setting


@dataclass(frozen=True, slots=True)
class FetchdSettings:
    socket: str = setting("THAW_FETCHD_SOCKET", "path of the control socket (mode 0600)")
    descriptor_sockets: str = setting("THAW_FETCHD_DOORS", "directory of the containers' descriptor sockets")
    host_id: str = setting("THAW_HOST_ID", "this host's name in trace events", "")
    pool_mb: int = setting("THAW_FETCHD_POOL_MB", "host memory for models in MiB; populated at start", 1024)
    slab_mb: int = setting("THAW_FETCHD_SLAB_MB", "size of one slab in MiB; a multiple of 2", 64)
    retain: bool = setting("THAW_FETCHD_RETAIN", "keep a model in the pool after its last holder went", True)
    connections: int = setting("THAW_FETCHD_CONNECTIONS", "connections per fetch; 8 pays above 5 Gbit/s", 4)
    link_bytes_per_s: float | None = setting(
        "THAW_FETCHD_LINK_BYTES_PER_S", "pace all fetches together to this rate; empty: unlimited", None
    )
    discipline: str = setting(
        "THAW_LEDGER_DISCIPLINE", "how fetches with deadlines share the link: edf or equal, as the scheduler's", "edf"
    )
    yields: str = setting(
        "THAW_FETCHD_YIELDS",
        "how inference passes fetches on the link: mark (a queue in the "
        "network honours DSCP CS1), pace (fetches keep to 95 % of what was measured), or auto: pace "
        "unless the interface to the store has a prio or htb qdisc",
        "auto",
    )
    read_timeout_s: float = setting("THAW_FETCHD_READ_TIMEOUT_S", "a store silent for so long counts as broken", 10.0)
    retries: int = setting("THAW_FETCHD_RETRIES", "attempts at a chunk that bring no byte before giving up", 6)
    inspection_s: float = setting(
        "THAW_FETCHD_INSPECTION_S", "the time for reading one model's description; who asks waits for a minute", 45.0
    )
    hold_s: float = setting("THAW_FETCHD_HOLD_S", "a finished fetch keeps its segment so long for a grant", 120.0)
    allow: str = setting(
        "THAW_FETCHD_ALLOW",
        "networks that http(s):// and hf:// models may come from although they are not public: 10.1.0.0/16, "
        "127.0.0.1:9000 (one port of it), [fd00::]/8",
        "",
    )
    refuse: str = setting(
        "THAW_FETCHD_REFUSE",
        "networks that http(s):// and hf:// models never come from, for public addresses of the platform's own "
        "servers; written as in THAW_FETCHD_ALLOW",
        "",
    )
    file_roots: str = setting(
        "THAW_FETCHD_FILE_ROOTS",
        "directories below which file:// models may lie, links resolved, separated by colons; empty: none. A colon or "
        "percent sign in a name is written as %3A or %25",
        "",
    )
    own_store: str = setting(
        "THAW_FETCHD_OWN_STORE",
        "prefixes of the s3:// models that are read with this process's own credentials, separated by commas; s3:// is "
        "for all buckets",
        "s3://models",
    )
    credentials: str = setting(
        "THAW_FETCHD_CREDENTIALS", "file with the credentials of other prefixes (docs/fetchd.md); empty: none", ""
    )
    hub_endpoint: str = setting(
        "HF_ENDPOINT",
        "URL of the hub that hf:// models come from; tokens are in THAW_FETCHD_CREDENTIALS. The hub leads to stores of "
        "its own, which must have public addresses or be in THAW_FETCHD_ALLOW",
        DEFAULT_ENDPOINT,
    )
    s3_endpoint: str = setting("THAW_S3_ENDPOINT", "URL of the S3 server; empty: AWS in its region", "")
    s3_region: str = setting(
        "AWS_REGION",
        "region that requests are signed for; empty: the profile's, else us-east-1. Credentials for S3: docs/fetchd.md",
        "",
    )
