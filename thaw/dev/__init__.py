"""The whole platform on one machine, as child processes of one supervisor.

::

    thaw dev up ── supervisor ─┬─ state    valkey, every write on disk before its answer
                               ├─ relay    valkey, nothing on disk
                               ├─ store    SeaweedFS's S3 on loopback (not with --store DIR)
                               ├─ scheduler
                               ├─ gateway
                               └─ host-N/fetchd, host-N/invoker ── containers (driver process)

layout (where the files lie) · components (which programs are started, with which environment) · supervisor (starts,
watches and restarts them) · sweep (removes everything) · up, down, status (the commands) · demo (make demo).
"""
