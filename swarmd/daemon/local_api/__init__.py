"""What the running node tells and accepts on this machine: the control API, and the status document."""
