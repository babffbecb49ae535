"""What a process of the platform needs whatever it does: lasting threads, its orderly end, and wake-ups."""
