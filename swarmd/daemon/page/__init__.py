"""The node's page and its metrics over HTTP, on loopback.

Only opening.py is loaded before a user asks for the page or the configuration asks for metrics.
"""
