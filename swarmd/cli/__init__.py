"""The command line: parses, calls, prints. `app` is the entry; views show a running node."""
