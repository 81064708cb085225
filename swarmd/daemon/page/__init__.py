"""The node's page and its metrics over HTTP, on loopback.

Nothing here is loaded before somebody asks for it, but for opening.py.
"""
