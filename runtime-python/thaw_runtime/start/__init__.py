"""The zygote: a process that has imported everything and forks containers in milliseconds.

The name is Android's.  The invoker calls a container that waits in this way a stem cell, as OpenWhisk does.
"""
