"""The language model: loading, answering, training, exporting. The only folder that imports torch."""
