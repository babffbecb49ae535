"""Shared code for every process of the platform: lasting threads, an orderly end, and wake-ups."""
