"""The library through which processes talk: formats, typed clients, and the transports between stages.

``protocol/`` has the messages, ``state/`` the access to the state server, ``clients/`` connections between two
processes, and ``transports/`` the ways from one stage of a pipeline to the next.  The relay server is another thing:
the Redis-protocol server that a pipeline's messages go through.
"""
