"""The fetch daemon of one host: it brings models from their stores into shared memory, checked, for every container.

``daemon.py`` joins its parts; ``control.py`` answers the invoker; ``fetch_table.py``, ``fetch.py`` and ``transfer.py``
(the transfer of one fetch's bytes) go from all fetches to one connection; ``segments.py`` and ``slabs.py`` hold the
memory.  ``descriptor_sockets.py`` passes descriptors of that memory to containers.
"""
