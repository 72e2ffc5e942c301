"""`python -m deltalab` is the command `deltalab`."""

from deltalab.cli.app import main

if __name__ == "__main__":
    main()
