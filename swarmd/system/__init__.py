"""The node and the operating system: services, exits of processes, bug reports."""
