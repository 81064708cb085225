"""The node's page and its metrics over HTTP; the page listens on loopback only.

The daemon imports only opening.py and comparison.py at its start. The rest is imported when a user asks for
the page, or if the configuration asks for metrics.
"""
