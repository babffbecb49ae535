"""The fetch daemon of one host: it brings models from their stores into shared memory, checked, for every container.

``daemon.py`` joins its parts; ``control.py`` answers the invoker; ``fetch_table.py``, ``fetch.py``, ``transfer.py`` and
``chunk_reader.py`` go from all fetches to one thread of one fetch; ``segments.py`` and ``slabs.py`` hold the memory.
``descriptor_sockets.py`` passes descriptors of that memory to containers.
"""
