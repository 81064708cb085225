"""Generator processes, data-parallel trainers, weight sync."""
