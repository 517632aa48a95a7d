"""How the ranks are laid out and what lies where: knows mesh axes and roles, not graphs or Lightning."""
