"""`python -m headrace`, as torchrun starts it."""

from headrace.cli.main import main

if __name__ == "__main__":
    main()
