"""The language model: loading, answering, training, exporting. The only folder that imports torch."""

import os

# What MPS cannot compute, the CPU does. torch reads this when it is loaded.
os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
