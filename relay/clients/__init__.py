"""Connections between two processes of the platform: frames on a socket, HTTP/1.1, and the client of fetchd."""
