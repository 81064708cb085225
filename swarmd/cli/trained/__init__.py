"""Use of a checkpoint's model: `swarmd chat`, `serve`, `export` and uploads to a judge."""
