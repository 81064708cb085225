"""The node's page and its metrics over HTTP, on loopback.

But for opening.py nothing here is loaded before somebody asks for it.
"""
