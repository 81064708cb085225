"""The files of a model: checked, downloaded, and how far a download is."""
