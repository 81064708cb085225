"""What the running node tells and takes on this machine: the control API, and the status document."""
