"""KServe's own servers with models of this platform: the storage initializer for ``thaw://``."""
