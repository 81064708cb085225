"""The public API of `import swarmd`: a swarm for programs with their own training loop."""
