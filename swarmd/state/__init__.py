"""The state folder: its files, metrics.jsonl, logs."""
