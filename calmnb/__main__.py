"""``python -m calmnb`` is the ``calmnb`` command."""

from calmnb.cli import main

if __name__ == "__main__":
    main()
