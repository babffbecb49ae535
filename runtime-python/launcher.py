"""The entry point of an ordinary function's container.  Standard library only: the image needs nothing but Python.

User code never runs in this process; see thaw_runtime/action/proxy.py.
"""

from thaw_runtime.action.proxy import main

if __name__ == "__main__":
    main()
