"""What the judge's figures prove, in words: for its pages and its JSON."""

from types import MappingProxyType

TIERS = MappingProxyType(
    {
        "reported": (
            "Reported: the node answered over the network. This proves that the holder of the key sent these"
            " answers in time. It proves nothing about a model: a node can work the right answers out without"
            " one."
        ),
        "verified": (
            "Verified: the node uploaded its weights, or named them on a hub, and the judge ran them itself."
            " These weights, named by their SHA-256, scored so on these questions, which were drawn"
            " afterwards. It does not prove that this node trained them."
        ),
    }
)
