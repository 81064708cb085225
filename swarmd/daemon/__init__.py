"""The daemon process: p2p member, control API, supervision of the trainer, the judge's client."""
