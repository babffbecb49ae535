"""From a call to an instance: routes, the waiting room for calls without one, and the connections to invokers."""
