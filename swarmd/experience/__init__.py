"""Experience: replay pool, sampling and sharing strategies, caps, replay schedule, outlier gate. Pure."""
