"""`python -m alloclab` is the command line."""

from alloclab.cli import main

if __name__ == "__main__":
    main()
