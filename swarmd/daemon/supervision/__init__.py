"""The trainer's process: starts, restarts, and a watch for rounds that stop."""
