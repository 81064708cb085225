"""Questions and rewards: curricula, task references, the contained verifier. Imports no torch."""
