"""Inference engines: decoding with a shared prefix cache, continuous batching, plug-ins."""
