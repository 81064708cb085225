"""What is learnt from: the pool, sampling and sharing strategies, caps, replay, outliers. Pure."""
