"""The trainer's process: starting, restarting, and detecting that it is stuck."""
