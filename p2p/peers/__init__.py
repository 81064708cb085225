"""Knowing and choosing peers: the address book, outbound selection, mDNS, twins."""
