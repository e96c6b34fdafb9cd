"""`python -m thoughtbubbles` is the `thoughtbubbles` command."""

from thoughtbubbles.cli import main

if __name__ == "__main__":
    main()
