"""Swarms of real `Exchange`s in virtual time (docs/p2p.md)."""
