"""The command line: ``lightning-spmd fit --config recipes/gpt_bytes.yaml``."""
