"""Simulates swarms of swarmd's real `Exchange` in virtual time (docs/p2p.md)."""
