"""The zygote's own loop, in a process that has not imported an engine."""

import sys

from thaw_runtime.start.zygote import serve

if __name__ == "__main__":
    serve(sys.argv[1])
