"""The judge's pages for people."""
