"""Exporting a trained model: plain transformers or an adapter, model card, upload."""
