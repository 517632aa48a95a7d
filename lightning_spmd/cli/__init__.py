"""The command line: ``lightning-spmd fit --config gpt_bytes``."""
