"""What `import swarmd` offers: the swarm for a program with a training loop of its own."""
