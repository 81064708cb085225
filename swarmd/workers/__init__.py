"""Worker processes beside the trainer: starting, restarting, messages, the queue of questions."""
