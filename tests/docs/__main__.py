"""``python -m tests.docs docs/PAGE.md``: the page's Python blocks as one program."""

import argparse
import sys

from tests.docs.pages import blocks_of


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs", description=__doc__)
    parser.add_argument("page", help="from the repository's root: docs/spmd_from_scratch.md")
    page = parser.parse_args().page
    blocks = [block for block in blocks_of(page) if block.language == "python" and block.word != "not run"]
    sys.stdout.write("\n\n".join(block.text for block in blocks))


if __name__ == "__main__":
    main()
