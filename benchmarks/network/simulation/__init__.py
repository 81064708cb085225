"""Large swarms in virtual time, over the daemon's own code for pacing and offers (docs/p2p.md)."""
