"""Questions and rewards: curricula, task references, the contained verifier. Does not import torch."""
