"""Containers as child processes of one machine, forked from a zygote where that is faster."""
