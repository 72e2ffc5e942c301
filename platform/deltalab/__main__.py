"""`python -m deltalab` is the command `platform`."""

from deltalab.cli import main

if __name__ == "__main__":
    main()
