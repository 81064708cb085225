"""The contained verifier: its client, the process, its worker, and what that worker gives up."""
