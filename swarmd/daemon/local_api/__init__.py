"""The running node's interface on this machine: the control API and the status document."""
