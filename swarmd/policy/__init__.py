"""The language model: loading, answering, training, exporting. The only folder that imports torch."""

import os

# The CPU computes operations that MPS lacks. torch reads this variable when it is loaded.
os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
