"""Our verifier against lighteval's, on responses made from gold answers: `python -m scripts.judges`."""
