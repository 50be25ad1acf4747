"""`python -m octavo.entrypoints.openai.api_server --model MODEL …`: `octavo serve`, by the name of vLLM's module."""

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
