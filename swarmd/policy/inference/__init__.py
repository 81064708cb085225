"""Inference engines: decoding with a shared prefix cache, plug-ins."""
