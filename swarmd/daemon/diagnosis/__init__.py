"""Explains why a node is alone or unreachable: some modules collect the facts, pure modules explain them."""
