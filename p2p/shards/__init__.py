"""Cutting a large swarm into shards: size estimates, placement."""
