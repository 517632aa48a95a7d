"""The mesh of ranks and what each holds: knows mesh axes and roles, not graphs or Lightning."""
