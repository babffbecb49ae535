"""The driver ``kubernetes``: each container is a pod on the invoker's own node."""
