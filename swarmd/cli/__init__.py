"""The command line: parses arguments, calls the other parts, prints. `app` is the entry point."""
