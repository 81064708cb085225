"""The contained verifier: its client, its process and worker, and the containment of the worker."""
