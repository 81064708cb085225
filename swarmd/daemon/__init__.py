"""The daemon process: the p2p member, the control API, supervision of the trainer, the judge's client,
bootstrap nodes.
"""
