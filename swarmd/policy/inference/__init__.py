"""Inference engines: decoding with a shared prefix cache, and plug-ins."""
