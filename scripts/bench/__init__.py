"""Speed and memory, measured on this machine: `make bench`, or `python -m scripts.bench`. See docs/speed.md."""
