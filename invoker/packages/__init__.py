"""Packages that a function's requirements.txt asks for: installed once on a host, and kept by their content."""
