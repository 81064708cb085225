"""The model of a checkpoint in use: `swarmd chat`, `serve`, `export` and uploads to a judge."""
